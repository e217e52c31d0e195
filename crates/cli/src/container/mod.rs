//! Running a container on a mounted image: overlayfs for writes, runc for the process.

mod bundle;
pub(crate) mod changes;
mod confine;
mod program;
mod seccomp;
mod spec;
mod user;

pub(crate) use bundle::Bundle;
pub(crate) use confine::{DEFAULT_PIDS, Isolation, Limits, Network};
pub(crate) use program::look_up;
pub(crate) use spec::{ImageProcess, Stdio, bundle_config};
pub(crate) use user::User;
