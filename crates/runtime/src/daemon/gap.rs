//! After a time without a daemon: keeper and worker died together, the kernel let readers through to the holes of blob
//! files, and keeps zeros where the image has something else.
//!
//! What is wrong can only be in pages of chunks that were not here then. They are dropped. A page that a program has mapped
//! survives that, for everybody; so if one is left, the kernel is told to reclaim all of its page cache, mapped or not.

use std::{
    fs::File, io, ops::Range, os::unix::ffi::OsStrExt as _, path::Path, sync::Arc, thread,
    time::Duration,
};

use lazuli_image::{
    Decoded,
    erofs::{FileType, Nid},
    rafs::Bootstrap,
};
use lazuli_sys::mmap::Map;

use crate::{cache::CachedBlob, kernel::pages};

/// How often the kernel is told. It leaves pages alone that were used since it last looked, so it takes two at least;
/// up to three were seen.
const PASSES: usize = 20;

/// Pause between two passes that do not suffice.
const PAUSE: Duration = Duration::from_millis(50);

/// Drops what the page cache of the image mounted `at` may hold from holes. Returns how many pages cannot be dropped.
/// Blocks. Nobody may be filling the blobs meanwhile.
pub(super) fn close(
    at: &Path,
    bootstrap: &Bootstrap<Map>,
    blobs: &[Arc<CachedBlob>],
) -> io::Result<u64> {
    let mut doubtful = Vec::new();
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
                        doubtful.push((path, holes));
                    }
                }
                _ => {}
            }
        }
    }
    if !doubtful.is_empty() {
        tracing::warn!(files = doubtful.len(), "programs have pages mapped, reclaiming all");
    }
    for _ in 0..PASSES {
        if doubtful.is_empty() {
            return Ok(0);
        }
        if let Err(error) = pages::reclaim_all() {
            tracing::error!(%error, "cannot reclaim the page cache");
        }
        // Not dropped again: that would put them where the kernel does not look for pages to reclaim.
        doubtful.retain(|(path, holes)| count(path, holes).map_or(true, |left| left > 0));
        if !doubtful.is_empty() {
            thread::sleep(PAUSE);
        }
    }
    let left = doubtful.iter().map(|(path, holes)| count(path, holes).unwrap_or(0));
    let left = left.sum();
    tracing::error!(at = %at.display(), left, "programs may still see zeros in pages that they have mapped");
    Ok(left)
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

/// Drops these pages of a file; how many are left.
fn forget(path: &Path, holes: &[Range<u64>]) -> io::Result<u64> {
    let file = File::open(path)?;
    holes.iter().try_for_each(|hole| pages::forget(&file, hole))?;
    count(path, holes)
}

fn count(path: &Path, holes: &[Range<u64>]) -> io::Result<u64> {
    let file = File::open(path)?;
    holes.iter().try_fold(0, |sum, hole| Ok(sum + pages::count(&file, hole)?))
}
