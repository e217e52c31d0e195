//! A directory of blobs and bootstraps, each under its SHA-256.

use std::{
    fs::{self, File, Permissions},
    io::{self, Read},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use lazuli_image::{Algorithm, Digest};
use tempfile::NamedTempFile;

use crate::path_context::PathContext as _;

/// The option that names it.
#[derive(Debug, clap::Args)]
pub(super) struct Directory {
    /// Directory of blobs and bootstraps, which are files called by their SHA-256
    #[arg(short = 'D', long, value_name = "blob-dir")]
    blob_dir: Option<PathBuf>,
}

impl Directory {
    pub(super) fn path(&self) -> Option<&Path> {
        self.blob_dir.as_deref()
    }

    /// Writes a bootstrap to `path`, or into the directory if there is none. Returns its path.
    pub(super) fn write_bootstrap(&self, path: Option<&Path>, bytes: &[u8]) -> Result<PathBuf> {
        let Some(path) = path else {
            let directory = self.path().context("neither --bootstrap nor --blob-dir")?;
            return store(directory, &Algorithm::Sha256.digest(bytes), bytes);
        };
        fs::write(path, bytes).cannot("write", path)?;
        Ok(path.to_owned())
    }
}

/// Writes a file that appears whole, and returns its path.
pub(super) fn store(directory: &Path, id: &Digest, mut content: impl Read) -> Result<PathBuf> {
    let path = directory.join(id.hex());
    let mut write = || {
        let mut file = NamedTempFile::new_in(directory)?;
        io::copy(&mut content, &mut file)?;
        // Others may read it, as with a path.
        file.as_file().set_permissions(Permissions::from_mode(0o644))?;
        file.persist(&path)?;
        io::Result::Ok(())
    };
    write().cannot("write", &path)?;
    Ok(path)
}

/// Opens the blob `id`.
pub(super) fn open(directory: &Path, id: &Digest) -> Result<File> {
    let path = directory.join(id.hex());
    File::open(&path).cannot("read", &path)
}
