//! Errors of the operating system with the path that they are about.

use std::{
    io,
    path::{Path, PathBuf},
};

/// The operating system's error about a path.
#[derive(Debug, thiserror::Error)]
#[error("{}", path.display())]
pub struct PathError {
    /// The file or directory.
    pub path: PathBuf,
    /// The operating system's reason.
    pub source: io::Error,
}

/// Adds a path to errors.
pub trait At<T> {
    /// The same, with errors about `path`.
    fn at(self, path: impl AsRef<Path>) -> Result<T, PathError>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, path: impl AsRef<Path>) -> Result<T, PathError> {
        self.map_err(|error| PathError { path: path.as_ref().to_owned(), source: error.into() })
    }
}
