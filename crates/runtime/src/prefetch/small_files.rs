//! Small files in a directory of the state, named by digests. The oldest is removed when there are
//! too many.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt as _,
    path::PathBuf,
    time::SystemTime,
};

use lazuli_image::Digest;

/// Files that are kept in one directory. They take 4 KiB of the disk each, mostly.
const KEPT: usize = 4096;

#[derive(Debug)]
pub(super) struct SmallFiles(pub(super) PathBuf);

impl SmallFiles {
    /// The content of a file, if it exists and can be read.
    pub(super) fn get(&self, name: &Digest) -> Option<Vec<u8>> {
        let path = self.path(name);
        match fs::read(&path) {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot read it");
                None
            }
        }
    }

    /// Writes a file, replacing an earlier one.
    pub(super) fn put(&self, name: &Digest, bytes: &[u8]) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
        let path = self.path(name);
        if !path.exists() {
            self.make_room()?;
        }
        // Not synced: a file that a power cut damages is ignored.
        let partial = path.with_extension("partial");
        fs::write(&partial, bytes)?;
        fs::rename(&partial, path)
    }

    pub(super) fn path(&self, name: &Digest) -> PathBuf {
        self.0.join(name.hex())
    }

    fn make_room(&self) -> io::Result<()> {
        let entries = fs::read_dir(&self.0)?.collect::<Result<Vec<_>, _>>()?;
        if entries.len() < KEPT {
            return Ok(());
        }
        let age = |entry: &fs::DirEntry| {
            entry.metadata().and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
        };
        match entries.iter().min_by_key(|entry| age(entry)) {
            Some(oldest) => fs::remove_file(oldest.path()),
            None => Ok(()),
        }
    }
}
