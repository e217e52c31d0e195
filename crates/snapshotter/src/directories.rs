//! The directories of snapshots, and what is left of them.

use std::{
    collections::HashSet,
    fs::{self, DirBuilder, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{SnapshotError, store::Usage};

type Result<T> = std::result::Result<T, SnapshotError>;

/// `ROOT/snapshots`
#[derive(Debug)]
pub(crate) struct Directories {
    root: PathBuf,
    /// Makes names in the trash that nobody had before.
    thrown: AtomicU64,
    /// Held by whoever empties the trash.
    emptying: Mutex<()>,
}

fn at<T>(path: &Path, result: io::Result<T>) -> Result<T> {
    result.map_err(|source| SnapshotError::Io { path: path.to_owned(), source })
}

impl Directories {
    /// Opens or creates `root`.
    pub(crate) fn open(root: &Path) -> Result<Self> {
        let trash = root.join("trash");
        at(&trash, DirBuilder::new().recursive(true).mode(0o700).create(&trash))?;
        let root = root.to_owned();
        Ok(Directories { root, thrown: AtomicU64::new(0), emptying: Mutex::default() })
    }

    /// The database's file.
    pub(crate) fn metadata(&self) -> PathBuf {
        self.root.join("metadata.redb")
    }

    /// Where the files of a snapshot are.
    pub(crate) fn fs(&self, number: u64) -> PathBuf {
        self.root.join(number.to_string()).join("fs")
    }

    /// What overlayfs needs beside the files of an active snapshot.
    pub(crate) fn work(&self, number: u64) -> PathBuf {
        self.root.join(number.to_string()).join("work")
    }

    /// Makes the directory of a snapshot. Its root belongs to whom the root of the parent belongs to, since a
    /// container sees the owner of the uppermost directory.
    pub(crate) fn make(&self, number: u64, parent: Option<u64>, active: bool) -> Result<()> {
        let directory = self.root.join(number.to_string());
        if directory.exists() {
            // Of a transaction that failed, or that a crash cut short.
            self.throw_away(number)?;
        }
        at(&directory, DirBuilder::new().mode(0o700).create(&directory))?;
        let fs = self.fs(number);
        at(&fs, fs::create_dir(&fs))?;
        // Whatever the umask is.
        at(&fs, fs::set_permissions(&fs, Permissions::from_mode(0o755)))?;
        if let Some(parent) = parent {
            let parent = self.fs(parent);
            let owner = at(&parent, fs::metadata(&parent))?;
            if (owner.uid(), owner.gid()) != (0, 0) {
                at(&fs, chown(&fs, Some(owner.uid()), Some(owner.gid())))?;
            }
        }
        if active {
            let work = self.work(number);
            at(&work, fs::create_dir(&work))?;
            at(&work, fs::set_permissions(&work, Permissions::from_mode(0o711)))?;
        }
        Ok(())
    }

    /// Moves the directory of a snapshot away, in the same time however much is in it.
    pub(crate) fn throw_away(&self, number: u64) -> Result<()> {
        let path = self.root.join(number.to_string());
        loop {
            let name = self.thrown.fetch_add(1, Ordering::Relaxed);
            let trash = self.root.join("trash").join(format!("{number}-{name}"));
            // An empty directory would be replaced, a full one of an earlier process is an error.
            if trash.exists() {
                continue;
            }
            return match fs::rename(&path, trash) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                result => at(&path, result),
            };
        }
    }

    /// Directories of no snapshot, from a crash.
    pub(crate) fn strays(&self, known: &HashSet<u64>) -> Result<Vec<u64>> {
        let mut strays = Vec::new();
        for entry in at(&self.root, fs::read_dir(&self.root))? {
            let name = at(&self.root, entry)?.file_name();
            let number = name.to_str().and_then(|name| name.parse().ok());
            strays.extend(number.filter(|number| !known.contains(number)));
        }
        Ok(strays)
    }

    /// Deletes what was thrown away; may take long.
    pub(crate) fn empty_trash(&self) -> Result<()> {
        let _emptying = self.emptying.lock().unwrap_or_else(PoisonError::into_inner);
        let trash = self.root.join("trash");
        for entry in at(&trash, fs::read_dir(&trash))? {
            let path = at(&trash, entry)?.path();
            at(&path, fs::remove_dir_all(&path))?;
        }
        Ok(())
    }

    /// What the files of a snapshot take, hard links once.
    pub(crate) fn usage(&self, number: u64) -> Result<Usage> {
        let (mut usage, mut seen) = (Usage::default(), HashSet::new());
        let mut paths = vec![self.fs(number)];
        while let Some(path) = paths.pop() {
            let metadata = match fs::symlink_metadata(&path) {
                // A container goes on while it is looked at.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => at(&path, other)?,
            };
            if !seen.insert((metadata.dev(), metadata.ino())) {
                continue;
            }
            usage.inodes += 1;
            // stat(2) counts in units of 512 bytes, whatever the file system's block is.
            usage.size += metadata.blocks() * 512;
            if metadata.is_dir() {
                let entries = match fs::read_dir(&path) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    other => at(&path, other)?,
                };
                for entry in entries {
                    paths.push(at(&path, entry)?.path());
                }
            }
        }
        Ok(usage)
    }
}

#[cfg(test)]
impl Directories {
    /// What somebody holds who empties the trash.
    pub(crate) fn hold_emptying(&self) -> std::sync::MutexGuard<'_, ()> {
        self.emptying.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
