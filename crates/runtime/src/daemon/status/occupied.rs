//! Disk usage of mounted images, which containerd reports to the kubelet.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use crate::{cache::occupied, daemon::served::image::ServedImage, sync::lock};

/// How long a count is good: containerd asks for one snapshot after the other, every 10 seconds.
const AGE: Duration = Duration::from_secs(5);

/// Bytes and files on the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupied {
    /// Bytes.
    pub bytes: u64,
    /// Number of files, which take inodes.
    pub files: u64,
}

/// The last count, by mount points.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Counted(Mutex<Option<(Instant, HashMap<PathBuf, Occupied>)>>);

impl Counted {
    pub(in crate::daemon) fn get(&self, mountpoint: &Path) -> Option<Occupied> {
        let last = lock(&self.0);
        let (when, count) = last.as_ref()?;
        (when.elapsed() < AGE).then(|| count.get(mountpoint).copied()).flatten()
    }

    pub(in crate::daemon) fn set(&self, count: HashMap<PathBuf, Occupied>) {
        let mut last = lock(&self.0);
        *last = Some((Instant::now(), count));
    }
}

/// Counts the disk usage of the images at these mount points.
pub(in crate::daemon) async fn count(
    mounts: Vec<(PathBuf, Arc<ServedImage>)>,
) -> HashMap<PathBuf, Occupied> {
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
