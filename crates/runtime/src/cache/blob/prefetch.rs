//! Fetches chunks ahead of readers, and lists missing ones.

use std::{ops::Range, sync::Arc, time::Duration};

use lazuli_image::{
    Chunk, Decoded, Stored,
    plan::{Planner, whole_units},
};
use tokio::{task::JoinHandle, time::Instant};

use super::{
    CachedBlob, TAKEOVERS,
    transfer::{self, Transfer},
};
use crate::{
    error::ReadError,
    request_sizes::{FIRST_NEEDED, LEAST_PART},
    sharing::workers::Priority,
    source::early::{Early, EarlyBytes},
};

/// Prefetch deadline. A reader that joins late loses at most this long.
const DEADLINE: Duration = Duration::from_secs(10);

/// How a request ended that was sent ahead of readers.
pub(crate) type Fetched = Result<(), ReadError>;

/// Where the bytes of a prefetch come from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BytesFrom<'a> {
    /// Requests for chunks that a start is expected to read.
    Request,
    /// Requests for other chunks. Whether readers ask for them later is not measured.
    BackgroundRequest,
    /// Requests that were sent before the blob was open.
    Early(&'a Early),
    /// The same, and the few bytes that a start needs first are requested again, see
    /// [`FIRST_NEEDED`].
    EarlyAndRequest(&'a Early),
}

impl BytesFrom<'_> {
    fn bytes(self, blob: &CachedBlob, range: &Range<Stored>) -> Option<EarlyBytes> {
        match self {
            BytesFrom::Request | BytesFrom::BackgroundRequest => None,
            BytesFrom::Early(early) => early.parts(&blob.id(), range),
            BytesFrom::EarlyAndRequest(early) => early.parts(&blob.id(), range).map(|mut bytes| {
                bytes.is_needed_first = range.end.0 - range.start.0 <= FIRST_NEEDED;
                bytes
            }),
        }
    }
}

impl CachedBlob {
    /// Starts to fetch those of `chunks`, in ascending order, that are neither present nor in
    /// flight. Waiting readers go first. Returns the requests, with the stored bytes that each asks
    /// for: none for chunks copied from another blob, or asked for early. `part` is the maximum for
    /// one connection, in bytes.
    pub(crate) fn prefetch(
        self: &Arc<Self>,
        chunks: &[usize],
        part: u64,
        from: BytesFrom<'_>,
    ) -> Vec<(u64, JoinHandle<Fetched>)> {
        let all = self.layout.chunks();
        let deadline = Instant::now() + self.settings.deadline.min(DEADLINE);
        let mut transfers = Vec::new();
        let copies;
        {
            let mut residency = self.residency.lock();
            let missing = whole_units(all, chunks);
            let mut missing: Vec<_> = missing.filter(|at| residency.is_missing(*at)).collect();
            // Chunks wanted soon must not be the first to be evicted.
            missing.iter().for_each(|at| self.residency.asked().note(*at..at + 1));
            let in_other_blobs = self.take_from_other_blobs(&mut missing);
            if !matches!(from, BytesFrom::BackgroundRequest) {
                missing.iter().for_each(|at| self.foresight.expect(*at, self.stored_bytes(*at)));
            }
            let mut start = |at: usize| residency.start(at, Priority::Background);
            copies = in_other_blobs.into_iter().map(&mut start).collect();
            for request in Planner::NODE.requests(missing.iter().map(|at| &all[*at])) {
                let leases = missing[request].iter().copied().map(&mut start).collect();
                let held = |range: &Range<Stored>| from.bytes(self, range);
                transfers.push(Transfer::ahead(self, leases, deadline, part, held));
            }
        }
        let spawn = |transfer: Transfer| {
            let bytes = transfer.bytes();
            (bytes, self.workers.runtime().spawn(transfer::run(self.clone(), transfer)))
        };
        let copies = self.copy(copies, Priority::Background).into_iter().map(|copy| (0, copy));
        copies.chain(transfers.into_iter().map(spawn)).collect()
    }

    /// The same as [`CachedBlob::ensure`] for a caller that is no reader: listeners are not told of
    /// it, readers go before it, and a full disk is not waited for.
    pub(crate) async fn prefetch_range(
        self: &Arc<Self>,
        range: &Range<Decoded>,
    ) -> Result<(), ReadError> {
        /// Interval between checks whether fetches by others have finished.
        const STEP: Duration = Duration::from_millis(5);
        let chunks = self.layout.chunks_in(range);
        let every: Vec<_> = chunks.clone().collect();
        for _ in 0..TAKEOVERS {
            for (_, request) in self.prefetch(&every, LEAST_PART, BytesFrom::BackgroundRequest) {
                request.await.unwrap_or(Ok(()))?;
            }
            while self.residency.any_in_flight(chunks.clone()) {
                tokio::time::sleep(STEP).await;
            }
            self.residency.asked().note(chunks.clone());
            if self.residency.all_ready(chunks.clone()) {
                return Ok(());
            }
            if every.iter().any(|at| self.residency.is_suspect(*at)) {
                // Needs no network.
                self.join_or_start(chunks.clone(), Instant::now() + self.settings.deadline).await?;
            }
        }
        Err(ReadError::Interrupted { blob: self.id() })
    }

    /// Returns whether a chunk is in the file, as far as the maps say.
    pub(crate) fn has(&self, chunk: usize) -> bool {
        self.residency.has(chunk)
    }

    /// Returns whether a chunk is in the file or in flight.
    pub(crate) fn is_under_way(&self, chunk: usize) -> bool {
        self.has(chunk) || self.residency.is_in_flight(chunk)
    }

    /// Positions of the chunks that are not in the file, as far as the maps say.
    pub(crate) fn missing(&self) -> Vec<usize> {
        (0..self.layout.chunks().len()).filter(|at| !self.has(*at)).collect()
    }

    /// Positions of the chunks that are not in the file, or were not checked yet.
    pub(crate) fn unready(&self) -> Vec<usize> {
        (0..self.layout.chunks().len()).filter(|at| !self.residency.is_ready(*at)).collect()
    }

    /// Stored bytes of the chunks that are in the file, and of all chunks.
    pub(crate) fn filled(&self) -> (u64, u64) {
        let sizes = self.layout.chunks().iter().map(Chunk::stored_share);
        sizes.enumerate().fold((0, 0), |(here, all), (at, size)| {
            (here + if self.has(at) { size } else { 0 }, all + size)
        })
    }

    /// Stored bytes of the chunks that are not in the file.
    pub(crate) fn missing_bytes(&self) -> u64 {
        if self.residency.ready_chunks() == self.layout.chunks().len() {
            return 0;
        }
        let (here, all) = self.filled();
        all - here
    }

    /// The position of the chunk with a number.
    pub(crate) fn position(&self, number: u32) -> Option<usize> {
        self.layout.chunks().binary_search_by_key(&number, |chunk| chunk.number).ok()
    }

    /// Positions of the chunks with bytes in `range`, which may end behind the last one.
    pub(crate) fn positions(&self, range: &Range<Decoded>) -> Range<usize> {
        self.layout.chunks_in(range)
    }

    /// Positions of the chunks that lie in these stored bytes.
    pub(crate) fn stored_in(&self, range: &Range<Stored>) -> Range<usize> {
        let chunks = self.layout.chunks();
        let first = chunks.partition_point(|chunk| chunk.stored < range.start);
        let end = chunks.partition_point(|chunk| chunk.stored_end() <= range.end);
        first..end.max(first)
    }

    /// Positions of the chunks that lie in the first `bytes` stored bytes.
    pub(crate) fn stored_within(&self, bytes: u64) -> Range<usize> {
        0..self.layout.chunks().partition_point(|chunk| chunk.stored_end().0 <= bytes)
    }
}
