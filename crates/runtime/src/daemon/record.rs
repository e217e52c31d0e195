//! Records of mounts, by which a worker finds those of its predecessor.
//!
//! `ROOT/mounts` has one JSON file per mount point, `ROOT/filesystems` one per EROFS file system. A
//! record is written before its object can be used, and removed after the object is gone. A record
//! without an object is left from a crash between the two, and harmless.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    marker::PhantomData,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use lazuli_image::{Algorithm, Digest};
use lazuli_sys::path_error::At as _;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{
    DaemonError,
    api::{DriverChoice, MountRequest},
};
use crate::kernel::mount::Backing;

/// Something that is recorded.
pub(super) trait Record: Serialize + DeserializeOwned {
    /// The key of the record among others of its kind; fits into a file name.
    fn key(&self) -> String;
}

/// One mount.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct MountRecord {
    /// The mount request.
    pub(super) request: MountRequest,
    /// The manifest to which the image's name resolved.
    pub(super) manifest_digest: Digest,
    /// The driver that was chosen.
    pub(super) driver: DriverChoice,
    /// The reason.
    pub(super) driver_reason: String,
    /// The kernel's name for the file system behind an EROFS mount.
    pub(super) backing: Option<Backing>,
    /// Whether a FUSE mount was made by a version that keeps a journal of requests. Earlier
    /// versions made the kernel check ACLs of every image.
    #[serde(default)]
    pub(super) journal: bool,
}

impl Record for MountRecord {
    fn key(&self) -> String {
        mount_key(&self.request.mountpoint)
    }
}

/// The key of a mount. Mount points may be longer than a file name; their digest is not.
pub(super) fn mount_key(mountpoint: &Path) -> String {
    Algorithm::Blake3.digest(mountpoint.as_os_str().as_encoded_bytes()).hex()
}

/// A directory of records.
#[derive(Debug)]
pub(super) struct Records<T> {
    directory: PathBuf,
    kind: PhantomData<fn() -> T>,
}

impl<T: Record> Records<T> {
    /// Opens or creates the directory.
    pub(super) fn open(directory: PathBuf) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        Ok(Records { directory, kind: PhantomData })
    }

    /// Writes a record, whole or not at all.
    pub(super) fn write(&self, record: &T) -> io::Result<()> {
        let path = self.path(&record.key());
        let partial = path.with_extension("partial");
        fs::write(&partial, serde_json::to_vec_pretty(record)?)?;
        fs::rename(&partial, path)
    }

    /// Writes a record for the owner of the directory alone, and so that it outlasts a power cut.
    pub(super) fn write_secret(&self, record: &T) -> io::Result<()> {
        let path = self.path(&record.key());
        let partial = path.with_extension("partial");
        let mut options = OpenOptions::new();
        let mut file =
            options.write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
        file.write_all(&serde_json::to_vec(record)?)?;
        file.sync_all()?;
        fs::rename(&partial, path)?;
        File::open(&self.directory)?.sync_all()
    }

    /// Removes a record.
    pub(super) fn remove(&self, key: &str) -> io::Result<()> {
        match fs::remove_file(self.path(key)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// All records that can be read; others are logged and left alone.
    pub(super) fn all(&self) -> io::Result<Vec<T>> {
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

    fn path(&self, key: &str) -> PathBuf {
        self.directory.join(format!("{key}.json"))
    }
}

/// The recorded mounts below `root`.
pub(super) fn recorded_mounts(root: &Path) -> Result<Vec<MountRecord>, DaemonError> {
    let path = root.join("mounts");
    let records = Records::open(path.clone()).and_then(|records| records.all());
    Ok(records.at(path)?)
}
