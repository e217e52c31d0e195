//! One request and its way into the cache.
//!
//! ```text
//! planned range ─▶ fetch ─▶ commit ── right ──▶ ready
//!                             └─ wrong ──▶ once more, chunk by chunk, from every source
//! ```

use std::{error::Error as _, ops::Range, sync::Arc, time::Duration};

use futures_util::future::join_all;
use lazuli_image::{Stored, plan::stored_range, units::UnitChunks};
use tokio::time::Instant;

use super::{
    super::single_flight::Lease,
    CachedBlob,
    commit::{Committed, commit, commit_one, large, units},
};
use crate::{
    error::ReadError,
    fetch::{Fetch, Wanted},
    sharing::priority_semaphore::Claim,
    source::{early::EarlyBytes, tracked_source::TrackedSource},
};

/// How long a fetch that used its time up is not begun again. For one read of a program the kernel
/// asks up to six times, at once after each denial, and the program's deadline is one.
const ASKED_AGAIN: Duration = Duration::from_secs(1);

/// A run of chunks that one request fetches.
#[derive(Debug)]
pub(super) struct Transfer {
    wanted: Wanted,
    /// The bytes, if they were asked for already.
    held: Option<EarlyBytes>,
    /// Chunks to keep, in ascending order.
    leases: Vec<Lease>,
    purpose: Purpose,
}

/// The receiver of a request's failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// All readers that wait for one of the chunks.
    Demand,
    /// Its prefetch alone. A reader that joins has a deadline of its own, and begins another
    /// request.
    Prefetch,
}

impl Transfer {
    /// Brings chunks that a reader waits for, with their neighbours.
    pub(super) fn on_demand(blob: &CachedBlob, leases: Vec<Lease>, deadline: Instant) -> Self {
        let wanted = Wanted { range: range_of(blob, &leases), part: u64::MAX, deadline };
        Transfer { wanted, held: None, leases, purpose: Purpose::Demand }
    }

    /// Brings chunks that no reader waits for yet, with `part` bytes for one connection at most.
    pub(super) fn ahead(
        blob: &CachedBlob,
        leases: Vec<Lease>,
        deadline: Instant,
        part: u64,
        held: impl FnOnce(&Range<Stored>) -> Option<EarlyBytes>,
    ) -> Self {
        let wanted = Wanted { range: range_of(blob, &leases), part, deadline };
        Transfer { held: held(&wanted.range), wanted, leases, purpose: Purpose::Prefetch }
    }

    /// Stored bytes that it asks for: none that were asked for early.
    pub(super) fn bytes(&self) -> u64 {
        match self.held {
            Some(_) => 0,
            None => self.wanted.range.end.0 - self.wanted.range.start.0,
        }
    }
}

fn range_of(blob: &CachedBlob, leases: &[Lease]) -> Range<Stored> {
    stored_range(leases.iter().map(|lease| blob.chunk(lease.chunk())))
}

/// Brings the chunks of one request into the cache and finishes their leases, whatever happens.
/// Fails when no source delivers.
pub(super) async fn run(blob: Arc<CachedBlob>, transfer: Transfer) -> Result<(), ReadError> {
    let Transfer { wanted, held, leases, purpose } = transfer;
    let deadline = wanted.deadline;
    let wishes: Vec<_> = leases.iter().map(Lease::wish).collect();
    let claim = Claim::new(blob.account(), move || wishes.iter().any(|is_wanted| is_wanted()));
    let answer = match blob.fetch(&claim).get(&wanted, held).await {
        Ok(answer) => Arc::new(answer),
        Err(error) => {
            tracing::warn!(%error, cause = error.source().map(|e| e.to_string()), "no source delivers");
            if purpose == Purpose::Demand {
                leases.into_iter().for_each(|lease| finish(lease, Err(error.clone()), deadline));
            }
            return Err(error);
        }
    };
    drop(claim);
    // Chunks that readers wait for are committed first, each unit in its own job; the others follow
    // in larger jobs.
    let (jobs, extra): (Vec<_>, Vec<_>) =
        units(&blob, leases).partition(|unit| unit.chunks().iter().any(Lease::is_wanted));
    let mut jobs: Vec<_> = jobs.into_iter().map(UnitChunks::into_chunks).collect();
    // Evaluate once per lease: readers may join at any time.
    jobs.iter_mut().for_each(|unit| unit.sort_by_cached_key(|lease| !lease.is_wanted()));
    jobs.extend(large(&blob, extra));
    let jobs = jobs.into_iter().map(|job| commit(&blob, &answer, wanted.range.start, job));
    let (mut wrong, mut failed) = (Vec::new(), None);
    for Committed { wrong: more, failed: error } in join_all(jobs).await {
        wrong.extend(more);
        failed = failed.or(error);
    }
    if wrong.is_empty() {
        return failed.map_or(Ok(()), Err);
    }
    let wrong_source = answer.source.clone();
    wrong_source.was_wrong(answer.started);
    blob.metrics.wrong(wrong_source.origin());
    // Gives its memory back, which the repairs need.
    drop(answer);
    let repairs = wrong
        .into_iter()
        .map(|(lease, error)| repair(&blob, lease, error, &wrong_source, deadline));
    join_all(repairs).await;
    failed.map_or(Ok(()), Err)
}

/// Fetches a chunk with wrong bytes again, by itself: from the other sources, and once more from
/// `wrong_source`.
async fn repair(
    blob: &Arc<CachedBlob>,
    lease: Lease,
    wrong: ReadError,
    wrong_source: &Arc<TrackedSource>,
    deadline: Instant,
) {
    let claim = Claim::new(blob.account(), lease.wish());
    let fetch = blob.fetch(&claim);
    let result = fetch_again(blob, lease.chunk(), wrong, wrong_source, deadline, &fetch).await;
    drop(claim);
    finish(lease, result, deadline);
}

/// Reports the result of a fetch that had until `deadline`.
fn finish(lease: Lease, result: Result<(), ReadError>, deadline: Instant) {
    match result {
        Err(error) if Instant::now() >= deadline => lease.fail_for(error, ASKED_AGAIN),
        result => lease.finish(result),
    }
}

async fn fetch_again(
    blob: &Arc<CachedBlob>,
    at: usize,
    mut wrong: ReadError,
    wrong_source: &Arc<TrackedSource>,
    deadline: Instant,
    fetch: &Fetch<'_>,
) -> Result<(), ReadError> {
    let chunk = blob.chunk(at);
    let mut sources = blob.sources();
    sources.retain(|source| !Arc::ptr_eq(source, wrong_source));
    sources.push(wrong_source.clone());
    let mut from = wrong_source.clone();
    let wanted = Wanted { range: chunk.stored..chunk.stored_end(), part: u64::MAX, deadline };
    while !sources.is_empty() {
        tracing::warn!(error = %wrong, from = from.describe(), "wrong bytes, fetching the chunk again");
        let answer = match fetch.get_from(&sources, &wanted).await {
            Ok(answer) => answer,
            Err(error) => {
                tracing::warn!(%error, "cannot fetch the chunk again");
                break;
            }
        };
        let (source, started) = (answer.source.clone(), answer.started);
        match commit_one(blob, at, answer).await {
            Err(again @ ReadError::Corrupt { .. }) => wrong = again,
            result => {
                source.was_right();
                return result;
            }
        }
        source.was_wrong(started);
        blob.metrics.wrong(source.origin());
        sources.retain(|other| !Arc::ptr_eq(other, &source));
        from = source;
    }
    Err(wrong)
}
