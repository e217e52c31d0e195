//! Errors that keep the mirror from starting.

use std::{io, path::PathBuf};

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
    /// A key or certificate is not what was written.
    #[error(
        "{}: {problem}; remove {} and run `lazuli setup mirror` again",
        path.display(),
        path.parent().unwrap_or(path).display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// No certificate could be made.
    #[error("cannot make certificates for the mirror: {problem}")]
    Certificates {
        /// The library's reason.
        problem: String,
    },
    /// A pattern of names is none.
    #[error("`{pattern}` names no repositories: {problem}")]
    Pattern {
        /// What was given.
        pattern: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl MirrorError {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| MirrorError::Io { path, source }
    }

    pub(crate) fn damaged(path: impl Into<PathBuf>, problem: impl ToString) -> Self {
        MirrorError::Damaged { path: path.into(), problem: problem.to_string() }
    }
}
