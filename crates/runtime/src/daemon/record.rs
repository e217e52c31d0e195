//! What is mounted, on disk: how a daemon finds its mounts again after a restart.
//!
//! One JSON file per mount point in `ROOT/mounts`, written before the mount is made and removed
//! after it is gone. A record without a mount is left from a crash between the two, and harmless.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use lazuli_image::{Algorithm, Digest};
use serde::{Deserialize, Serialize};

use super::api::{DriverChoice, MountRequest};
use crate::kernel::mount::Backing;

/// One mount.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct MountRecord {
    /// What was asked for.
    pub(super) request: MountRequest,
    /// What the image's name meant then.
    pub(super) manifest_digest: Digest,
    /// What was chosen then.
    pub(super) driver: DriverChoice,
    /// Why.
    pub(super) driver_reason: String,
    /// What the kernel calls the file system behind an EROFS mount.
    pub(super) backing: Option<Backing>,
    /// The files behind an EROFS mount.
    pub(super) devices: Vec<PathBuf>,
}

/// The directory of records.
#[derive(Debug)]
pub(super) struct Records {
    directory: PathBuf,
}

impl Records {
    /// Opens or creates the directory.
    pub(super) fn open(directory: PathBuf) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        Ok(Records { directory })
    }

    /// Writes the record of a mount point, whole or not at all.
    pub(super) fn write(&self, record: &MountRecord) -> io::Result<()> {
        let path = self.path(&record.request.mountpoint);
        let partial = path.with_extension("partial");
        fs::write(&partial, serde_json::to_vec_pretty(record)?)?;
        fs::rename(partial, path)
    }

    /// Forgets a mount point.
    pub(super) fn remove(&self, mountpoint: &Path) -> io::Result<()> {
        match fs::remove_file(self.path(mountpoint)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// All records that can be read; others are logged and left alone.
    pub(super) fn all(&self) -> io::Result<Vec<MountRecord>> {
        let mut records = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?)) {
                Ok(record) => records.push(record),
                Err(error) => tracing::warn!(record = %path.display(), %error, "unreadable"),
            }
        }
        Ok(records)
    }

    fn path(&self, mountpoint: &Path) -> PathBuf {
        // Mount points may be longer than a file name; their digest is not.
        let name = Algorithm::Blake3.digest(mountpoint.as_os_str().as_encoded_bytes());
        self.directory.join(format!("{}.json", name.hex()))
    }
}
