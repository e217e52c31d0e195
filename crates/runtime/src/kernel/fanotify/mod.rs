//! The fanotify driver: EROFS over sparse files, filled when the kernel is about to read them.
//!
//! Needs Linux 6.15 or later (pre-content events came with 6.14, file-backed EROFS with 6.12; 6.15
//! is the first where both work together), CAP_SYS_ADMIN, and a cache on a file system with
//! pre-content events, such as ext4.
//!
//! The driver promises: a reader gets checked bytes, waits, or gets EIO. When a blob is complete
//! its mark goes, and from then on its readers and the kernel are alone.
//!
//! ```text
//! CachedBlob (file open, full size) ─▶ Session::watch (mark) ─▶ mount (kernel opens the file)
//!                                               └────────── mark goes when complete ◀──────┘
//! ```
//!
//! The kernel lets readers through to the holes when nobody listens. So a [`Watch`] has to outlive
//! every use of its mount, see [`Backing::is_alive`](super::mount::Backing::is_alive), and the
//! [`Session`] every watch.

pub mod abi;
mod groups;
mod journal;
mod listener;
mod pending;
pub(super) mod probe;
mod session;
mod shares;
mod watch;

#[cfg(test)]
mod tests;

use std::path::Path;

pub use self::{
    journal::{Journal, Unanswered},
    session::{Handover, Session, SessionError, most_unanswered},
    watch::Watch,
};
use super::mount::{Erofs, MountError};

/// Mounts the image `bootstrap` on the watched files, one for each of its blobs in the same order.
pub fn mount(bootstrap: &Path, watches: &mut [Watch]) -> Result<Erofs, MountError> {
    let devices: Vec<_> = watches.iter().map(Watch::file).collect();
    let erofs = Erofs::mount(bootstrap, &devices)?;
    watches.iter_mut().for_each(Watch::mounted);
    Ok(erofs)
}
