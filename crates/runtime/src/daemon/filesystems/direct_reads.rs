//! Work on a mount once its readers have been quiet for a time.

use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use super::mounted::FilesystemMount;
use crate::{cache::CachedBlob, kernel::pages};

/// How often to look whether a start is over.
const LOOK: Duration = Duration::from_secs(5);

/// Switches a mount to direct reads when its start is over, that is when no reader has had to wait
/// for [`pages::START`]. At once if the image is complete and for the most part not in memory.
pub(in crate::daemon) async fn read_directly_when_quiet(
    mount: Weak<FilesystemMount>,
    blobs: Weak<[Arc<CachedBlob>]>,
) {
    if !blobs.upgrade().is_some_and(|blobs| are_on_disk_alone(&blobs)) {
        wait_until_quiet(&mount, &blobs).await;
    }
    let (Some(mount), Some(blobs)) = (mount.upgrade(), blobs.upgrade()) else { return };
    match mount.image.read_directly() {
        // The copies that buffered reads left behind are not used any more.
        Ok(()) => blobs.iter().for_each(|blob| blob.forget_pages()),
        Err(error) => tracing::info!(%error, "reads stay buffered"),
    }
}

/// Waits until no reader has had to wait for [`pages::START`], or the mount is gone. Holds nothing
/// of the mount meanwhile: others see from the blobs that no reader is left.
async fn wait_until_quiet(mount: &Weak<FilesystemMount>, blobs: &Weak<[Arc<CachedBlob>]>) {
    let mut quiet = Quiet::default();
    while mount.strong_count() > 0 {
        let misses = |blobs: Arc<[Arc<CachedBlob>]>| blobs.iter().map(|b| b.stats().misses).sum();
        if blobs.upgrade().map(misses).is_none_or(|misses| quiet.is_long(misses)) {
            return;
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Returns whether all of the blobs are on the disk, and at most half of that in the page cache.
fn are_on_disk_alone(blobs: &[Arc<CachedBlob>]) -> bool {
    let size: u64 = blobs.iter().map(|blob| blob.file_size()).sum();
    let in_memory = || blobs.iter().map(|blob| blob.bytes_in_memory()).sum::<u64>();
    blobs.iter().all(|blob| blob.is_complete()) && in_memory() <= size / 2
}

/// Drops the page cache's copies of data that a mount on disks has read, whenever the mount has
/// been quiet, until the kernel reads the files itself. Not at once, because fresh data would have
/// to be written to the disk first.
pub(in crate::daemon) async fn forget_pages_when_quiet(
    mount: Weak<FilesystemMount>,
    blobs: Weak<[Arc<CachedBlob>]>,
) {
    let (mut quiet, mut forgotten) = (Quiet::default(), 0);
    loop {
        tokio::time::sleep(LOOK).await;
        let (Some(mount), Some(blobs)) = (mount.upgrade(), blobs.upgrade()) else { return };
        let events = mount.events();
        if quiet.is_long(events) && events != forgotten {
            forgotten = events;
            let arriving = blobs.iter().filter(|blob| !blob.is_complete());
            arriving.for_each(|blob| blob.forget_pages());
        }
    }
}

/// A counter of what readers wait for, and since when it has not changed.
#[derive(Default)]
struct Quiet(Option<(u64, Instant)>);

impl Quiet {
    /// Returns whether the counter, which is `count` now, has not changed for [`pages::START`].
    fn is_long(&mut self, count: u64) -> bool {
        let since = match self.0 {
            Some((before, since)) if before == count => since,
            _ => Instant::now(),
        };
        self.0 = Some((count, since));
        since.elapsed() >= pages::START
    }
}
