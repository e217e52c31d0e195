//! Directories on the host where images of guests are mounted, one for each process.
//!
//! `ROOT/guests` has them. A process holds a lock in its own; what one without it left is removed
//! by the next process.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use anyhow::Result;
use lazuli_runtime::daemon::{Client, Request};

use crate::{Session, daemon, path_context::PathContext as _};

const LOCK: &str = "lock";

/// A directory of this process.
#[derive(Debug)]
pub(in crate::nydusd) struct Scratch {
    pub(in crate::nydusd) directory: PathBuf,
    _lock: File,
}

impl Scratch {
    pub(in crate::nydusd) fn new(session: &Session) -> Result<Self> {
        let parent = session.root.join("guests");
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700).create(&parent).cannot("create", &parent)?;
        let _turn = turn(&parent)?;
        let directory = tempfile::Builder::new().prefix("").tempdir_in(&parent);
        let directory = directory.cannot("create a directory in", &parent)?.keep();
        let path = directory.join(LOCK);
        let lock = File::create(&path).cannot("create", &path)?;
        lock.try_lock().cannot("lock", &path)?;
        Ok(Scratch { directory, _lock: lock })
    }

    /// Removes the directory, in which nothing is mounted any more.
    pub(in crate::nydusd) fn remove(self) -> Result<()> {
        fs::remove_dir_all(&self.directory).cannot("remove", &self.directory)
    }
}

/// Removes what processes left that are gone.
pub(in crate::nydusd) fn sweep(session: &Session) -> Result<()> {
    let parent = session.root.join("guests");
    let mut left = Vec::new();
    {
        let _turn = turn(&parent)?;
        for entry in fs::read_dir(&parent).cannot("read", &parent)? {
            let path = entry.cannot("read", &parent)?.path();
            // One without a lock was not finished.
            let lock = File::create(path.join(LOCK)).cannot("open the lock of", &path)?;
            if lock.try_lock().is_ok() {
                left.push((path, lock));
            }
        }
    }
    if left.is_empty() {
        return Ok(());
    }
    let mut daemon = daemon::connect(session)?;
    for (path, _lock) in left {
        let device = fs::metadata(&path).cannot("read", &path)?.dev();
        unmount_below(&mut daemon, &path, device)?;
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).cannot("remove", &path);
            }
            _ => {}
        }
    }
    Ok(())
}

/// Unmounts every directory below `directory`, which is on `device`, and drops its login. Does not
/// descend into mounted images: they are on other devices.
fn unmount_below(daemon: &mut Client, directory: &Path, device: u64) -> Result<()> {
    for entry in fs::read_dir(directory).cannot("read", directory)? {
        let path = entry.cannot("read", directory)?.path();
        let metadata = fs::symlink_metadata(&path).cannot("read", &path)?;
        if !metadata.is_dir() {
            continue;
        }
        if metadata.dev() == device {
            unmount_below(daemon, &path, device)?;
        }
        daemon.call(&Request::Umount { mountpoint: path, lazy: true })?;
    }
    Ok(())
}

/// Waits until no other process makes or looks for directories.
fn turn(parent: &Path) -> Result<File> {
    let turn = File::open(parent).cannot("open", parent)?;
    turn.lock().cannot("lock", parent)?;
    Ok(turn)
}
