//! Counters of the mirror, for `lazuli status`.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// Counters of the mirror since its process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// Requests answered from memory, or by a fetch already in flight.
    pub hits: u64,
    /// Requests for which a registry was asked.
    pub misses: u64,
    /// Requests answered while the registry was away.
    pub stale: u64,
    /// Bytes of blobs that were passed on.
    pub bytes: u64,
}

/// Live counters. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counters(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    hits: AtomicU64,
    misses: AtomicU64,
    stale: AtomicU64,
    bytes: AtomicU64,
}

impl Counters {
    /// Counts a question whose answer is known or in flight.
    pub(crate) fn hit(&self) {
        self.0.hits.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request for which the registry is asked.
    pub(crate) fn miss(&self) {
        self.0.misses.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request answered while the registry was away.
    pub(crate) fn stale(&self) {
        self.0.stale.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts bytes of a blob sent to a client.
    pub(crate) fn passed(&self, bytes: usize) {
        self.0.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Activity {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Inner { hits, misses, stale, bytes } = &*self.0;
        Activity { hits: read(hits), misses: read(misses), stale: read(stale), bytes: read(bytes) }
    }
}
