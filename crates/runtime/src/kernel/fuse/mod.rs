//! The FUSE driver, for any kernel, even without root.
//!
//! Each mount point is one [`Session`]: a connection to the kernel and the threads that answer it.
//! [`ImageFilesystem`] turns requests into look-ups in the bootstrap and reads of the cache; it
//! knows nothing of the connection, so that it can serve virtiofs too. Every read of file data that
//! is not in the page cache passes through here, also when the blob is complete: that is what the
//! other drivers are for.
//!
//! The driver promises: a reader gets checked bytes, waits, or gets an error. A failure while one
//! request is handled answers that request with EIO and no other.

mod answer;
pub(super) mod connection;
mod error;
mod filesystem;
pub(super) mod journal;
mod mount;
pub(super) mod probe;
mod session;
#[cfg(test)]
mod tests;
mod threads;
mod xattr_names;

pub(super) use answer::{FileServer, WITHOUT_ANSWER};
pub use error::FuseError;
pub(super) use filesystem::FOREVER;
pub use filesystem::{BlobReader, ImageFilesystem};
pub use mount::{KIND, detach};
pub(super) use mount::{Writes, create_filesystem};
pub use probe::can_resend;
pub use session::{HELD, Left, MountPoint, MountTarget, Session};
