//! The fanotify driver: EROFS over sparse files, filled when the kernel is about to read them.
//!
//! Needs Linux 6.15 or later (pre-content events came with 6.14, file-backed EROFS with 6.12; 6.15
//! is the first where both work together), CAP_SYS_ADMIN, and a cache on a file system with
//! pre-content events, such as ext4.
//!
//! The driver promises: a reader gets checked bytes, waits, or gets EIO. When a blob is complete,
//! its mark is removed, and from then on the kernel serves its readers alone.
//!
//! ```text
//! CachedBlob (file open, full size) ─▶ Session::watch (mark) ─▶ mount (kernel opens the file)
//!                                               └────────── mark goes when complete ◀──────┘
//! ```
//!
//! The kernel lets readers through to the holes when no process listens. So a [`Watch`] has to
//! outlive every use of its mount, see [`Backing::is_alive`](super::mount::Backing::is_alive), and
//! the [`Session`] every watch.

pub mod abi;
mod answer;
mod groups;
mod journal;
mod listener;
mod mount;
pub(super) mod probe;
mod session;
mod slots;
mod watch;

#[cfg(test)]
mod tests;

pub use self::{
    journal::{Journal, Unanswered},
    mount::mount,
    session::{Handover, Session, SessionError, most_unanswered},
    watch::Watch,
};
