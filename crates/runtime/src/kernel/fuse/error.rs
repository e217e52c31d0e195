//! Errors of FUSE mounts.

use std::{io, path::PathBuf};

use rustix::io::Errno;

/// Why a session could not be started or ended.
#[derive(Debug, thiserror::Error)]
pub enum FuseError {
    /// `/dev/fuse` is missing or may not be opened.
    #[error("/dev/fuse: {0}")]
    Device(#[source] io::Error),
    /// There is no memory for the journal.
    #[error("memory for requests that are not answered yet: {0}")]
    Journal(#[source] io::Error),
    /// The kernel refused the mount.
    #[error("mounting at {}: {error}", mountpoint.display())]
    Mount {
        /// Where.
        mountpoint: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// `fusermount3`, which mounts for users other than root, refused.
    #[error("mounting at {} with fusermount3: {reason}", mountpoint.display())]
    Helper {
        /// Where.
        mountpoint: PathBuf,
        /// Why.
        reason: String,
    },
    /// The mount exists, but no thread can be started to serve it.
    #[error("starting a thread for {}: {error}", mountpoint.display())]
    Thread {
        /// The mount.
        mountpoint: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// The connection of an earlier process cannot be served.
    #[error("serving {} again: {error}", mountpoint.display())]
    Resume {
        /// The mount.
        mountpoint: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// The mount is in use, and stays.
    #[error("unmounting {}: {}", mountpoint.display(), io::Error::from(Errno::BUSY))]
    Busy {
        /// The mount.
        mountpoint: PathBuf,
    },
    /// The mount could not be removed.
    #[error("unmounting {}: {error}", mountpoint.display())]
    Unmount {
        /// The mount.
        mountpoint: PathBuf,
        /// Why.
        error: io::Error,
    },
}
