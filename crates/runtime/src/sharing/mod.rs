//! Fair sharing between the images of a node.
//!
//! Each scarce resource is shared out by [`Account`]: memory for answers, processors, requests to a
//! server, waiting events, and the disk.

pub(crate) mod account;
pub(crate) mod priority_semaphore;
pub(crate) mod workers;

pub use account::{Account, Owner};
