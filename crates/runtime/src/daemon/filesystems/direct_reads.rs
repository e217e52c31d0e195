//! Work on a mount once its readers have been quiet for a time.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use super::mounted::FilesystemMount;
use crate::{cache::CachedBlob, kernel::pages};

/// A container without a miss for this time has started: 5 s is well above the longest pause
/// observed between two fetches of one start, and well below the life of any container worth tuning
/// for.
const QUIET: Duration = Duration::from_secs(5);

/// Switches a mount to direct reads when its start is over: when no reader had to wait for
/// [`QUIET`], or [`pages::START`] after the image is complete. At once if a complete image is not in
/// memory.
pub(in crate::daemon) async fn read_directly_when_quiet(
    mount: Weak<FilesystemMount>,
    blobs: Weak<[Arc<CachedBlob>]>,
) {
    let mut before = None;
    // Nothing of the mount is held while it waits: others see from the blobs that no reader is
    // left.
    while let Some(blobs) = blobs.upgrade() {
        let now = Some(blobs.iter().map(|blob| blob.stats().misses).sum::<u64>());
        let is_complete = blobs.iter().all(|blob| blob.is_complete());
        let is_in_memory = || blobs.iter().any(|blob| blob.is_in_memory());
        if now == before || before.is_none() && is_complete && !is_in_memory() {
            break;
        }
        drop(blobs);
        before = now;
        tokio::time::sleep(if is_complete { pages::START } else { QUIET }).await;
        if mount.strong_count() == 0 {
            return;
        }
    }
    let (Some(mount), Some(blobs)) = (mount.upgrade(), blobs.upgrade()) else { return };
    match mount.image.read_directly() {
        // The copies that buffered reads left behind are not used any more.
        Ok(()) => blobs.iter().for_each(|blob| blob.forget_pages()),
        Err(error) => tracing::info!(%error, "reads stay buffered"),
    }
}

/// Drops the page cache's copies of data that a mount on disks has read, whenever the mount has
/// been quiet, until the kernel reads the files itself. Not at once, because fresh data would have
/// to be written to the disk first.
pub(in crate::daemon) async fn forget_pages_when_quiet(
    mount: Weak<FilesystemMount>,
    blobs: Weak<[Arc<CachedBlob>]>,
) {
    let (mut before, mut forgotten) = (0, 0);
    loop {
        tokio::time::sleep(QUIET).await;
        let (Some(mount), Some(blobs)) = (mount.upgrade(), blobs.upgrade()) else { return };
        let now = mount.events();
        if now == before && now != forgotten {
            forgotten = now;
            let arriving = blobs.iter().filter(|blob| !blob.is_complete());
            arriving.for_each(|blob| blob.forget_pages());
        }
        before = now;
    }
}
