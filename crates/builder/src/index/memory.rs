//! Limits the memory in which nodes make trees of other people's images.
//!
//! A few stored kilobytes unpack to millions of entries, each with attributes of up to 64 KiB. So
//! entries are counted while they are read, and all images together share one limit. An image, or a
//! layer that is read alone, gets at most half of the remaining memory, so that none can starve the
//! others.

use std::{
    mem,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    entry::{Entry, EntryKind},
    error::BuildError,
};

/// Bytes of the entries and chunks of all images that are being made. The largest image known, with
/// 400,000 files, takes 110 MB; the tree and the bootstrap that are made of entries take as much
/// again.
const ALL: u64 = 512 << 20;

/// One limit per process, as memory is.
static LEFT: Memory = Memory(AtomicU64::new(ALL));

/// Bytes that are left.
struct Memory(AtomicU64);

/// The part of one image, given back when dropped.
pub(super) struct Share<'a> {
    memory: &'a Memory,
    limit: u64,
    used: u64,
}

/// A share for an image that is made now.
pub(super) fn share() -> Share<'static> {
    LEFT.share()
}

impl Memory {
    fn share(&self) -> Share<'_> {
        Share { memory: self, limit: self.0.load(Ordering::Relaxed) / 2, used: 0 }
    }
}

impl Share<'_> {
    /// Counts an entry.
    pub(super) fn take_entry(&mut self, entry: &Entry) -> Result<(), BuildError> {
        self.take(memory_of(entry))
    }

    /// Counts bytes.
    pub(super) fn take(&mut self, bytes: u64) -> Result<(), BuildError> {
        let used = self.used.saturating_add(bytes);
        let take = |left: u64| left.checked_sub(bytes);
        let left = &self.memory.0;
        if used > self.limit
            || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err()
        {
            let what = "bytes of names, attributes and chunks, beside what other images take";
            return Err(BuildError::TooMany { what, count: used, limit: self.limit });
        }
        self.used = used;
        Ok(())
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.memory.0.fetch_add(self.used, Ordering::Relaxed);
    }
}

/// The memory of an entry, about.
fn memory_of(entry: &Entry) -> u64 {
    /// Two boxes in a map's node, and what the allocator adds.
    const XATTR: usize = 64;
    let xattrs = &entry.metadata.xattrs;
    let xattrs: usize = xattrs.iter().map(|(name, value)| XATTR + name.len() + value.len()).sum();
    let own = match &entry.kind {
        EntryKind::Regular { chunks, .. } => mem::size_of_val(&chunks[..]),
        EntryKind::HardLink(target) => target.as_bytes().len(),
        EntryKind::Symlink(target) => target.len(),
        _ => 0,
    };
    (mem::size_of::<Entry>() + entry.path.as_bytes().len() + xattrs + own) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_takes_half_of_what_others_leave_and_gives_it_back() {
        let memory = Memory(AtomicU64::new(1000));
        let mut first = memory.share();
        first.take(500).unwrap();
        assert!(first.take(1).is_err());
        let mut second = memory.share();
        assert!(second.take(251).is_err());
        second.take(250).unwrap();
        drop(first);
        let mut third = memory.share();
        assert!(third.take(376).is_err());
        third.take(375).unwrap();
        drop((second, third));
        assert_eq!(memory.0.into_inner(), 1000);
    }

    #[test]
    fn shares_taken_at_once_end_at_the_whole() {
        let memory = Memory(AtomicU64::new(1000));
        let mut shares: Vec<_> = (0..3).map(|_| memory.share()).collect();
        let taken = shares.iter_mut().filter_map(|share| share.take(400).ok()).count();
        assert_eq!(taken, 2);
    }
}
