//! Bringing chunks in before anybody asks, and what there is to bring.

use std::{ops::Range, sync::Arc, time::Duration};

use lazuli_image::{Chunk, Decoded};
use tokio::{task::JoinHandle, time::Instant};

use super::{
    CachedBlob,
    blob::{Fetched, TAKEOVERS},
};
use crate::{
    error::ReadError,
    fetch::{self, FetchRequest},
    source::early::Early,
};

/// Longest time that is spent on what nobody waits for: who joins in towards its end waits for so
/// long in vain.
const AHEAD: Duration = Duration::from_secs(10);

impl CachedBlob {
    /// Begins to fetch those of `chunks`, in ascending order, that are neither here nor on the way,
    /// for readers to come. Those who wait already go first. Returns the requests, whose bytes are
    /// counted as stored; what another blob has needs none. `part` is what one connection is asked
    /// for at most, in bytes. What was asked for `early` is not asked for again, unless it is
    /// little and the start needs it first, see [`fetch::FIRST_NEEDED`].
    pub(crate) fn bring(
        self: &Arc<Self>,
        chunks: &[usize],
        part: u64,
        early: Option<&Early>,
        is_first: bool,
    ) -> Vec<(u64, JoinHandle<Fetched>)> {
        let all = self.layout.chunks();
        let deadline = Instant::now() + self.settings.deadline.min(AHEAD);
        let mut requests = Vec::new();
        let copies;
        {
            let mut flights = self.flights.lock();
            let is_missing = |at: &usize| !flights.has(*at) && !self.has(*at);
            let missing = fetch::whole_units(all, chunks);
            let mut missing: Vec<_> = missing.filter(is_missing).collect();
            // What is wanted soon is not what eviction takes first.
            missing.iter().for_each(|at| self.asked.note(*at..at + 1));
            let in_other_blobs = self.take_from_other_blobs(&mut missing);
            copies = in_other_blobs.into_iter().map(|at| flights.start(at, false)).collect();
            for request in fetch::plan(all, &missing) {
                let run = &missing[request];
                let stored = all[run[0]].stored..all[run[run.len() - 1]].stored_end();
                let leases = run.iter().map(|at| flights.start(*at, false)).collect();
                let mut held = early.and_then(|early| early.parts(&self.id(), &stored));
                if let Some(held) = &mut held {
                    let bytes = stored.end.0 - stored.start.0;
                    held.is_needed_first = is_first && bytes <= fetch::FIRST_NEEDED;
                }
                requests.push(FetchRequest {
                    stored,
                    held,
                    part,
                    leases,
                    deadline,
                    is_ahead: true,
                });
            }
        }
        let spawn = |request: FetchRequest| {
            let bytes = request.stored.end.0 - request.stored.start.0;
            (bytes, self.workers.runtime().spawn(fetch::run(self.clone(), request)))
        };
        let copies = self.copy(copies, true).into_iter().map(|copy| (0, copy));
        copies.chain(requests.into_iter().map(spawn)).collect()
    }

    /// The same as [`CachedBlob::ensure`] for somebody who is no reader: nobody hears of it,
    /// readers go before him, and a full disk is not waited for.
    pub(crate) async fn bring_range(
        self: &Arc<Self>,
        range: &Range<Decoded>,
    ) -> Result<(), ReadError> {
        /// How often it is looked whether what others fetch is here.
        const STEP: Duration = Duration::from_millis(5);
        let chunks = self.layout.chunks_in(range);
        let every: Vec<_> = chunks.clone().collect();
        for _ in 0..TAKEOVERS {
            for (_, request) in self.bring(&every, fetch::LEAST_PART, None, false) {
                request.await.unwrap_or(Ok(()))?;
            }
            while self.flights.lock().has_any(chunks.clone()) {
                tokio::time::sleep(STEP).await;
            }
            self.asked.note(chunks.clone());
            if self.ready.all_ready(chunks.clone()) {
                return Ok(());
            }
            if every.iter().any(|at| self.suspect.is_ready(*at)) {
                // Needs no network.
                self.join_or_start(chunks.clone(), Instant::now() + self.settings.deadline).await?;
            }
        }
        Err(ReadError::Interrupted { blob: self.id() })
    }

    /// Whether a chunk is in the file, as far as anybody knows.
    pub(crate) fn has(&self, chunk: usize) -> bool {
        self.ready.is_ready(chunk) || self.suspect.is_ready(chunk)
    }

    /// Whether a chunk is in the file, or on its way there.
    pub(crate) fn is_under_way(&self, chunk: usize) -> bool {
        self.has(chunk) || self.flights.lock().has(chunk)
    }

    /// Positions of the chunks that are not in the file, as far as anybody knows.
    pub(crate) fn missing(&self) -> Vec<usize> {
        (0..self.layout.chunks().len()).filter(|at| !self.has(*at)).collect()
    }

    /// Stored bytes of the chunks that are in the file, and of all chunks.
    pub(crate) fn filled(&self) -> (u64, u64) {
        let sizes = self.layout.chunks().iter().map(Chunk::stored_share);
        sizes.enumerate().fold((0, 0), |(here, all), (at, size)| {
            (here + if self.has(at) { size } else { 0 }, all + size)
        })
    }

    /// The position of the chunk with a number.
    pub(crate) fn position(&self, number: u32) -> Option<usize> {
        self.layout.chunks().binary_search_by_key(&number, |chunk| chunk.number).ok()
    }

    /// Positions of the chunks with bytes in `range`, which may end behind the last one.
    pub(crate) fn positions(&self, range: &Range<Decoded>) -> Range<usize> {
        self.layout.chunks_in(range)
    }

    /// Positions of the chunks that lie in the first `bytes` stored bytes.
    pub(crate) fn stored_within(&self, bytes: u64) -> Range<usize> {
        0..self.layout.chunks().partition_point(|chunk| chunk.stored_end().0 <= bytes)
    }

    /// Waits until what is here is on the disk.
    pub(crate) async fn settled(self: &Arc<Self>) -> Result<(), ReadError> {
        let blob = self.clone();
        let flushed = tokio::task::spawn_blocking(move || blob.flush()).await;
        flushed.unwrap_or(Ok(())).map_err(|error| self.write_error(error))
    }

    /// Positions of the chunks that are not in the file, or that nobody has checked yet.
    pub(crate) fn unready(&self) -> Vec<usize> {
        (0..self.layout.chunks().len()).filter(|at| !self.ready.is_ready(*at)).collect()
    }
}
