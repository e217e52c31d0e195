//! The ready map: which chunks of a blob are in the cache.

use std::{
    ops::Range,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

/// One bit per chunk, by position in the layout.
///
/// A bit is set after the chunk's bytes were written (`Release`) and a thread that sees it set
/// (`Acquire`) may read them.
#[derive(Debug)]
pub(crate) struct ReadyMap {
    words: Box<[AtomicU64]>,
    chunks: usize,
    ready: AtomicUsize,
}

impl ReadyMap {
    /// A map of `chunks` chunks from words that [`ReadyMap::words`] gave; missing words count as 0
    /// and bits behind the last chunk are dropped.
    pub(crate) fn new(chunks: usize, words: &[u64]) -> Self {
        let word = |at: usize| words.get(at).copied().unwrap_or(0) & mask(chunks, at);
        let words: Box<[_]> = (0..word_count(chunks)).map(|at| AtomicU64::new(word(at))).collect();
        let ready = words.iter().map(|w| w.load(Ordering::Relaxed).count_ones() as usize).sum();
        ReadyMap { words, chunks, ready: AtomicUsize::new(ready) }
    }

    pub(crate) fn is_ready(&self, chunk: usize) -> bool {
        self.words[chunk / 64].load(Ordering::Acquire) & bit(chunk) != 0
    }

    /// Returns whether all chunks in `range` are ready.
    pub(crate) fn all_ready(&self, mut range: Range<usize>) -> bool {
        self.is_full() || range.all(|chunk| self.is_ready(chunk))
    }

    /// Sets the bit of a chunk, and returns whether it was not set before.
    pub(crate) fn set(&self, chunk: usize) -> bool {
        let before = self.words[chunk / 64].fetch_or(bit(chunk), Ordering::Release);
        let is_new = before & bit(chunk) == 0;
        if is_new {
            self.ready.fetch_add(1, Ordering::Release);
        }
        is_new
    }

    /// Clears the bit of a chunk.
    pub(crate) fn clear(&self, chunk: usize) {
        self.take(chunk);
    }

    /// The same, and returns whether it was set before.
    pub(crate) fn take(&self, chunk: usize) -> bool {
        let before = self.words[chunk / 64].fetch_and(!bit(chunk), Ordering::AcqRel);
        let was_set = before & bit(chunk) != 0;
        if was_set {
            self.ready.fetch_sub(1, Ordering::Release);
        }
        was_set
    }

    /// Sets every bit that is set in `words`.
    pub(crate) fn add(&self, words: &[u64]) {
        let mut added = 0;
        for (at, word) in self.words.iter().enumerate() {
            let add = words.get(at).copied().unwrap_or(0) & mask(self.chunks, at);
            added += (add & !word.fetch_or(add, Ordering::Release)).count_ones() as usize;
        }
        self.ready.fetch_add(added, Ordering::Release);
    }

    /// Clears every bit that is not set in `words`.
    pub(crate) fn keep_only(&self, words: &[u64]) {
        let mut cleared = 0;
        for (at, word) in self.words.iter().enumerate() {
            let keep = words.get(at).copied().unwrap_or(0);
            cleared += (word.fetch_and(keep, Ordering::AcqRel) & !keep).count_ones() as usize;
        }
        self.ready.fetch_sub(cleared, Ordering::Release);
    }

    /// Number of chunks, ready or not.
    pub(crate) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Number of chunks that are ready.
    pub(crate) fn count(&self) -> usize {
        self.ready.load(Ordering::Acquire)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count() == 0
    }

    pub(crate) fn is_full(&self) -> bool {
        self.count() == self.chunks
    }

    /// The bits, 64 chunks in a word, lowest bit first.
    pub(crate) fn words(&self) -> Vec<u64> {
        self.words.iter().map(|word| word.load(Ordering::Acquire)).collect()
    }

    /// One word of [`ReadyMap::words`].
    pub(crate) fn word(&self, at: usize) -> u64 {
        self.words[at].load(Ordering::Acquire)
    }
}

/// Words that hold the bits of this many chunks.
pub(crate) const fn word_count(chunks: usize) -> usize {
    chunks.div_ceil(64)
}

const fn bit(chunk: usize) -> u64 {
    1 << (chunk % 64)
}

/// The bits of word `at` that stand for chunks.
const fn mask(chunks: usize, at: usize) -> u64 {
    if chunks - at * 64 >= 64 { u64::MAX } else { bit(chunks) - 1 }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn both_without(both: &ReadyMap, chunks: &[usize]) -> BTreeSet<usize> {
        (0..both.chunks).filter(|at| both.is_ready(*at) && !chunks.contains(at)).collect()
    }

    proptest! {
        #[test]
        fn a_ready_map_behaves_like_a_set_of_chunks(
            (chunks, numbers, keep) in (1_usize..200).prop_flat_map(|chunks| {
                let some = || prop::collection::vec(0..chunks, 0..300);
                (Just(chunks), some(), some())
            })
        ) {
            let check = |map: &ReadyMap, set: &BTreeSet<usize>| {
                assert_eq!(map.count(), set.len());
                assert_eq!(map.is_full(), set.len() == chunks);
                for chunk in 0..chunks {
                    assert_eq!(map.is_ready(chunk), set.contains(&chunk));
                    assert_eq!(map.all_ready(0..chunk), (0..chunk).all(|c| set.contains(&c)));
                }
            };
            let map = ReadyMap::new(chunks, &[]);
            let mut set = BTreeSet::new();
            for number in numbers {
                map.set(number);
                set.insert(number);
            }
            check(&map, &set);
            let again = ReadyMap::new(chunks, &map.words());
            check(&again, &set);

            let other = ReadyMap::new(chunks, &[]);
            for chunk in &keep {
                other.set(*chunk);
            }
            let both = ReadyMap::new(chunks, &map.words());
            both.add(&other.words());
            check(&both, &set.iter().chain(&keep).copied().collect());
            again.keep_only(&other.words());
            set.retain(|chunk| keep.contains(chunk));
            check(&again, &set);
            keep.iter().for_each(|chunk| map.clear(*chunk));
            map.add(&other.words());
            keep.iter().for_each(|chunk| map.clear(*chunk));
            check(&map, &both_without(&both, &keep));
        }
    }

    #[test]
    fn bits_behind_the_last_chunk_do_not_count() {
        let map = ReadyMap::new(70, &[u64::MAX; 3]);
        assert_eq!(map.count(), 70);
        assert!(map.is_full());
    }
}
