//! Chunks that another blob in the cache has: copied instead of fetched.

use std::sync::{Arc, atomic::Ordering};

use lazuli_image::BLOCK_SIZE;
use tokio::task::JoinHandle;

use super::{super::single_flight::Lease, CachedBlob, commit::jobs, settle::settle};
use crate::{error::ReadError, sharing::workers::Priority};

impl CachedBlob {
    /// Offers chunks of this blob to other blobs.
    pub(super) fn offer(&self, chunks: impl Iterator<Item = usize>) {
        let Some(cache) = self.cache.upgrade() else { return };
        let key = self.file.store().key();
        cache.chunk_index.enter(key, &self.allowed, chunks.map(|at| self.chunk(at)));
    }

    /// Withdraws offers of chunks that are gone.
    pub(super) fn withdraw_offers(&self, chunks: &[usize]) {
        let Some(cache) = self.cache.upgrade() else { return };
        let key = self.file.store().key();
        chunks.iter().for_each(|at| cache.chunk_index.forget(key, self.chunk(*at)));
    }

    /// Takes those of `missing` out that another blob may have.
    pub(super) fn take_from_other_blobs(&self, missing: &mut Vec<usize>) -> Vec<usize> {
        let Some(cache) = self.cache.upgrade() else { return Vec::new() };
        let key = self.file.store().key();
        let is_there =
            |at: &mut usize| cache.chunk_index.find(key, &self.allowed, self.chunk(*at)).is_some();
        missing.extract_if(.., is_there).collect()
    }

    /// Copies chunks from other blobs. A chunk that turns out to be missing there is fetched if a
    /// reader waits for it.
    pub(super) fn copy(
        self: &Arc<Self>,
        leases: Vec<Lease>,
        priority: Priority,
    ) -> Vec<JoinHandle<Result<(), ReadError>>> {
        let settled = |job| {
            let settled = settle(self.clone(), job, priority, copy);
            async move {
                settled.await;
                Ok(())
            }
        };
        let jobs = jobs(self, leases).into_iter();
        jobs.map(|job| self.workers.runtime().spawn(settled(job))).collect()
    }
}

/// Copies a chunk from another blob; whether it was there. Blocks.
fn copy(blob: &Arc<CachedBlob>, at: usize) -> Result<bool, ReadError> {
    let chunk = blob.chunk(at);
    let Some(cache) = blob.cache.upgrade() else { return Ok(false) };
    let own = blob.file.store().key();
    let Some((key, block)) = cache.chunk_index.find(own, &blob.allowed, chunk) else {
        return Ok(false);
    };
    let mut bytes = vec![0; chunk.decoded_size as usize];
    let read = cache.read_elsewhere(&key, u64::from(block) * BLOCK_SIZE, &mut bytes);
    if read.is_err() || !chunk.digest.matches(&bytes) {
        // Evicted meanwhile, or damaged, which readers of that blob will notice.
        cache.chunk_index.forget(&key, chunk);
        return Ok(false);
    }
    blob.keep(at, &bytes)?;
    blob.counters.bytes_copied.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    blob.metrics.copied.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    Ok(true)
}
