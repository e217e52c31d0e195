//! Scratch directories, for data whose digests are not known yet.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use tempfile::TempDir;

use crate::interrupt::Temporary;

/// The parent of scratch directories: `$TMPDIR`, or `/var/tmp`, because `/tmp` may be in memory and
/// images are large.
pub(crate) fn parent() -> PathBuf {
    std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from)
}

/// A scratch directory. Dropping it or a signal that ends the process removes it.
#[derive(Debug)]
pub(crate) struct Scratch(Temporary<TempDir>);

impl Scratch {
    pub(crate) fn new() -> Result<Self> {
        let parent = parent();
        let make = || tempfile::Builder::new().prefix("lazuli-").tempdir_in(&parent);
        let context = || format!("cannot write to scratch directory {}", parent.display());
        Ok(Scratch(Temporary::new(make).with_context(context)?))
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.path().to_owned()
    }
}
