//! Counters of the mirror, for `lazuli status`.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// Counters of the mirror since its process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// Questions that were answered from memory, or together with an earlier one.
    pub hits: u64,
    /// Questions that a registry was asked.
    pub misses: u64,
    /// Questions that were answered while the registry was away.
    pub stale: u64,
    /// Bytes of blobs that were passed on.
    pub bytes: u64,
}

/// The same, while it grows. Clones are the same counters.
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

    /// A question came for which the registry is asked.
    pub(crate) fn miss(&self) {
        self.0.misses.fetch_add(1, Ordering::Relaxed);
    }

    /// A question was answered while the registry was away.
    pub(crate) fn stale(&self) {
        self.0.stale.fetch_add(1, Ordering::Relaxed);
    }

    /// Bytes of a blob were passed on.
    pub(crate) fn passed(&self, bytes: usize) {
        self.0.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Activity {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Inner { hits, misses, stale, bytes } = &*self.0;
        Activity { hits: read(hits), misses: read(misses), stale: read(stale), bytes: read(bytes) }
    }
}
