//! The FUSE driver: any kernel, also without root.
//!
//! Each mount point is one [`Session`]: a connection to the kernel and the threads that answer it.
//! [`ImageFilesystem`] turns requests into look-ups in the bootstrap and reads of the cache; it
//! knows nothing of the connection, so that it can serve virtiofs too. Every read of file data that
//! is not in the page cache passes through here, also when the blob is complete: that is what the
//! other drivers are for.
//!
//! The driver promises: a reader gets checked bytes, waits, or gets an error. A failure while one
//! request is handled answers that request with EIO and no other.

pub(super) mod connection;
mod filesystem;
pub(super) mod journal;
mod session;
#[cfg(test)]
mod tests;
mod thread_pool;

pub use filesystem::{BlobReader, ImageFilesystem};
pub use session::{FuseError, HELD, KIND, Left, MountTarget, Session, can_resend, detach};
pub(super) use session::{WITHOUT_ANSWER, create_filesystem};
