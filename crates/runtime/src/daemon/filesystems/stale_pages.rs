//! Drops stale pages after a time without a daemon: keeper and worker died together, and the kernel
//! let readers through to the holes of blob files, and caches zeros where the image has other
//! content.
//!
//! Only pages of chunks that were missing then can be wrong. They are dropped. A page that a
//! program has mapped cannot be dropped, for any program; so if one is left, the kernel is told to
//! reclaim all of its page cache, mapped or not.

use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use lazuli_image::{
    Decoded,
    erofs::{FileType, Nid},
    rafs::Bootstrap,
};
use lazuli_sys::mmap::Map;

use crate::{cache::CachedBlob, kernel::pages};

/// Whether readers may have been let through to holes since the previous worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon) enum Gap {
    /// The keeper held the fanotify group: readers waited.
    None,
    /// Keeper and worker died together, and no group existed.
    Unheard,
}

/// Number of checks for stale pages.
const PASSES: usize = 40;

/// Pause between two checks.
const PAUSE: Duration = Duration::from_millis(50);

/// Consecutive checks that must find no page that is being read. Such pages belong to readers that
/// wait for this process, since the marks are back. But a reader that the kernel let through before
/// may still be on its way to the hole. Nothing blocks it there, and 500 ms are a long time to be
/// without a processor.
const CALM: usize = 10;

/// Number of times that pages are reclaimed before waiting readers are asked to release them:
/// `read` keeps the pages that it has found while the kernel reads ahead for it, and if the
/// readahead raises an event, `read` waits with pages of holes that cannot be dropped.
const RECLAIM_ATTEMPTS: usize = 3;

/// Drops all pages that the page cache of the image mounted `at` may hold from holes. Returns how
/// many cannot be dropped. Blocks. The blobs must not be filled meanwhile. `deny_queued` releases
/// the readers that wait for this process.
pub(in crate::daemon) fn close(
    at: &Path,
    bootstrap: &Bootstrap<Map>,
    blobs: &[Arc<CachedBlob>],
    deny_queued: impl Fn(),
) -> io::Result<u64> {
    let mut doubtful = forget_holes(at, bootstrap, blobs)?;
    let (mut calm, mut reclaimed) = (0, 0);
    for _ in 0..PASSES {
        doubtful.retain(|(path, holes)| sum(path, holes, pages::count).map_or(true, |n| n > 0));
        if doubtful.is_empty() || calm == CALM {
            return Ok(0);
        }
        calm += 1;
        if seen(&doubtful)? > 0 {
            calm = 0;
            if reclaimed >= RECLAIM_ATTEMPTS {
                deny_queued();
            }
            reclaimed += 1;
            tracing::warn!(files = doubtful.len(), "programs have pages mapped, reclaiming all");
            if let Err(error) = pages::reclaim_all() {
                tracing::error!(%error, "cannot reclaim the page cache");
            }
        }
        thread::sleep(PAUSE);
    }
    let left = seen(&doubtful)?;
    tracing::error!(at = %at.display(), left, "programs may still see zeros in pages that they have mapped");
    Ok(left)
}

/// [`close`] while readers are served, for pages that should not exist. Usually there are none, and
/// nothing else is done.
pub(in crate::daemon) fn clean(
    at: &Path,
    bootstrap: &Bootstrap<Map>,
    blobs: &[Arc<CachedBlob>],
) -> io::Result<()> {
    let mapped = forget_holes(at, bootstrap, blobs)?;
    if seen(&mapped)? > 0 {
        close(at, bootstrap, blobs, || {})?;
    }
    Ok(())
}

/// Drops the pages of missing chunks, and returns the places where some remain.
fn forget_holes(
    at: &Path,
    bootstrap: &Bootstrap<Map>,
    blobs: &[Arc<CachedBlob>],
) -> io::Result<Vec<StaleRanges>> {
    let mut left = Vec::new();
    let mut pending = vec![(bootstrap.root(), at.to_owned())];
    while let Some((dir, path)) = pending.pop() {
        for entry in bootstrap.read_dir(dir, 0).map_err(io::Error::other)? {
            let entry = entry.map_err(io::Error::other)?;
            if entry.is_dot() {
                continue;
            }
            let path = path.join(std::ffi::OsStr::from_bytes(entry.name));
            match entry.file_type {
                FileType::Directory => pending.push((entry.nid, path)),
                FileType::Regular => {
                    let holes = holes(entry.nid, bootstrap, blobs)?;
                    if !holes.is_empty() && forget(&path, &holes)? > 0 {
                        left.push((path, holes));
                    }
                }
                _ => {}
            }
        }
    }
    Ok(left)
}

/// The ranges of a file that were missing.
type StaleRanges = (PathBuf, Vec<Range<u64>>);

/// Number of their pages that a reader can see.
fn seen(doubtful: &[StaleRanges]) -> io::Result<u64> {
    doubtful.iter().map(|(path, holes)| sum(path, holes, pages::visible)).sum()
}

/// The bytes of a file that no chunk in the cache has.
fn holes(
    file: Nid,
    bootstrap: &Bootstrap<Map>,
    blobs: &[Arc<CachedBlob>],
) -> io::Result<Vec<Range<u64>>> {
    let mut holes: Vec<Range<u64>> = Vec::new();
    let mut offset = 0;
    while let Some(extent) = bootstrap.extent(file, offset).map_err(io::Error::other)? {
        let end = offset + extent.len;
        let range = extent.start..Decoded(extent.start.0 + extent.len);
        let filled = blobs.get(usize::from(extent.blob.0)).is_some_and(|b| b.is_filled(&range));
        match holes.last_mut() {
            _ if filled => {}
            Some(last) if last.end == offset => last.end = end,
            _ => holes.push(offset..end),
        }
        offset = end;
    }
    // The kernel drops whole pages.
    Ok(holes.into_iter().map(|hole| hole.start..hole.end.next_multiple_of(4096)).collect())
}

/// Drops these pages of a file; how many are left. Only once: a page that was to be dropped is put
/// where the kernel does not look for pages to reclaim.
fn forget(path: &Path, holes: &[Range<u64>]) -> io::Result<u64> {
    sum(path, holes, |file, hole| {
        pages::forget(file, hole)?;
        pages::count(file, hole)
    })
}

fn sum(
    path: &Path,
    holes: &[Range<u64>],
    count: impl Fn(&File, &Range<u64>) -> io::Result<u64>,
) -> io::Result<u64> {
    let file = File::open(path)?;
    holes.iter().try_fold(0, |sum, hole| Ok(sum + count(&file, hole)?))
}
