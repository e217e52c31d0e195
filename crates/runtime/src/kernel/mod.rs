//! How the kernel gets to the bytes of an image.
//!
//! Every driver is a directory with the same files: `abi` (bytes of the kernel interface),
//! `session` (the loop that answers the kernel), `mod` (what it is and what it needs), `tests`.

pub mod blobfs;
pub mod errno;
pub mod fanotify;
pub mod fuse;
pub mod mount;
pub mod pages;
pub mod probe;
mod release;
pub(crate) mod threads;
mod tiny_image;

pub use probe::Probe;
