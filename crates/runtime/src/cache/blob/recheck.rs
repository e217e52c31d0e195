//! Chunks that an earlier process left, or that another one may have changed: read back and checked
//! before any reader gets them.
//!
//! ```text
//! suspect ── asked for, or in the background ─▶ read back ─▶ digest ── right ─▶ ready
//!                                                                └─ wrong ─▶ missing
//! ```

use std::{
    sync::{Arc, MutexGuard, Weak, atomic::Ordering},
    time::Duration,
};

use super::{
    super::single_flight::Lease,
    CachedBlob,
    commit::{JOB, jobs},
    file::FileState,
    guard::Hold,
    settle::settle,
};
use crate::{error::ReadError, metrics::Origin, sharing::workers::Priority};

/// Pause before chunks are checked in the background: work at the daemon's start goes first.
const CHECK_AFTER: Duration = Duration::from_secs(1);

/// The number of times that a chunk is read back while another process keeps changing the file.
/// Then it counts as wrong.
const ATTEMPTS: usize = 3;

impl CachedBlob {
    /// Checks suspect chunks that a reader waits for.
    pub(super) fn check(self: &Arc<Self>, leases: Vec<Lease>) {
        for job in jobs(self, leases) {
            self.workers.runtime().spawn(settle(self.clone(), job, Priority::Reader, check));
        }
    }

    /// Makes sure that all suspect chunks are checked at some time.
    pub(super) fn check_soon(self: &Arc<Self>) {
        if self.residency.begin_checks() {
            self.workers.runtime().spawn(check_all(Arc::downgrade(self)));
        }
    }

    /// Finds out whether a chunk in the file is right: then it is ready, else missing, and in no
    /// case suspect any longer. Blocks.
    pub(super) fn resolve(self: &Arc<Self>, at: usize) -> bool {
        let (right, state) = self.verdict(at);
        let was_ready = self.residency.is_ready(at);
        let was_suspect = self.residency.is_suspect(at);
        if !was_ready && !was_suspect {
            return false;
        }
        self.counters.checked.fetch_add(1, Ordering::Relaxed);
        if right {
            self.residency.confirm(at);
        } else if !was_ready {
            self.residency.refute(at);
        }
        if right || !was_ready {
            self.note(&state, at / 64);
        }
        drop(state);
        if !right {
            self.counters.wrong.fetch_add(1, Ordering::Relaxed);
            self.metrics.wrong(Origin::Cache);
            self.residency.report_wrong(at);
            let chunk = self.chunk(at);
            tracing::warn!(path = %self.path().display(), chunk = chunk.number, from = %chunk.decoded,
                to = %chunk.decoded_end(), "a chunk in the cache is wrong");
            if was_ready && let Err(error) = self.rearm(Hold::UntilComplete).and(self.forget(&[at]))
            {
                tracing::error!(path = %self.path().display(), %error, "it cannot be given up");
            }
        }
        if self.residency.suspect_chunks() == 0 && self.residency.is_full() {
            self.file.flush_now();
        }
        self.flush_soon();
        right
    }

    /// Returns whether a chunk is right; the answer is valid while the lock is held. Blocks.
    pub(super) fn verdict(self: &Arc<Self>, at: usize) -> (bool, MutexGuard<'_, FileState>) {
        for _ in 0..ATTEMPTS {
            let doubts = self.file.lock_state().doubts();
            let right = self.file.reads_right(self.chunk(at));
            match self.look() {
                Ok(state) if state.doubts() == doubts => return (right, state),
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(path = %self.path().display(), %error, "cannot look at the file");
                    break;
                }
            }
        }
        (false, self.file.lock_state())
    }

    /// Some suspect chunks from `at` on that no task checks; moves `at` behind them.
    fn next_suspects(&self, at: &mut usize) -> Vec<Lease> {
        let mut residency = self.residency.lock();
        let mut leases = Vec::new();
        let mut size = 0;
        while *at < self.layout.chunks().len() && size < JOB {
            if residency.needs_check(*at) {
                leases.push(residency.start(*at, Priority::Background));
                size += u64::from(self.chunk(*at).decoded_size);
            }
            *at += 1;
        }
        leases
    }
}

fn check(blob: &Arc<CachedBlob>, at: usize) -> Result<bool, ReadError> {
    Ok(blob.resolve(at))
}

/// Checks the suspect chunks of a blob in the background, one blob at a time.
async fn check_all(blob: Weak<CachedBlob>) {
    let Some(strong) = blob.upgrade() else { return };
    let workers = strong.workers.clone();
    // If the kernel reads the file without asking, because it was complete, it must not go on like
    // that.
    let guarded = tokio::task::spawn_blocking(move || strong.rearm(Hold::UntilComplete)).await;
    if let Ok(Err(error)) = guarded {
        tracing::error!(%error, "a blob that another process has changed is read without a check");
    }
    tokio::time::sleep(CHECK_AFTER).await;
    let _scan = workers.scan_permit().await;
    let mut at = 0;
    while let Some(blob) = blob.upgrade() {
        let leases = blob.next_suspects(&mut at);
        if leases.is_empty() {
            // Chunks that become suspect from here on start another task.
            blob.residency.end_checks();
            if blob.residency.suspect_chunks() == 0 {
                // Seals the file, and the blob may be complete.
                blob.file.flush_now();
                blob.flush_soon();
            } else {
                blob.check_soon();
            }
            return;
        }
        settle(blob, leases, Priority::Background, check).await;
    }
}
