//! After a time without a daemon: keeper and worker died together, the kernel let readers through
//! to the holes of blob files, and keeps zeros where the image has something else.
//!
//! What is wrong can only be in pages of chunks that were not here then. They are dropped. A page
//! that a program has mapped survives that, for all programs; so if one is left, the kernel is told
//! to reclaim all of its page cache, mapped or not.

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

/// Whether readers may have been let through to holes since the worker before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gap {
    /// The keeper held the fanotify group: readers waited.
    None,
    /// Keeper and worker died together, and no group was there.
    Unheard,
}

/// How often it is looked after them.
const PASSES: usize = 40;

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// Looks at which nothing may be seen while pages are being read. They are those of readers that
/// wait for us, since the marks are back; but one that the kernel had let through before that may
/// still be on its way to the hole. It does not wait for anything there, and 500 ms are a long time
/// to be without a processor.
const CALM: usize = 10;

/// Times that pages are reclaimed before waiting readers are asked to let go of them: `read`
/// keeps what it has found while the kernel reads ahead for it, and if that has to be asked for, it
/// waits with pages of holes that cannot be dropped.
const RECLAIM_ATTEMPTS: usize = 3;

/// Drops what the page cache of the image mounted `at` may hold from holes. Returns how many pages
/// cannot be dropped. Blocks. The blobs must not be filled meanwhile. `deny_queued` has those go
/// on who wait for us.
pub(super) fn close(
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

/// The same while readers are served, for pages that should not exist. As a rule there are none,
/// and nothing else is done.
pub(super) fn clean(
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

/// Drops the pages of chunks that are not here, and returns where some are left.
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

/// Parts of a file that were not here.
type StaleRanges = (PathBuf, Vec<Range<u64>>);

/// Pages of them that a reader can see.
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
