//! Errors of keepers, and how a keeper can end.

use std::{io, path::PathBuf};

use lazuli_sys::path_error::PathError;

/// Maximum size of a root directory's path, in bytes. fsconfig(2) takes strings of 255 bytes, and
/// the longest one below the root is `/images/<64 digits>/bootstrap`.
pub(super) const ROOT_LIMIT: usize = 255 - 82;

/// How a keeper ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Nothing is mounted any more.
    Stopped,
    /// Another keeper has taken over.
    Replaced,
}

/// Why there is no keeper.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// Another daemon has this root directory.
    #[error("another daemon serves {}", root.display())]
    Locked {
        /// The root directory.
        root: PathBuf,
    },
    /// Paths below the root directory would be longer than the mount API takes.
    #[error(
        "the state directory {} is too long: the kernel takes paths of {ROOT_LIMIT} bytes there",
        root.display()
    )]
    RootTooLong {
        /// The root directory.
        root: PathBuf,
    },
    /// The worker died before it handed over its descriptors.
    #[error("the worker died before it handed over what its keeper held")]
    Abandoned,
    /// The state directory, or a process.
    #[error("{}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl From<PathError> for KeeperError {
    fn from(PathError { path, source }: PathError) -> Self {
        KeeperError::Io { path, source }
    }
}
