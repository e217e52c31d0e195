//! Measures whether readers ask for prefetched chunks.

use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

use super::super::ready::ReadyMap;
use crate::metrics::Metrics;

/// The chunks of a blob that were asked for ahead of readers, and no reader has asked for.
#[derive(Debug)]
pub(super) struct Foresight {
    unread: ReadyMap,
    metrics: Arc<Metrics>,
}

impl Foresight {
    pub(super) fn new(chunks: usize, metrics: Arc<Metrics>) -> Self {
        Foresight { unread: ReadyMap::new(chunks, &[]), metrics }
    }

    /// Records a prefetch of a chunk with this many stored bytes.
    pub(super) fn expect(&self, at: usize, bytes: u64) {
        if self.unread.set(at) {
            self.metrics.foreseen.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Records that a reader asks for chunks; `size` gives their stored bytes.
    pub(super) fn note_request(&self, chunks: Range<usize>, size: impl Fn(usize) -> u64) {
        if self.unread.is_empty() {
            return;
        }
        for at in chunks {
            if self.unread.take(at) {
                self.metrics.foreseen_read.fetch_add(size(at), Ordering::Relaxed);
            }
        }
    }

    /// From now on the kernel reads the file without asking.
    pub(super) fn ends(&self, size: impl Fn(usize) -> u64) {
        if self.unread.is_empty() {
            return;
        }
        for at in 0..self.unread.chunks() {
            if self.unread.take(at) {
                self.metrics.foreseen_unseen.fetch_add(size(at), Ordering::Relaxed);
            }
        }
    }

    /// A chunk was given up before any reader asked for it.
    pub(super) fn gone(&self, at: usize) {
        self.unread.clear(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_chunk_counts_once_as_foreseen_and_as_read_or_unseen() {
        let metrics = Arc::<Metrics>::default();
        let foresight = Foresight::new(100, metrics.clone());
        let size = |at: usize| at as u64;
        for at in [1, 2, 2, 70, 99] {
            foresight.expect(at, size(at));
        }
        foresight.note_request(2..71, size);
        foresight.note_request(2..71, size);
        foresight.gone(1);
        foresight.ends(size);
        foresight.note_request(0..100, size);
        let counts = metrics.counts();
        let seen = (counts.foreseen, counts.foreseen_read, counts.foreseen_unseen);
        assert_eq!(seen, (172, 72, 99));
    }
}
