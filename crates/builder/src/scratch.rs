//! The directory of one build.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use tempfile::TempDir;

use crate::error::BuildError;

/// A directory of one build inside the user's scratch directory. Goes when the last clone goes.
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

    /// The error for a problem with a file in here.
    pub(crate) fn failed(&self, problem: io::Error) -> BuildError {
        failed(&self.parent, problem)
    }
}

fn failed(path: &Path, problem: io::Error) -> BuildError {
    BuildError::Scratch { path: path.to_owned(), problem }
}
