//! Readers that got their answer but may not have left the kernel's wait yet.
//!
//! An answer wakes a reader that sleeps in the wait for pre-content events, and some instructions
//! later the reader accesses the page. A cgroup v1 freezer holds a sleeping reader in place: it
//! leaves the wait when it is thawed, perhaps hours later, and then reads the file's content at
//! that time. So a chunk stays until the reader that was let through to it has been seen outside
//! the wait, and for [`Settings::grace`] longer. (The freezer of cgroup v2 doesn't stop sleepers in
//! the kernel: they finish the read, and stop on their way back to the program.)
//!
//! A runnable reader may get no processor for minutes, when a tenant starves its own threads or
//! those of others. So a runnable thread counts as outside only after it has used enough processor
//! time.
//!
//! A thread waits for one event at a time, so only its last one needs to be recorded.
//!
//! [`Settings::grace`]: super::Settings::grace

use std::{
    collections::HashMap,
    fmt,
    ops::Range,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{
    kernel::threads::{self, ThreadState},
    sync::lock,
};

/// How long a reader's state says nothing after it was recorded: the kernel wakes all waiting
/// readers for each answer, so this one may be awake although its own answer has not been written.
const ANSWERED: Duration = Duration::from_secs(1);

/// Processor time, in ticks of 10 ms, in which a reader certainly leaves the wait, and in which it
/// copies a chunk. Leaving takes microseconds, copying less than a millisecond for each megabyte.
/// Leaving has two ticks because the first may be nearly over when the count begins.
const LEAVES: u64 = 2;
const COPIES: u64 = 1;

/// Distinguishes the open blobs of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BlobKey(u64);

impl BlobKey {
    /// A key that no other blob has.
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        BlobKey(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The readers of a cache that were let through.
#[derive(Default)]
pub(super) struct Released {
    threads: Mutex<HashMap<i32, Reader>>,
    /// Threads found frozen in the wait that an earlier process may have let through, to chunks
    /// unknown to this process.
    strangers: Mutex<HashMap<i32, Seen>>,
    /// Whether strangers have been searched for, so that no more can appear.
    counted: AtomicBool,
}

/// A thread that was let through.
struct Reader {
    blob: BlobKey,
    chunks: Range<usize>,
    noted: Instant,
    seen: Seen,
}

/// Where a thread was seen.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Its processor time when it was first seen awake.
    awake: Option<u64>,
    /// When it was first seen outside the wait.
    outside: Option<Instant>,
}

impl Released {
    /// Records a thread that is about to be let through. 0 stands for a thread that the kernel
    /// doesn't name.
    pub(super) fn note(&self, thread: i32, blob: BlobKey, chunks: Range<usize>) {
        if thread == 0 {
            self.counted.store(false, Ordering::Release);
            return;
        }
        let reader = Reader { blob, chunks, noted: Instant::now(), seen: Seen::default() };
        lock(&self.threads).insert(thread, reader);
    }

    /// Looks where all of them are, and forgets those that left `grace` ago. Blocks.
    pub(super) fn sweep(&self, grace: Duration) {
        if !self.counted.swap(true, Ordering::AcqRel) {
            let frozen = threads::frozen().unwrap_or_else(|error| {
                tracing::warn!(%error, "cannot see which readers are frozen");
                Vec::new()
            });
            lock(&self.strangers)
                .extend(frozen.into_iter().map(|thread| (thread, Seen::default())));
        }
        let now = Instant::now();
        let stays = |thread: i32, seen: &mut Seen, chunks: usize| {
            seen.is_before_its_page(threads::find(thread), chunks, now, grace)
        };
        lock(&self.strangers).retain(|thread, seen| stays(*thread, seen, 1));
        let old: Vec<_> = {
            let all = lock(&self.threads);
            let old = all.iter().filter(|(_, reader)| now.duration_since(reader.noted) > ANSWERED);
            let sight = |(thread, reader): (&i32, &Reader)| {
                (*thread, reader.noted, reader.seen, reader.chunks.len())
            };
            old.map(sight).collect()
        };
        for (thread, noted, mut seen, chunks) in old {
            // Not under the lock, which events need: the kernel takes its time over /proc.
            let stays = stays(thread, &mut seen, chunks);
            let mut all = lock(&self.threads);
            if let Some(reader) = all.get_mut(&thread).filter(|reader| reader.noted == noted) {
                reader.seen = seen;
                if !stays {
                    all.remove(&thread);
                }
            }
        }
    }

    /// Returns whether frozen threads may be on their way to any chunk.
    pub(super) fn has_strangers(&self) -> bool {
        !lock(&self.strangers).is_empty()
    }

    /// The chunks that must stay, by blob.
    pub(super) fn chunks(&self) -> HashMap<BlobKey, Vec<Range<usize>>> {
        let mut chunks = HashMap::<_, Vec<_>>::new();
        for reader in lock(&self.threads).values() {
            chunks.entry(reader.blob).or_default().push(reader.chunks.clone());
        }
        chunks
    }
}

impl Seen {
    /// Returns whether a thread that was let through to this many chunks may not have copied all of
    /// them yet. Once it was seen outside the wait, a later wait is for another event.
    fn is_before_its_page(
        &mut self,
        state: ThreadState,
        chunks: usize,
        now: Instant,
        grace: Duration,
    ) -> bool {
        let copied = LEAVES + COPIES * chunks as u64;
        match state {
            ThreadState::Gone => return false,
            ThreadState::Waits if self.outside.is_none() => return true,
            ThreadState::Runs(ticks)
                if self.outside.is_none()
                    && ticks < self.awake.get_or_insert(ticks).saturating_add(copied) =>
            {
                return true;
            }
            _ => {}
        }
        now.duration_since(*self.outside.get_or_insert(now)) < grace
    }
}

impl fmt::Debug for Released {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Released")
            .field("threads", &lock(&self.threads).len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(60);

    /// Follows a reader of two chunks through `states`, one every second; when it counts as gone.
    fn gone_after(states: impl IntoIterator<Item = ThreadState>) -> Option<usize> {
        let (mut seen, begin) = (Seen::default(), Instant::now());
        states.into_iter().enumerate().position(|(second, state)| {
            let now = begin + Duration::from_secs(second as u64);
            !seen.is_before_its_page(state, 2, now, GRACE)
        })
    }

    #[test]
    fn a_reader_that_gets_no_processor_stays() {
        use ThreadState::{Elsewhere, Gone, Runs, Waits};
        let long = || std::iter::repeat_n(Runs(500), 1000);
        assert_eq!(gone_after(long()), None);
        assert_eq!(gone_after([Waits; 1000]), None);
        // It ran, but not for long enough to have copied both chunks.
        assert_eq!(gone_after(long().chain([Runs(503); 100])), None);
        assert_eq!(gone_after(long().chain([Runs(504); 100])), Some(1060));
        assert_eq!(gone_after(long().chain([Elsewhere; 100])), Some(1060));
        assert_eq!(gone_after(long().chain([Gone])), Some(1000));
        // It waits for the next event.
        assert_eq!(gone_after([Elsewhere].into_iter().chain([Waits; 100])), Some(60));
    }
}
