//! Which servers may be asked for an image, and in which order.

pub(crate) mod api;
pub(crate) mod dragonfly;
pub mod hosts;
pub mod mirror;
pub(crate) mod options;
pub(crate) mod server;
pub(crate) mod trusted;
