//! Errors that keep the mirror from starting.

use std::{
    io,
    path::{Path, PathBuf},
};

/// The mirror cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// A file of the state directory.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A key or certificate file is damaged.
    #[error(
        "{}: {problem}; remove {} and run `lazuli setup mirror` again",
        path.display(),
        path.parent().unwrap_or(path).display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// No certificate could be made.
    #[error("cannot make certificates for the mirror: {problem}")]
    Certificates {
        /// The library's reason.
        problem: String,
    },
    /// An invalid pattern of image names.
    #[error("`{pattern}` names no repositories: {problem}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The problem.
        problem: String,
    },
}

impl MirrorError {
    pub(crate) fn damaged(path: impl Into<PathBuf>, problem: impl ToString) -> Self {
        MirrorError::Damaged { path: path.into(), problem: problem.to_string() }
    }
}

/// Adds the path of a file to errors of the operating system.
pub(crate) trait At<T> {
    /// The same, with errors about `path`.
    fn at(self, path: impl AsRef<Path>) -> Result<T, MirrorError>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, path: impl AsRef<Path>) -> Result<T, MirrorError> {
        self.map_err(|source| MirrorError::Io { path: path.as_ref().to_owned(), source })
    }
}
