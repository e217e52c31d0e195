//! Chunks that an earlier process left, or that somebody else may have changed: read back and
//! checked before anybody sees them.
//!
//! ```text
//! suspect ── asked for, or in the background ──▶ read back ─▶ digest ── right ──▶ ready
//!                                                                  └─ wrong ──▶ missing ─▶ fetched, if asked for
//! ```

use std::{
    os::unix::fs::FileExt as _,
    sync::{Arc, MutexGuard, Weak, atomic::Ordering},
    time::Duration,
};

use lazuli_image::BLOCK_SIZE;

use super::{
    CachedBlob, Lease,
    durable::{Touch, lock},
};
use crate::{
    error::ReadError,
    fetch::{self, FetchRequest, JOB},
};

/// Pause before chunks are checked that nobody has asked for: what starts with the daemon goes
/// first.
const CHECK_AFTER: Duration = Duration::from_secs(1);

/// How often a chunk is read back while somebody else goes on changing the file. Then it counts as
/// wrong.
const ATTEMPTS: usize = 3;

impl CachedBlob {
    /// Checks suspect chunks that somebody waits for.
    pub(super) fn check(self: &Arc<Self>, leases: Vec<Lease>) {
        for job in fetch::jobs(self, leases) {
            self.workers.runtime().spawn(settle(self.clone(), job, false, check));
        }
    }

    /// Makes sure that all suspect chunks are checked at some time.
    pub(super) fn check_soon(self: &Arc<Self>) {
        if !self.checking.swap(true, Ordering::AcqRel) {
            self.workers.runtime().spawn(check_all(Arc::downgrade(self)));
        }
    }

    /// Finds out whether a chunk in the file is right: then it is ready, else missing, and in no
    /// case suspect any longer. Blocks.
    pub(super) fn resolve(self: &Arc<Self>, at: usize) -> bool {
        let (right, touch) = self.verdict(at);
        let (was_ready, was_suspect) = (self.ready.is_ready(at), self.suspect.is_ready(at));
        if !was_ready && !was_suspect {
            return false;
        }
        self.counters.checked.fetch_add(1, Ordering::Relaxed);
        // Ready first, so that the chunk never looks missing.
        if right {
            self.ready.set(at);
        }
        if right || !was_ready {
            self.suspect.clear(at);
            self.note(&touch, at / 64);
        }
        drop(touch);
        if !right {
            self.counters.wrong.fetch_add(1, Ordering::Relaxed);
            lock(&self.wrong).insert(at);
            let chunk = self.chunk(at);
            tracing::warn!(path = %self.path().display(), chunk = chunk.number, from = %chunk.decoded,
                to = %chunk.decoded_end(), "a chunk in the cache is wrong");
            if was_ready && let Err(error) = self.stand_guard(false).and(self.forget(&[at])) {
                tracing::error!(path = %self.path().display(), %error, "it cannot be given up");
            }
        }
        if self.suspect.is_empty() && self.ready.is_full() {
            self.hurry.notify_one();
        }
        self.flush_soon();
        right
    }

    /// Whether a chunk is right, true as long as the lock is held. Blocks.
    pub(super) fn verdict(self: &Arc<Self>, at: usize) -> (bool, MutexGuard<'_, Touch>) {
        for _ in 0..ATTEMPTS {
            let doubts = lock(&self.touch).doubts;
            let right = self.reads_right(at);
            match self.look() {
                Ok(touch) if touch.doubts == doubts => return (right, touch),
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(path = %self.path().display(), %error, "cannot look at the file");
                    break;
                }
            }
        }
        (false, lock(&self.touch))
    }

    /// Whether the file has the bytes of a chunk, and zeros behind it up to the next block. Blocks.
    fn reads_right(&self, at: usize) -> bool {
        let chunk = self.chunk(at);
        let size = chunk.decoded_size as usize;
        let mut bytes = vec![0; size.next_multiple_of(BLOCK_SIZE as usize)];
        match self.store.data().read_exact_at(&mut bytes, chunk.decoded.0) {
            Ok(()) => {
                let (content, padding) = bytes.split_at(size);
                chunk.digest.matches(content) && padding.iter().all(|byte| *byte == 0)
            }
            Err(error) => {
                tracing::warn!(path = %self.path().display(), at = %chunk.decoded, %error, "cannot read");
                false
            }
        }
    }

    /// Some suspect chunks from `at` on that nobody checks; moves `at` behind them.
    fn next_suspects(&self, at: &mut usize) -> Vec<Lease> {
        let mut flights = self.flights.lock();
        let mut leases = Vec::new();
        let mut size = 0;
        while *at < self.layout.chunks().len() && size < JOB {
            if self.suspect.is_ready(*at) && !flights.has(*at) {
                leases.push(flights.start(*at, false));
                size += u64::from(self.chunk(*at).decoded_size);
            }
            *at += 1;
        }
        leases
    }
}

/// A way to make a chunk ready without any network: whether it is now. Blocks.
pub(super) type Locally = fn(&Arc<CachedBlob>, usize) -> Result<bool, ReadError>;

fn check(blob: &Arc<CachedBlob>, at: usize) -> Result<bool, ReadError> {
    Ok(blob.resolve(at))
}

/// Makes some chunks ready `locally`, and fetches those that are not and that somebody waits for.
pub(super) async fn settle(
    blob: Arc<CachedBlob>,
    leases: Vec<Lease>,
    background: bool,
    locally: Locally,
) {
    let worker = blob.clone();
    let attempt = move |lease: Lease| match locally(&worker, lease.chunk()) {
        // Dropped, the lease sends those to the network who have joined meanwhile.
        Ok(false) => lease.is_wanted().then_some(lease),
        result => {
            lease.finish(result.map(|_| ()));
            None
        }
    };
    let attempt_all = move || leases.into_iter().filter_map(attempt).collect::<Vec<_>>();
    let missing = blob.run(background, attempt_all).await;
    for lease in missing {
        let chunk = blob.chunk(lease.chunk());
        let request = FetchRequest {
            stored: chunk.stored..chunk.stored_end(),
            held: None,
            part: u64::MAX,
            leases: vec![lease],
            deadline: tokio::time::Instant::now() + blob.deadline(),
            is_ahead: false,
        };
        blob.workers.runtime().spawn(fetch::run(blob.clone(), request));
    }
}

/// Checks the suspect chunks of a blob that nobody has asked for, one blob at a time.
async fn check_all(blob: Weak<CachedBlob>) {
    let Some(strong) = blob.upgrade() else { return };
    let workers = strong.workers.clone();
    // If the kernel reads the file without asking, because it was complete, it must not go on like
    // that.
    let guarded = tokio::task::spawn_blocking(move || strong.stand_guard(false)).await;
    if let Ok(Err(error)) = guarded {
        tracing::error!(%error, "a blob that somebody else has changed is read without a check");
    }
    tokio::time::sleep(CHECK_AFTER).await;
    let _turn = workers.turn().await;
    let mut at = 0;
    while let Some(blob) = blob.upgrade() {
        let leases = blob.next_suspects(&mut at);
        if leases.is_empty() {
            // Whatever becomes suspect from here on starts another task.
            blob.checking.store(false, Ordering::Release);
            if blob.suspect.is_empty() {
                // Seals the file, and the blob may be complete.
                blob.hurry.notify_one();
                blob.flush_soon();
            } else {
                blob.check_soon();
            }
            return;
        }
        settle(blob, leases, true, check).await;
    }
}
