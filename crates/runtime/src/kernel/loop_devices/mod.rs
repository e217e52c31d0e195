//! The driver `loop`: EROFS on loop devices, backed by files of the daemon and, once a blob is
//! complete, by files of the cache.
//!
//! Needs Linux 5.16 or later (EROFS with several devices), loop devices, FUSE, and CAP_SYS_ADMIN.
//!
//! ```text
//! EROFS ─┬─ loop device ── bootstrap
//!        └─ loop device ─┬─ while data arrives: file of this driver's FUSE file system ── ensure
//!                        └─ LOOP_CHANGE_FD when everything is here: file in the cache
//! ```
//!
//! The driver promises: a reader gets checked bytes, waits, or gets EIO. When a blob is complete,
//! its readers and the kernel are alone. Nothing of it fails open: without a daemon every read that
//! would need one fails, nothing of that is remembered, and the next daemon serves the same mounts
//! again.
//!
//! One loop device of a blob serves all images that have it. Every device is free when the last
//! mount of it is gone: the kernel sees to that, whatever happened to the daemon.

pub mod abi;
mod answer;
mod disk;
mod helper;
mod mount;
pub mod probe;
mod session;

pub(super) use self::mount::metadata_disk;
pub use self::{
    disk::Disk,
    helper::run as help,
    mount::{WrongReads, mount, must_be_read_right},
    session::{Left, Session},
};
