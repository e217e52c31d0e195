//! Mounts: made, listed, ended, and taken over from the worker before.

pub(super) mod adopt;
mod bootstrap;
pub(super) mod mount;
pub(super) mod table;
