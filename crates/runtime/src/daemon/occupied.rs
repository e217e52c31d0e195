//! What mounted images take on the disk, for containerd, which tells the kubelet.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, Instant},
};

use super::{Images, node::Node};
use crate::cache::occupied;

/// How long a count is good: containerd asks for one snapshot after the other, every 10 seconds.
const AGE: Duration = Duration::from_secs(5);

/// Bytes and files on the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupied {
    /// Bytes.
    pub bytes: u64,
    /// Files, whose names are inodes.
    pub files: u64,
}

/// The last count, by mount points.
#[derive(Debug, Default)]
pub(super) struct Counted(Mutex<Option<(Instant, HashMap<PathBuf, Occupied>)>>);

impl Images {
    /// What the image that is mounted at a place takes. What images share counts once, with one of
    /// them.
    pub async fn occupied(&self, mountpoint: &Path) -> Occupied {
        let node = &self.0;
        if let Some(known) = node.counted.get(mountpoint) {
            return known;
        }
        let count = node.count().await;
        let found = count.get(mountpoint).copied().unwrap_or_default();
        node.counted.set(count);
        found
    }
}

impl Counted {
    fn get(&self, mountpoint: &Path) -> Option<Occupied> {
        let last = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (when, count) = last.as_ref()?;
        (when.elapsed() < AGE).then(|| count.get(mountpoint).copied()).flatten()
    }

    fn set(&self, count: HashMap<PathBuf, Occupied>) {
        let mut last = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *last = Some((Instant::now(), count));
    }
}

impl Node {
    async fn count(&self) -> HashMap<PathBuf, Occupied> {
        let mounts: Vec<_> = self.served().await;
        let directories = mounts.into_iter().map(|(at, image)| (at, image.directories()));
        let directories: Vec<_> = directories.collect();
        let count = tokio::task::spawn_blocking(move || {
            let mut seen = HashSet::new();
            let mut count = HashMap::new();
            for (mountpoint, directories) in directories {
                let mut sum = Occupied::default();
                for directory in directories.into_iter().filter(|it| seen.insert(it.clone())) {
                    let (bytes, files) = occupied(&directory);
                    sum.bytes += bytes;
                    sum.files += files;
                }
                count.insert(mountpoint, sum);
            }
            count
        });
        count.await.unwrap_or_default()
    }
}
