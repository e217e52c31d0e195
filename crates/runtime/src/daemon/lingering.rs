//! The EROFS mounts of images, and what is left of them after the last unmount.
//!
//! A file system lives as long as anybody uses it: an overlay mount on top, another mount
//! namespace, an open file. Without marks on the files behind it such a user would read holes as zeros, so the
//! marks stay until the kernel says that the file system is gone.

use std::{
    mem,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use lazuli_image::Digest;

use crate::kernel::{
    fanotify::Watch,
    mount::{Backing, Erofs},
};

/// How long the kernel may take to take a file system down that nobody uses; milliseconds in practice.
const PATIENCE: Duration = Duration::from_millis(300);

/// The one EROFS mount of an image, and the marks on the files behind it.
#[derive(Debug)]
pub(super) struct ErofsMount {
    pub(super) erofs: Erofs,
    watches: Vec<Watch>,
    image: Digest,
    lingering: Arc<Lingering>,
}

impl ErofsMount {
    pub(super) fn new(
        erofs: Erofs,
        watches: Vec<Watch>,
        image: Digest,
        lingering: Arc<Lingering>,
    ) -> Self {
        ErofsMount { erofs, watches, image, lingering }
    }

    /// Events about the image's blobs.
    pub(super) fn events(&self) -> u64 {
        self.watches.iter().map(Watch::events).sum()
    }
}

impl Drop for ErofsMount {
    fn drop(&mut self) {
        let watches = mem::take(&mut self.watches);
        let backing = self.erofs.backing().clone();
        self.lingering.lock().push(Remains { image: self.image, backing, watches });
    }
}

/// File systems whose mounts are gone.
#[derive(Debug, Default)]
pub(super) struct Lingering(Mutex<Vec<Remains>>);

#[derive(Debug)]
struct Remains {
    image: Digest,
    backing: Backing,
    watches: Vec<Watch>,
}

impl Lingering {
    /// Lets go of those that nobody uses any more.
    pub(super) fn sweep(&self) {
        let mut all = self.lock();
        let (alive, gone) = mem::take(&mut *all).into_iter().partition(|r| r.backing.is_alive());
        *all = alive;
        drop(all);
        // Removing marks asks the kernel; nobody has to wait for that.
        drop::<Vec<Remains>>(gone);
    }

    /// Images that somebody still uses; waits a moment for those that are just going. Blocks.
    pub(super) fn settle(&self) -> Vec<Digest> {
        let started = Instant::now();
        loop {
            self.sweep();
            let images: Vec<_> = self.lock().iter().map(|remains| remains.image).collect();
            if images.is_empty() || started.elapsed() > PATIENCE {
                return images;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Cuts the files behind them off, for the end of the process: reads of what the kernel has not cached
    /// fail with EIO then, instead of showing holes.
    pub(super) fn cut_off(&self) {
        for remains in mem::take(&mut *self.lock()) {
            tracing::warn!(image = %remains.image, "still in use: its readers get errors now");
            remains.watches.into_iter().for_each(Watch::cut_off);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Remains>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Cuts off a blob's file without a [`Watch`]: for mounts of an earlier daemon that cannot be served again.
pub(super) fn cut_off_file(path: &Path) {
    let cut = std::fs::File::options().write(true).open(path).and_then(|file| file.set_len(0));
    if let Err(error) = cut {
        tracing::error!(path = %path.display(), %error, "readers may see holes");
    }
}
