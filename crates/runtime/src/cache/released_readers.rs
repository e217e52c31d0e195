//! Readers that were let through and may not have left the kernel's wait yet.
//!
//! An answer wakes a reader that sleeps in the wait for pre-content events, and some instructions
//! later the reader accesses the page. A cgroup v1 freezer holds a sleeping reader in place: it
//! leaves the wait when it is thawed, perhaps hours later, and then reads the file's content at
//! that time. So a chunk stays until the reader that was let through to it has been seen outside
//! the wait, and for [`Settings::grace`] longer. (The freezer of cgroup v2 doesn't stop sleepers in
//! the kernel: they finish the read, and stop on their way back to the program.)
//!
//! A thread waits for one event at a time. So the last one that it was let through to is all that
//! has to be known.
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

/// Between the note and the answer a reader may be awake although it still has to wait: the kernel
/// wakes all of them for each answer.
const ANSWERED: Duration = Duration::from_secs(1);

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
    strangers: Mutex<HashMap<i32, Option<Instant>>>,
    /// Whether strangers have been searched for, so that no more can appear.
    counted: AtomicBool,
}

/// A thread that was let through.
struct Reader {
    blob: BlobKey,
    chunks: Range<usize>,
    noted: Instant,
    /// When it was first seen outside the wait.
    left: Option<Instant>,
}

impl Released {
    /// Records a thread that is about to be let through. 0 stands for a thread that the kernel
    /// doesn't name.
    pub(super) fn note(&self, thread: i32, blob: BlobKey, chunks: Range<usize>) {
        if thread == 0 {
            self.counted.store(false, Ordering::Release);
            return;
        }
        let reader = Reader { blob, chunks, noted: Instant::now(), left: None };
        lock(&self.threads).insert(thread, reader);
    }

    /// Looks where all of them are, and forgets those that left `grace` ago. Blocks.
    pub(super) fn sweep(&self, grace: Duration) {
        if !self.counted.swap(true, Ordering::AcqRel) {
            let frozen = threads::frozen().unwrap_or_else(|error| {
                tracing::warn!(%error, "cannot see which readers are frozen");
                Vec::new()
            });
            lock(&self.strangers).extend(frozen.into_iter().map(|thread| (thread, None)));
        }
        let now = Instant::now();
        lock(&self.strangers).retain(|thread, left| is_here(*thread, left, now, grace));
        let old: Vec<_> = {
            let all = lock(&self.threads);
            let old = all.iter().filter(|(_, reader)| now.duration_since(reader.noted) > ANSWERED);
            old.map(|(thread, reader)| (*thread, reader.noted, reader.left)).collect()
        };
        for (thread, noted, mut left) in old {
            // Not under the lock, which events need: the kernel takes its time over /proc.
            let stays = is_here(thread, &mut left, now, grace);
            let mut all = lock(&self.threads);
            if let Some(reader) = all.get_mut(&thread).filter(|reader| reader.noted == noted) {
                reader.left = left;
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

/// Returns whether a thread may not have reached its page yet. `left` is when it was first seen
/// outside the wait: a later wait is for another event.
fn is_here(thread: i32, left: &mut Option<Instant>, now: Instant, grace: Duration) -> bool {
    match (threads::find(thread), *left) {
        (ThreadState::Gone, _) => false,
        (ThreadState::Waits, None) => true,
        (_, seen) => now.duration_since(*left.insert(seen.unwrap_or(now))) < grace,
    }
}

impl fmt::Debug for Released {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Released")
            .field("threads", &lock(&self.threads).len())
            .finish_non_exhaustive()
    }
}
