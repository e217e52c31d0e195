//! Running a container on a mounted image: overlayfs for writes, runc for the process.

mod bundle;
mod program;
mod spec;
mod user;

pub(crate) use bundle::Bundle;
pub(crate) use program::look_up;
pub(crate) use spec::{ImageProcess, Network, bundle_config};
pub(crate) use user::User;
