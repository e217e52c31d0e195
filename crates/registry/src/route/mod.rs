//! Routes: the servers of an image, in the order in which they are asked.

pub(crate) mod api;
pub(crate) mod bundle;
pub(crate) mod dragonfly;
pub mod hosts;
pub mod mirror;
pub(crate) mod options;
pub(crate) mod server;
pub(crate) mod trusted;
