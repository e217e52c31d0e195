//! Where compressed chunks wait until it is known which blob they belong to.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
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
        let directory = tempfile::Builder::new().prefix("build-").tempdir_in(parent);
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

/// A file that many threads append to, in no particular order.
#[derive(Debug)]
pub(crate) struct Spool {
    file: File,
    end: AtomicU64,
    scratch: Scratch,
}

impl Spool {
    pub(crate) fn new(scratch: &Scratch) -> Result<Self, BuildError> {
        let file =
            tempfile::tempfile_in(scratch.directory.path()).map_err(|p| scratch.failed(p))?;
        Ok(Spool { file, end: AtomicU64::new(0), scratch: scratch.clone() })
    }

    /// Writes `bytes` and says where.
    pub(crate) fn append(&self, bytes: &[u8]) -> Result<u64, BuildError> {
        let at = self.end.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.file.write_all_at(bytes, at).map_err(|problem| self.scratch.failed(problem))?;
        Ok(at)
    }

    /// Reads what was written at `at`.
    pub(crate) fn read(&self, bytes: &mut [u8], at: u64) -> Result<(), BuildError> {
        self.file.read_exact_at(bytes, at).map_err(|problem| self.scratch.failed(problem))
    }
}
