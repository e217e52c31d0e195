//! Directories on the host where images of guests are mounted, one for each process.
//!
//! `ROOT/guests` has them. A process holds a lock in its own; what one without it left is removed
//! by the next process.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};
use lazuli_runtime::daemon::{Request, Response};

use crate::{Session, daemon, path_context::PathContext as _};

const LOCK: &str = "lock";

/// A directory of this process.
#[derive(Debug)]
pub(in crate::nydusd) struct Scratch {
    pub(in crate::nydusd) directory: PathBuf,
    _lock: File,
}

impl Scratch {
    /// Removes what other processes left, and makes a directory.
    pub(in crate::nydusd) fn claim(session: &Session) -> Result<Self> {
        let parent = session.root.join("guests");
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700).create(&parent).cannot("create", &parent)?;
        // One at a time, so that no directory is seen before it is locked.
        let turn = File::open(&parent).cannot("open", &parent)?;
        turn.lock().cannot("lock", &parent)?;
        for entry in fs::read_dir(&parent).cannot("read", &parent)? {
            let path = entry.cannot("read", &parent)?.path();
            let lock = File::open(path.join(LOCK));
            if lock.is_ok_and(|lock| lock.try_lock().is_ok())
                && let Err(error) = remove(session, &path)
            {
                tracing::warn!(path = %path.display(), error = format!("{error:#}"), "it stays");
            }
        }
        let directory = parent.join(std::process::id().to_string());
        DirBuilder::new().mode(0o700).create(&directory).cannot("create", &directory)?;
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

/// Removes a directory and what is mounted in it. Images are read-only: what cannot be unmounted is
/// not deleted either.
fn remove(session: &Session, directory: &Path) -> Result<()> {
    let mut daemon = daemon::connect(session)?;
    let Response::Status(status) = daemon.call(&Request::Status)? else {
        bail!("the daemon is of another version")
    };
    for mount in status.mounts {
        if mount.mountpoint.starts_with(directory) {
            daemon.call(&Request::Umount { mountpoint: mount.mountpoint, lazy: true })?;
        }
    }
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).cannot("remove", directory)
        }
        _ => Ok(()),
    }
}
