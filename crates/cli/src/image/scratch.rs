//! Scratch directories, for data whose digests are not known yet.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use tempfile::TempDir;

use crate::interrupt::{self, Undo};

/// The parent of scratch directories: `$TMPDIR`, or `/var/tmp`, because `/tmp` may be in memory and
/// images are large.
pub(crate) fn parent() -> PathBuf {
    std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from)
}

/// A scratch directory. Dropping it or a signal that ends the process removes it.
#[derive(Debug)]
pub(crate) struct Scratch {
    // Dropped first, so that a signal meanwhile still removes the directory.
    directory: TempDir,
    _undo: Undo,
}

impl Scratch {
    pub(crate) fn new() -> Result<Self> {
        let parent = parent();
        let directory = tempfile::Builder::new().prefix("lazuli-").tempdir_in(&parent);
        let context = || format!("cannot write to scratch directory {}", parent.display());
        let directory = directory.with_context(context)?;
        let undo = interrupt::remove(directory.path());
        Ok(Scratch { directory, _undo: undo })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().to_owned()
    }
}
