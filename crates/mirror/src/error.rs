//! Errors that keep the mirror from starting.

use std::{io, path::PathBuf};

use lazuli_sys::path_error::PathError;

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

impl From<PathError> for MirrorError {
    fn from(PathError { path, source }: PathError) -> Self {
        MirrorError::Io { path, source }
    }
}
