//! The directory of one build.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use tempfile::TempDir;

use crate::error::BuildError;

/// The temporary directory of one build, inside the user's scratch directory. Removed with the last
/// clone.
#[derive(Clone, Debug)]
pub(crate) struct Scratch {
    directory: Arc<TempDir>,
    parent: Arc<Path>,
}

impl Scratch {
    pub(crate) fn new(parent: &Path) -> Result<Self, BuildError> {
        let directory = tempfile::Builder::new().prefix("lazuli-build-").tempdir_in(parent);
        let directory = directory.map_err(|problem| failed(parent, problem))?;
        Ok(Scratch { directory: Arc::new(directory), parent: parent.into() })
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Wraps an error about a file in this directory.
    pub(crate) fn failed(&self, problem: io::Error) -> BuildError {
        failed(&self.parent, problem)
    }
}

fn failed(path: &Path, problem: io::Error) -> BuildError {
    BuildError::Scratch { path: path.to_owned(), problem }
}
