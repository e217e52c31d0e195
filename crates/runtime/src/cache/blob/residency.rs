//! Residency: which chunks of a blob are in its file, in flight, or suspect.
//!
//! A chunk is *ready* (in the file, and checked by this process or sealed by an earlier one),
//! *suspect* (in the file as far as the maps say, not checked yet), *in flight*, or missing. A
//! check makes a chunk ready before it is no longer suspect, and a fetch makes it ready before it
//! is no longer in flight. So a look in the opposite order never takes such a chunk for
//! missing.

use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering, fence},
    },
};

use super::super::{
    pausing_clock::Clock,
    ready::ReadyMap,
    single_flight::{InFlight, Lease, LockedInFlight, Waiter},
};
use crate::{sharing::workers::Priority, sync::lock};

/// See the module.
#[derive(Debug)]
pub(super) struct Residency {
    ready: ReadyMap,
    suspect: ReadyMap,
    in_flight: InFlight,
    asked: Asked,
    /// Chunks that were found wrong and not reported yet.
    wrong: Mutex<BTreeSet<usize>>,
    /// Whether a task is going to check suspect chunks.
    checking: AtomicBool,
}

/// The fetches of a blob, locked: a missing chunk stays missing until a fetch is started here.
pub(super) struct LockedResidency<'a> {
    residency: &'a Residency,
    in_flight: LockedInFlight<'a>,
}

impl Residency {
    /// `known` has the chunks that the maps speak of, `sealed` those of them that need no check, as
    /// words of a [`ReadyMap`].
    pub(super) fn new(chunks: usize, known: &[u64], sealed: &[u64], clock: Arc<Clock>) -> Self {
        let ready = ReadyMap::new(chunks, sealed);
        let suspect = ReadyMap::new(chunks, known);
        (0..chunks).filter(|at| ready.is_ready(*at)).for_each(|at| suspect.clear(at));
        Residency {
            ready,
            suspect,
            in_flight: InFlight::default(),
            asked: Asked::new(clock, chunks),
            wrong: Mutex::default(),
            checking: AtomicBool::new(false),
        }
    }

    /// Returns whether a chunk is in the file, checked or not.
    pub(in crate::cache) fn has(&self, at: usize) -> bool {
        self.suspect.is_ready(at) || self.ready.is_ready(at)
    }

    pub(super) fn is_ready(&self, at: usize) -> bool {
        self.ready.is_ready(at)
    }

    /// Returns whether all of these chunks are in the file and checked.
    pub(super) fn all_ready(&self, chunks: Range<usize>) -> bool {
        self.ready.all_ready(chunks)
    }

    pub(super) fn is_suspect(&self, at: usize) -> bool {
        self.suspect.is_ready(at)
    }

    pub(super) fn ready_chunks(&self) -> usize {
        self.ready.count()
    }

    pub(super) fn suspect_chunks(&self) -> usize {
        self.suspect.count()
    }

    /// Returns whether every chunk is ready.
    pub(super) fn is_full(&self) -> bool {
        self.ready.is_full()
    }

    /// Returns whether a chunk is in flight.
    pub(super) fn is_in_flight(&self, at: usize) -> bool {
        self.in_flight.lock().has(at)
    }

    /// Returns whether any of these chunks is in flight.
    pub(super) fn any_in_flight(&self, chunks: Range<usize>) -> bool {
        self.in_flight.lock().has_any(chunks)
    }

    #[cfg(test)]
    pub(in crate::cache) fn is_idle(&self) -> bool {
        self.in_flight.lock().is_empty()
    }

    pub(in crate::cache) fn lock(&self) -> LockedResidency<'_> {
        LockedResidency { residency: self, in_flight: self.in_flight.lock() }
    }

    /// Every chunk in the file as far as this process knows, as words of a [`ReadyMap`].
    pub(super) fn known(&self) -> Vec<u64> {
        let ready = self.ready.words();
        let words = self.suspect.words().into_iter().zip(ready);
        words.map(|(suspect, ready)| suspect | ready).collect()
    }

    /// One word of [`Residency::known`].
    pub(super) fn known_word(&self, word: usize) -> u64 {
        self.suspect.word(word) | self.ready.word(word)
    }

    /// A chunk was written, and is right.
    pub(super) fn arrived(&self, at: usize) {
        self.ready.set(at);
    }

    /// A chunk is missing from now on.
    pub(super) fn gone(&self, at: usize) {
        self.ready.clear(at);
        self.suspect.clear(at);
    }

    /// Nothing is believed any more. Returns whether anything was.
    pub(super) fn doubt_all(&self) -> bool {
        if self.ready.is_empty() {
            return false;
        }
        self.suspect.add(&self.ready.words());
        self.ready.keep_only(&[]);
        true
    }

    /// Makes every chunk missing whose bit is not in `words`.
    pub(super) fn keep_only(&self, words: &[u64]) {
        self.ready.keep_only(words);
        self.suspect.keep_only(words);
    }

    /// A suspect chunk is right. Ready first, so that it never looks missing.
    pub(super) fn confirm(&self, at: usize) {
        self.ready.set(at);
        self.suspect.clear(at);
    }

    /// A suspect chunk is wrong.
    pub(super) fn refute(&self, at: usize) {
        self.suspect.clear(at);
    }

    /// Notes that a chunk was wrong, for the next scrub to report.
    pub(super) fn report_wrong(&self, at: usize) {
        lock(&self.wrong).insert(at);
    }

    /// The chunks of a range that were wrong; each is reported once.
    pub(super) fn take_wrong(&self, chunks: Range<usize>) -> Vec<usize> {
        let mut wrong = lock(&self.wrong);
        let found: Vec<_> = wrong.range(chunks).copied().collect();
        wrong.retain(|at| !found.contains(at));
        found
    }

    /// Returns whether the caller must check the suspect chunks, because no other task is going to.
    pub(super) fn begin_checks(&self) -> bool {
        !self.checking.swap(true, Ordering::AcqRel)
    }

    pub(super) fn end_checks(&self) {
        self.checking.store(false, Ordering::Release);
    }

    pub(super) fn asked(&self) -> &Asked {
        &self.asked
    }
}

impl LockedResidency<'_> {
    /// Returns whether a chunk is neither in the file nor in flight.
    pub(super) fn is_missing(&self, at: usize) -> bool {
        // See the module for the order.
        !self.in_flight.has(at) && !self.residency.has(at)
    }

    /// Returns whether a chunk must be checked and no task is doing so.
    pub(super) fn needs_check(&self, at: usize) -> bool {
        !self.in_flight.has(at) && self.residency.is_suspect(at) && !self.residency.is_ready(at)
    }

    /// Starts the fetch, copy or check of a chunk that is not in flight.
    pub(super) fn start(&mut self, at: usize, priority: Priority) -> Lease {
        self.in_flight.start(at, priority)
    }

    /// Joins the fetch of a chunk, if it is in flight.
    pub(super) fn join(&self, at: usize) -> Option<Waiter> {
        self.in_flight.join(at)
    }

    /// Makes a chunk missing that is in the file, unless a reader has asked for it lately according
    /// to `is_old`. Readers of the chunk wait until the lease is dropped. `None` if the chunk is
    /// missing or in flight.
    pub(super) fn withdraw(&mut self, at: usize, is_old: impl Fn() -> bool) -> Option<Withdrawn> {
        let residency = self.residency;
        let (was_ready, was_suspect) = (residency.ready.is_ready(at), residency.is_suspect(at));
        if self.in_flight.has(at) || !(was_ready || was_suspect) {
            return None;
        }
        let lease = self.in_flight.start(at, Priority::Background);
        residency.ready.clear(at);
        // See `Asked::note`.
        fence(Ordering::SeqCst);
        if is_old() {
            residency.suspect.clear(at);
            return Some(Withdrawn::Gone(lease));
        }
        if was_ready {
            residency.ready.set(at);
        }
        Some(Withdrawn::Spared(lease))
    }
}

/// The outcome of withdrawing a chunk.
pub(super) enum Withdrawn {
    /// The chunk is missing now.
    Gone(Lease),
    /// A reader has asked for the chunk meanwhile, so it stays. The lease must not be dropped under
    /// the lock.
    Spared(Lease),
}

/// When each chunk was asked for last.
#[derive(Debug)]
pub(super) struct Asked {
    clock: Arc<Clock>,
    /// Readings of `clock` at the latest requests.
    chunks: Box<[AtomicU32]>,
}

impl Asked {
    /// `clock` began when this process began to answer readers.
    fn new(clock: Arc<Clock>, chunks: usize) -> Self {
        Asked { clock, chunks: (0..chunks).map(|_| AtomicU32::new(0)).collect() }
    }

    pub(super) fn now(&self) -> u32 {
        self.clock.now()
    }

    /// Notes that chunks are asked for. To be called *before* the caller looks whether the chunks
    /// are ready: either eviction sees this, or the caller sees that they are gone.
    pub(super) fn note(&self, chunks: Range<usize>) {
        let now = self.now();
        for chunk in &self.chunks[chunks] {
            if chunk.load(Ordering::Relaxed) != now {
                chunk.store(now, Ordering::Relaxed);
            }
        }
        fence(Ordering::SeqCst);
    }

    pub(super) fn last(&self, chunk: usize) -> u32 {
        self.chunks[chunk].load(Ordering::Relaxed)
    }
}
