//! Evicts chunks that have not been read for long, under a mounted image.
//!
//! A cleared bit takes effect for every reader that asks afterwards. A reader that has asked
//! already and was let through may still be on the way to copying the page, and cannot be stopped.
//! So a chunk is evicted only if no reader asked for it during [`Settings::grace`], and only from a
//! file whose reads the kernel reports; docs/cache.md has the whole argument.
//!
//! [`Settings::grace`]: super::super::Settings::grace

use std::{io, sync::Arc, time::Duration};

use lazuli_image::BLOCK_SIZE;
use rustix::fs::{FallocateFlags, fallocate};

use super::{super::single_flight::Lease, CachedBlob, guard::Hold, residency::Withdrawn};

/// The result of an eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::cache) struct Evicted {
    pub(in crate::cache) chunks: u64,
    /// Decoded bytes.
    pub(in crate::cache) bytes: u64,
}

impl CachedBlob {
    /// Decoded bytes of the chunks that are in the file.
    pub(in crate::cache) fn held_bytes(&self) -> u64 {
        let sizes = self.layout.chunks().iter().map(|chunk| u64::from(chunk.decoded_size));
        sizes.enumerate().filter(|(at, _)| self.has(*at)).map(|(_, size)| size).sum()
    }

    /// Chunks that can be given up, with the time when each was last asked for.
    pub(in crate::cache) fn idle(&self) -> Vec<(u32, usize)> {
        if self.guarded.is_open() {
            return Vec::new();
        }
        let chunks = (0..self.layout.chunks().len()).filter(|at| self.has(*at));
        let old = chunks.filter(|at| self.is_old(*at));
        old.map(|at| (self.residency.asked().last(at), at)).collect()
    }

    /// Returns whether every reader that ever asked for the chunk has surely read it by now.
    fn is_old(&self, at: usize) -> bool {
        let asked = self.residency.asked();
        let last = asked.last(at).max(self.guarded.since());
        // Both ends of the time are rounded.
        let passed = asked.now().saturating_sub(last).saturating_sub(1);
        Duration::from_millis(u64::from(passed) * 100) >= self.settings.grace
    }

    /// Bytes that could be given up some time after [`CachedBlob::rearm`].
    pub(in crate::cache) fn open_bytes(&self) -> u64 {
        if self.guarded.is_open() { self.layout.file_size() } else { 0 }
    }

    /// Makes the kernel send events again for a file that was complete. Blocks.
    pub(in crate::cache) fn rearm(&self, hold: Hold) -> io::Result<()> {
        self.guarded.rearm(hold, || self.file.lock_state(), || self.residency.asked().now())
    }

    /// Lets a blob be complete again.
    pub(in crate::cache) fn release(self: &Arc<Self>) {
        if self.guarded.release() {
            self.file.flush_now();
            self.flush_soon();
        }
    }

    /// Evicts those of `chunks` that no reader asks for: clears their bits first, in memory and on
    /// the disk, then punches their bytes out. Blocks.
    pub(in crate::cache) fn evict(self: &Arc<Self>, chunks: &[usize]) -> io::Result<Evicted> {
        let leases = self.take_away(chunks);
        let chunks: Vec<_> = leases.iter().map(Lease::chunk).collect();
        if chunks.is_empty() {
            return Ok(Evicted::default());
        }
        self.forget(&chunks)?;
        let mut evicted = Evicted::default();
        drop(self.change(|data| {
            for at in &chunks {
                let chunk = self.chunk(*at);
                let size = u64::from(chunk.decoded_size).next_multiple_of(BLOCK_SIZE);
                let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(data, punch, chunk.decoded.0, size)?;
                evicted.chunks += 1;
                evicted.bytes += size;
            }
            Ok(())
        })?);
        drop(leases);
        self.flush_soon();
        Ok(evicted)
    }

    /// Clears the bits of chunks that are neither asked for nor in flight. Readers of these chunks
    /// wait until the leases are dropped: no chunk may be written before it is punched out.
    fn take_away(&self, chunks: &[usize]) -> Vec<Lease> {
        let mut leases = Vec::new();
        let mut spared = Vec::new();
        let mut residency = self.residency.lock();
        let _state = self.file.lock_state();
        // Under the lock: a flush may have completed the blob since its chunks were chosen, and
        // the kernel does not ask about it then.
        if self.guarded.is_open() {
            return leases;
        }
        for at in chunks.iter().copied() {
            match residency.withdraw(at, || self.is_old(at)) {
                Some(Withdrawn::Gone(lease)) => leases.push(lease),
                Some(Withdrawn::Spared(lease)) => spared.push(lease),
                None => {}
            }
        }
        drop(residency);
        leases
    }
}
