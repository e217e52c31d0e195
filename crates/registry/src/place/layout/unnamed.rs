//! Blobs that were pushed and that no manifest names yet.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::fs::{FlockOperation, flock};

/// Removes the blobs of an abandoned push when it is dropped.
///
/// A push holds a shared lock on the directory from before it checks which blobs exist until its
/// manifest names them. Blobs are removed only under an exclusive lock, so no push loses a blob
/// that it has seen; while another push runs, they stay.
#[derive(Debug, Default)]
pub(super) struct Unnamed(Mutex<Push>);

#[derive(Debug, Default)]
struct Push {
    lock: Option<File>,
    blobs: Vec<PathBuf>,
}

impl Unnamed {
    /// Holds the lock on `directory` from now on.
    pub(super) fn begin(&self, directory: &Path) -> io::Result<()> {
        let mut push = self.push();
        if push.lock.is_none() {
            let lock = File::open(directory)?;
            flock(&lock, FlockOperation::LockShared)?;
            push.lock = Some(lock);
        }
        Ok(())
    }

    /// Notes a blob that was not there before.
    pub(super) fn add(&self, blob: PathBuf) {
        self.push().blobs.push(blob);
    }

    /// A manifest names them now.
    pub(super) fn named(&self) {
        let mut push = self.push();
        push.blobs.clear();
        push.lock = None;
    }

    fn push(&self) -> MutexGuard<'_, Push> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Push {
    fn drop(&mut self) {
        let Some(lock) = self.lock.take().filter(|_| !self.blobs.is_empty()) else { return };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            for blob in &self.blobs {
                // A blob that cannot be removed only takes space.
                let _ = fs::remove_file(blob);
            }
        }
    }
}
