//! Limits the threads of a process's mounts, and shares them between images.
//!
//! A read of missing data holds its thread until the data is there. An image whose registry hangs,
//! with many mounts and many readers, takes a thread for each of them, and a machine, a control
//! group or a pod has a limit for threads.
//!
//! ```text
//! the mount has less than MINIMUM threads     one more
//! the image has less than its share           one more, if the process has less than MOST
//! it has its share                            one more, if an eighth of MOST is left
//! ```

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard},
};

use lazuli_image::Digest;

use crate::sync::lock;

/// Threads that each mount may have in any case: enough for look-ups and hits while some reads
/// wait.
pub(super) const MINIMUM: usize = 8;

/// Threads of all mounts above that. One costs some 50 KiB.
const MOST: usize = 2048;

/// One in this many threads is kept for images with less than their share.
const RESERVE: usize = 8;

/// The threads of this process.
pub(super) static THREADS: ThreadPool = ThreadPool::new(MOST);

/// See the module.
#[derive(Debug)]
pub(super) struct ThreadPool {
    most: usize,
    taken: Mutex<Option<Taken>>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    /// No image is without any.
    images: HashMap<Digest, usize>,
}

/// Leave to have a thread, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Leave {
    pool: &'static ThreadPool,
    image: Digest,
}

impl ThreadPool {
    const fn new(most: usize) -> Self {
        ThreadPool { most, taken: Mutex::new(None) }
    }

    /// Leave for one more thread above the [`MINIMUM`] of a mount.
    pub(super) fn take(&'static self, image: Digest) -> Option<Leave> {
        let mut taken = self.lock();
        let taken = taken.get_or_insert_default();
        let own = taken.images.get(&image).copied().unwrap_or_default();
        let active = taken.images.len() + usize::from(own == 0);
        let (free, reserve) = (self.most - taken.all, self.most / RESERVE);
        let share = (self.most / active).min(self.most - reserve);
        let kept = if own < share { 0 } else { reserve };
        if free <= kept {
            return None;
        }
        taken.all += 1;
        *taken.images.entry(image).or_default() += 1;
        Some(Leave { pool: self, image })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Taken>> {
        lock(&self.taken)
    }
}

impl Drop for Leave {
    fn drop(&mut self) {
        let mut taken = self.pool.lock();
        let taken = taken.get_or_insert_default();
        taken.all -= 1;
        if let Some(own) = taken.images.get_mut(&self.image) {
            *own -= 1;
            if *own == 0 {
                taken.images.remove(&self.image);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_leaves_threads_to_others() {
        static POOL: ThreadPool = ThreadPool::new(64);
        let [hog, other] = [1, 2].map(|byte| Digest::sha256([byte; 32]));
        let take = |image| std::iter::from_fn(move || POOL.take(image)).collect::<Vec<_>>();
        let hogs = take(hog);
        assert_eq!(hogs.len(), 56);
        let others = take(other);
        assert_eq!(others.len(), 8);
        drop(hogs);
        assert_eq!(take(other).len(), 64 - 8 - 8);
        drop(others);
        assert_eq!(POOL.lock().as_ref().unwrap().all, 0);
    }
}
