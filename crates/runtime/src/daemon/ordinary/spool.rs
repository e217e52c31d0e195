//! Stored bytes of a layer that is being pulled, on disk, so that an interrupted pull can be
//! resumed.
//!
//! They are read again from the start, and trusted only as part of a layer with the right digest: a
//! power cut, or a hostile registry, costs only time. Layers in other repositories have spools of
//! their own.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek as _, SeekFrom, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::PathBuf,
};

/// A spool that no other pull uses.
#[derive(Debug)]
pub(super) struct Spool {
    path: PathBuf,
    file: File,
    /// Bytes that an earlier pull has left.
    held: u64,
}

impl Spool {
    /// Opens or creates the file at `path`, for a layer of `size` bytes. `None` while another
    /// process has it open.
    pub(super) fn open(path: PathBuf, size: u64) -> io::Result<Option<Self>> {
        let mut options = OpenOptions::new();
        let options = options.read(true).append(true).create(true).mode(0o600);
        let (file, held) = loop {
            let file = options.open(&path)?;
            if file.try_lock().is_err() {
                return Ok(None);
            }
            let opened = file.metadata()?;
            // A pull that has ended in between has taken the file away.
            if fs::metadata(&path).is_ok_and(|there| there.ino() == opened.ino()) {
                break (file, opened.len());
            }
        };
        let mut spool = Spool { held, path, file };
        if spool.held > size {
            spool.clear()?;
        }
        Ok(Some(spool))
    }

    /// Bytes that need not be fetched.
    pub(super) fn held(&self) -> u64 {
        self.held
    }

    /// Reads them.
    pub(super) fn read_held(&self) -> io::Result<impl Read + Send + use<>> {
        // Not a duplicate, which would have its position in common with this one.
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(0))?;
        Ok(file.take(self.held))
    }

    /// Appends bytes.
    pub(super) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    /// Begins anew.
    pub(super) fn clear(&mut self) -> io::Result<()> {
        self.held = 0;
        self.file.set_len(0)
    }

    /// Removes the spool: the layer is complete, or its digest is wrong.
    pub(super) fn remove(self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "a spool stays for a while");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spool_is_continued_by_one_pull_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let open = |size| Spool::open(directory.path().join("layer"), size).unwrap();
        let mut first = open(10).unwrap();
        first.append(b"abc").unwrap();
        assert!(open(10).is_none());
        drop(first);
        let mut second = open(10).unwrap();
        let mut held = String::new();
        second.read_held().unwrap().read_to_string(&mut held).unwrap();
        assert_eq!((held.as_str(), second.held()), ("abc", 3));
        second.append(b"def").unwrap();
        drop(second);
        assert_eq!(open(10).unwrap().held(), 6);
        assert_eq!(open(5).unwrap().held(), 0, "it has more than the layer");
        open(10).unwrap().remove();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
