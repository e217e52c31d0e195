//! Makes ranges ready, the one operation that every driver needs.
//!
//! ```text
//! kernel ─▶ ensure ─▶ plan (pure) ─▶ fetch ─▶ commit ─▶ ready
//! ```

use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

use lazuli_image::{Decoded, plan::Planner};
use tokio::time::Instant;

use super::{
    super::{
        readahead,
        single_flight::{Lease, Waiter},
    },
    CachedBlob, TAKEOVERS,
    disk_full::WaitForSpace,
    prefetch::BytesFrom,
    transfer::{self, Transfer},
};
use crate::{error::ReadError, sharing::workers::Priority};

/// Stored bytes that are read ahead at least and at most: one request, and half of the memory for
/// answers.
const LEAST_WINDOW: u64 = Planner::NODE.max_request;
const LARGEST_WINDOW: u64 = 32 << 20;

/// See [`CachedBlob::window`].
const ROUND_TRIPS: u32 = 6;

/// The work to do for a reader.
#[derive(Default)]
struct Work {
    /// The fetches that the reader waits for.
    waiters: Vec<Waiter>,
    transfers: Vec<Transfer>,
    /// Suspect chunks to check.
    checks: Vec<Lease>,
    /// Chunks that another blob may have.
    copies: Vec<Lease>,
    /// Chunks to read ahead.
    ahead: Range<usize>,
}

impl CachedBlob {
    /// Returns when every chunk with bytes in `range` is in the file and has been checked. Bytes
    /// between chunks, up to the next block, are zeros. Calls may run concurrently. Dropping the
    /// future is harmless: fetches in flight continue for other readers.
    ///
    /// # Errors
    /// The range could not be brought in; a later call tries again. Parts of it may be ready.
    pub async fn ensure(self: &Arc<Self>, range: Range<Decoded>) -> Result<(), ReadError> {
        let ready = self.make_ready(range).await;
        ready.inspect_err(|error| self.metrics.read_failed(error))
    }

    async fn make_ready(self: &Arc<Self>, range: Range<Decoded>) -> Result<(), ReadError> {
        if range.end.0 > self.layout.file_size() || range.start > range.end {
            let (blob, size) = (self.id(), self.layout.file_size());
            return Err(ReadError::OutOfRange { blob, range, size });
        }
        if !self.layout.covers(&range) {
            return Err(ReadError::NoChunk { blob: self.id(), range });
        }
        let wanted = self.layout.chunks_in(&range);
        self.note_request(wanted.clone());
        if self.residency.all_ready(wanted.clone()) {
            self.counters.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        self.counters.misses.fetch_add(1, Ordering::Relaxed);
        let (_reader, _wait) = (self.workers.reader(self.account()), self.metrics.wait());
        let mut waiting = WaitForSpace::new(self.settings.deadline);
        let deadline = Instant::now() + self.settings.deadline;
        for _ in 0..TAKEOVERS {
            while let Err(error) = self.join_or_start(wanted.clone(), deadline).await {
                let is_full = matches!(error, ReadError::NoSpace { .. });
                if !is_full || !waiting.find(self, wanted.clone()).await {
                    return Err(error);
                }
            }
            // Chunks that arrived late may have been evicted again, and fetches may have been
            // abandoned.
            self.residency.asked().note(wanted.clone());
            if self.residency.all_ready(wanted.clone()) {
                return Ok(());
            }
        }
        Err(ReadError::Interrupted { blob: self.id() })
    }

    /// Returns whether [`CachedBlob::ensure`] would return at once. If so, the range stays ready
    /// for at least [`Settings::grace`](super::super::Settings::grace).
    pub fn is_ready(self: &Arc<Self>, range: &Range<Decoded>) -> bool {
        let chunks = self.layout.chunks_in(range);
        self.note_request(chunks.clone());
        range.end.0 <= self.layout.file_size() && self.residency.all_ready(chunks)
    }

    /// Records a driver's request. Call it before testing readiness, see
    /// [`Asked::note`](super::residency::Asked::note).
    fn note_request(self: &Arc<Self>, chunks: Range<usize>) {
        self.residency.asked().note(chunks.clone());
        self.listeners.tell(&chunks);
        let ahead =
            self.runs.reached(self.layout.chunks(), &chunks, LARGEST_WINDOW, || self.window());
        if !ahead.is_empty() {
            // Not here: the thread that reads the kernel's events calls this.
            let blob = self.clone();
            self.workers.runtime().spawn(async move { blob.read_ahead(ahead) });
        }
        self.foresight.note_request(chunks, |at| self.stored_bytes(at));
    }

    /// Requests chunks ahead of a run.
    fn read_ahead(self: &Arc<Self>, ahead: Range<usize>) {
        for request in readahead::requests(self.layout.chunks(), ahead) {
            self.prefetch(&request.collect::<Vec<_>>(), u64::MAX, BytesFrom::Request);
        }
    }

    /// Stored bytes to read ahead of a run: several times what the link carries in a round trip,
    /// since the requests of a window share the link, and its reader waits for the first one.
    fn window(&self) -> u64 {
        let sources = self.sources();
        let round_trip = sources.iter().find_map(|source| source.round_trip()).unwrap_or_default();
        self.workers
            .link_speed()
            .bytes_in(ROUND_TRIPS * round_trip)
            .clamp(LEAST_WINDOW, LARGEST_WINDOW)
    }

    /// Waits until nothing of `wanted` is in flight any more; fetches may have been abandoned.
    pub(super) async fn join_or_start(
        self: &Arc<Self>,
        wanted: Range<usize>,
        deadline: Instant,
    ) -> Result<(), ReadError> {
        for waiter in self.start_missing(wanted, deadline) {
            waiter.wait().await.unwrap_or(Ok(()))?;
        }
        Ok(())
    }

    /// Joins the fetches in flight for chunks of `wanted` that are not ready, starts fetches of
    /// missing chunks, and checks suspect ones. Retries until `deadline`.
    fn start_missing(self: &Arc<Self>, wanted: Range<usize>, deadline: Instant) -> Vec<Waiter> {
        let Work { waiters, transfers, checks, copies, ahead } = self.plan(wanted, deadline);
        self.check(checks);
        self.copy(copies, Priority::Reader);
        for transfer in transfers {
            self.workers.runtime().spawn(transfer::run(self.clone(), transfer));
        }
        // Separate requests: in one answer with chunks that a reader waits for, they would delay
        // the reader.
        self.read_ahead(ahead);
        waiters
    }

    /// Plans the work for a reader of `wanted`, and takes its leases.
    fn plan(&self, wanted: Range<usize>, deadline: Instant) -> Work {
        let chunks = self.layout.chunks();
        let mut work = Work::default();
        let priority = |at: &usize| match wanted.contains(at) {
            true => Priority::Reader,
            false => Priority::Background,
        };
        let window = self.window();
        let mut residency = self.residency.lock();
        let suspects: Vec<_> = wanted.clone().filter(|at| residency.needs_check(*at)).collect();
        let mut missing = Vec::new();
        let is_missing = |at: usize| residency.is_missing(at);
        if let Some(first) = wanted.clone().find(|at| is_missing(*at)) {
            let amplify = self.settings.amplify;
            let wide = Planner::NODE.neighbours(chunks, wanted.clone(), amplify, is_missing);
            missing.extend(wide.clone().filter(|at| is_missing(*at)));
            if amplify > 0 {
                let bytes = missing.iter().map(|at| chunks[*at].stored_share()).sum();
                let end = self.runs.follow(chunks, first, wide.end, bytes, window, is_missing);
                work.ahead = wide.end..end;
            }
        }
        let mut start = |at: &usize| residency.start(*at, priority(at));
        work.checks.extend(suspects.iter().map(&mut start));
        work.copies.extend(self.take_from_other_blobs(&mut missing).iter().map(&mut start));
        for request in Planner::NODE.requests(missing.iter().map(|at| &chunks[*at])) {
            let leases = missing[request].iter().map(&mut start).collect();
            work.transfers.push(Transfer::on_demand(self, leases, deadline));
        }
        work.waiters.extend(wanted.filter_map(|at| residency.join(at)));
        work
    }
}
