//! Counters of a blob.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{super::layout::Layout, residency::Residency};

/// Counters since the blob was opened.
#[derive(Debug, Default)]
pub(super) struct Counters {
    bytes_fetched: AtomicU64,
    requests: AtomicU64,
    pub(super) hits: AtomicU64,
    pub(super) misses: AtomicU64,
    pub(super) bytes_copied: AtomicU64,
    pub(super) checked: AtomicU64,
    pub(super) wrong: AtomicU64,
}

/// Counters of a blob since it was opened, and how much of it is present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlobStats {
    /// Stored bytes that arrived from sources, also those of answers that broke off.
    pub bytes_fetched: u64,
    /// Reads that sources were asked for, also those that failed.
    pub requests: u64,
    /// Questions that were answered at once.
    pub hits: u64,
    /// Questions that had to wait for a fetch.
    pub misses: u64,
    /// Decoded bytes that were copied from other blobs in the cache.
    pub bytes_copied: u64,
    /// Chunks that are in the cache and right.
    pub chunks_ready: u64,
    /// Chunks that are in the cache as an earlier process left them, and not checked yet.
    pub chunks_suspect: u64,
    /// Chunks that were read back and checked.
    pub chunks_checked: u64,
    /// The wrong ones among these: another process, or the disk, has changed them.
    pub chunks_wrong: u64,
    /// Chunks that the image names.
    pub chunks_total: u64,
    /// Bytes of the whole blob as stored.
    pub stored_bytes: u64,
}

impl Counters {
    /// Notes a request to a source.
    pub(super) fn requested(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes stored bytes that a source delivered.
    pub(super) fn fetched(&self, bytes: u64) {
        self.bytes_fetched.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The counters, and how much of the blob is present.
    pub(super) fn stats(&self, residency: &Residency, layout: &Layout) -> BlobStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        BlobStats {
            bytes_fetched: count(&self.bytes_fetched),
            requests: count(&self.requests),
            hits: count(&self.hits),
            misses: count(&self.misses),
            bytes_copied: count(&self.bytes_copied),
            chunks_ready: residency.ready_chunks() as u64,
            chunks_suspect: residency.suspect_chunks() as u64,
            chunks_checked: count(&self.checked),
            chunks_wrong: count(&self.wrong),
            chunks_total: layout.chunks().len() as u64,
            stored_bytes: layout.blob().stored_size,
        }
    }
}
