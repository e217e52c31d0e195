//! From missing chunks to bytes in the cache: which requests, and what happens to their answers.
//!
//! ```text
//! missing chunks ─▶ neighbours ─▶ plan ─▶ one task per request:
//!                                          race ─▶ decode ─▶ check digest ─▶ write ─▶ ready
//!                                                     └─ wrong ─▶ once more, from every place
//! ```

use std::{
    error::Error as _,
    ops::Range,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use lazuli_image::{Chunk, Stored};
use tokio::time::{Instant, timeout};

use crate::{
    cache::{CachedBlob, Lease},
    error::ReadError,
    source::{
        early::EarlyBytes,
        priority_semaphore::Claim,
        race::{self, Answer, Need},
        tracked_source::{Meter, TrackedSource},
    },
};

/// Bytes between two missing chunks that are read and thrown away rather than asking twice. At
/// 100 Mbit/s and 10 ms that is what a round trip costs.
pub(crate) const GAP: u64 = 128 << 10;

/// Stored bytes in one request, unless a single chunk is larger. Bigger needs are split, since
/// several streams fill a link better than one, and a failure costs less.
pub(crate) const MAX_REQUEST: u64 = 4 << 20;

/// What is fetched ahead is spread evenly over the connections to a server, but in parts of at
/// least so many bytes: through a new connection they come in two and a half round trips.
pub(crate) const LEAST_PART: u64 = 64 << 10;

/// Decoded bytes that one worker takes on at a time.
pub(crate) const JOB: u64 = 1 << 20;

/// How long a fetch that used its time up is not begun again. For one read of a program the kernel
/// asks up to six times, at once after each denial, and the program's deadline is one.
const ASKED_AGAIN: Duration = Duration::from_secs(1);

/// How long bytes that were asked for early are waited for: where a place that brings nothing for
/// so long is asked once more.
const HELD: Duration = race::LAST_HEDGE_AFTER;

/// Bytes per second above which a read goes on as it is when the blob gets another source. The
/// registry of one image may be slow on purpose, and a reader of another one have joined the read.
const FAST: f64 = 1_048_576.0;

/// Stored bytes that are asked for once more although they are on their way: behind what came with
/// them they may arrive last, when they are needed first. `/etc/passwd` and `/etc/group`, which
/// whoever starts a container reads before anything else.
pub(crate) const FIRST_NEEDED: u64 = 16 << 10;

/// A run of chunks that one request brings.
#[derive(Debug)]
pub(crate) struct FetchRequest {
    pub(crate) stored: Range<Stored>,
    /// The bytes, if they were asked for already.
    pub(crate) held: Option<EarlyBytes>,
    /// Bytes that one connection is asked for at most. More are asked for in parts at the same
    /// time, because what a new connection carries begins with 14 KiB in a round trip and only
    /// doubles with each.
    pub(crate) part: u64,
    /// Chunks to keep, in ascending order.
    pub(crate) leases: Vec<Lease>,
    /// Until when it is tried.
    pub(crate) deadline: Instant,
    /// Whether nobody has asked for any of them yet. A reader who joins in has a deadline of his
    /// own, so when the request fails he begins another one.
    pub(crate) is_ahead: bool,
}

/// Widens `wanted`, a range of chunks, by missing ones that follow, until the missing chunks have
/// `amplify` stored bytes. What comes with the same stored bytes costs nothing more, also before
/// `wanted`.
pub(crate) fn neighbours(
    chunks: &[Chunk],
    wanted: Range<usize>,
    amplify: u64,
    is_missing: impl Fn(usize) -> bool,
) -> Range<usize> {
    let Range { mut start, mut end } = wanted;
    let beyond = |at: usize| chunks[at - 1].stored_beyond(&chunks[at]);
    let size = |at: usize| if at > start { beyond(at) } else { chunks[at].stored_size.into() };
    let mut bytes: u64 = (start..end).filter(|at| is_missing(*at)).map(size).sum();
    while end < chunks.len() && is_missing(end) && gap(&chunks[end - 1], &chunks[end]) <= GAP {
        let more = beyond(end);
        if more > 0 && bytes + more > amplify {
            break;
        }
        bytes += more;
        end += 1;
    }
    while start > 0 && is_missing(start - 1) && chunks[start - 1].shares_unit(&chunks[start]) {
        start -= 1;
    }
    start..end
}

/// Stored bytes between a chunk and a later one.
pub(crate) fn gap(low: &Chunk, high: &Chunk) -> u64 {
    high.stored.0.saturating_sub(low.stored_end().0)
}

/// `chunks`, positions in ascending order, and those that come with the same stored bytes.
pub(crate) fn whole_units<'a>(
    all: &'a [Chunk],
    chunks: &'a [usize],
) -> impl Iterator<Item = usize> + 'a {
    let mut next = 0;
    chunks.iter().flat_map(move |&at| {
        let (mut start, mut end) = (at, at + 1);
        while start > next && all[start - 1].shares_unit(&all[at]) {
            start -= 1;
        }
        let comes_along = |other: &Chunk| other.stored_end() == all[at].stored_end();
        while end < all.len() && all[end].shares_unit(&all[at]) && comes_along(&all[end]) {
            end += 1;
        }
        start = start.max(next);
        next = next.max(end);
        start..end
    })
}

/// Cuts missing chunks, in ascending order, into requests: the positions in `missing` where each
/// ends.
pub(crate) fn plan(chunks: &[Chunk], missing: &[usize]) -> Vec<Range<usize>> {
    let mut requests: Vec<Range<usize>> = Vec::new();
    for (position, at) in missing.iter().enumerate() {
        let chunk = &chunks[*at];
        let joins = requests.last().is_some_and(|request| {
            let (first, last) = (&chunks[missing[request.start]], &chunks[missing[position - 1]]);
            last.shares_unit(chunk)
                || gap(last, chunk) <= GAP && chunk.stored_end().0 - first.stored.0 <= MAX_REQUEST
        });
        match requests.last_mut() {
            Some(request) if joins => request.end = position + 1,
            _ => requests.push(position..position + 1),
        }
    }
    requests
}

/// Brings the chunks of one request into the cache and finishes their leases, whatever happens.
/// Fails when nobody delivers.
pub(crate) async fn run(blob: Arc<CachedBlob>, request: FetchRequest) -> Result<(), ReadError> {
    let FetchRequest { stored, held, part, leases, deadline, is_ahead } = request;
    let wishes: Vec<_> = leases.iter().map(Lease::wish).collect();
    let claim = Claim::new(blob.account(), move || wishes.iter().any(|is_wanted| is_wanted()));
    let answer = match held {
        Some(held) if held.is_needed_first => tokio::select! {
            Some(answer) = held_answer(&blob, held, &claim) => Some(answer),
            Ok(answer) = read_anywhere(&blob, stored.clone(), part, deadline, &claim) => Some(answer),
            else => None,
        },
        Some(held) => held_answer(&blob, held, &claim).await,
        None => None,
    };
    let answer = match answer {
        Some(answer) => Ok(answer),
        None => read_anywhere(&blob, stored.clone(), part, deadline, &claim).await,
    };
    let answer = match answer {
        Ok(answer) => Arc::new(answer),
        Err(error) => {
            tracing::warn!(%error, cause = error.source().map(|e| e.to_string()), "nobody delivers");
            if !is_ahead {
                leases.into_iter().for_each(|lease| finish(lease, Err(error.clone()), deadline));
            }
            return Err(error);
        }
    };
    drop(claim);
    // Chunks that somebody waits for go first and each on its own, with what is stored with them;
    // what came along is done in larger jobs.
    let (mut jobs, extra): (Vec<_>, Vec<_>) =
        units(&blob, leases).into_iter().partition(|unit| unit.iter().any(Lease::is_wanted));
    // Each is asked once: readers come along at any time.
    jobs.iter_mut().for_each(|unit| unit.sort_by_cached_key(|lease| !lease.is_wanted()));
    jobs.extend(large(&blob, extra));
    let jobs = jobs.into_iter().map(|job| work(&blob, &answer, stored.start, job));
    let (mut wrong, mut failed) = (Vec::new(), None);
    for Worked { wrong: more, failed: error } in join_all(jobs).await {
        wrong.extend(more);
        failed = failed.or(error);
    }
    if wrong.is_empty() {
        return failed.map_or(Ok(()), Err);
    }
    let wrong_source = answer.place.clone();
    wrong_source.was_wrong(answer.started);
    // Gives its room back, which the repairs need.
    drop(answer);
    join_all(
        wrong
            .into_iter()
            .map(|(lease, error)| repair(&blob, lease, error, &wrong_source, deadline)),
    )
    .await;
    failed.map_or(Ok(()), Err)
}

/// What became of some chunks of an answer.
#[derive(Default)]
struct Worked {
    /// Those whose bytes are wrong.
    wrong: Vec<(Lease, ReadError)>,
    /// Why others could not be kept.
    failed: Option<ReadError>,
}

/// Work on chunks by what is decoded together.
fn units(blob: &CachedBlob, leases: Vec<Lease>) -> Vec<Vec<Lease>> {
    let mut units: Vec<Vec<Lease>> = Vec::new();
    for lease in leases {
        let chunk = blob.chunk(lease.chunk());
        match units.last_mut() {
            Some(unit) if chunk.shares_unit(blob.chunk(unit[0].chunk())) => unit.push(lease),
            _ => units.push(vec![lease]),
        }
    }
    units
}

/// The chunk of a unit for which all others are decoded as well.
fn furthest<'a>(blob: &'a CachedBlob, unit: &[Lease]) -> Option<&'a Chunk> {
    unit.iter().map(|lease| blob.chunk(lease.chunk())).max_by_key(|chunk| chunk.unit_size())
}

/// Cuts work on chunks into jobs for one worker each.
pub(crate) fn jobs(blob: &CachedBlob, leases: Vec<Lease>) -> Vec<Vec<Lease>> {
    large(blob, units(blob, leases))
}

/// Puts work together to jobs for one worker each.
fn large(blob: &CachedBlob, units: Vec<Vec<Lease>>) -> Vec<Vec<Lease>> {
    let mut jobs: Vec<Vec<Lease>> = Vec::new();
    let mut size = JOB;
    for unit in units {
        let decoded = furthest(blob, &unit).map_or(0, |chunk| chunk.unit_size().into());
        match jobs.last_mut() {
            Some(job) if size + decoded <= JOB => job.extend(unit),
            _ => {
                size = 0;
                jobs.push(unit);
            }
        }
        size += decoded;
    }
    jobs
}

/// Decodes, checks and writes some chunks of an answer that begins at `start`.
async fn work(
    blob: &Arc<CachedBlob>,
    answer: &Arc<Answer>,
    start: Stored,
    leases: Vec<Lease>,
) -> Worked {
    let background = !leases.iter().any(Lease::is_wanted);
    let (worker, from) = (blob.clone(), answer.clone());
    let accept_all = move || {
        let (mut worked, mut buffer) = (Worked::default(), Vec::new());
        for unit in units(&worker, leases) {
            let Some(chunk) = furthest(&worker, &unit) else { continue };
            let at = (chunk.stored.0 - start.0) as usize;
            let bytes = &from.bytes[at..at + chunk.stored_size as usize];
            let decoded = worker.decode(chunk, bytes, &mut buffer);
            for lease in unit {
                let accept = |decoded: &&[u8]| worker.accept(lease.chunk(), decoded);
                match decoded.as_ref().map_err(Clone::clone).and_then(accept) {
                    Err(error @ ReadError::Corrupt { .. }) => worked.wrong.push((lease, error)),
                    result => {
                        from.place.was_right();
                        worked.failed = worked.failed.or(result.clone().err());
                        lease.finish(result);
                    }
                }
            }
        }
        worked
    };
    blob.run(background, accept_all).await
}

/// Fetches a chunk whose bytes were wrong again, by itself: from the other places, and from
/// `wrong_source` once more.
async fn repair(
    blob: &Arc<CachedBlob>,
    lease: Lease,
    wrong: ReadError,
    wrong_source: &Arc<TrackedSource>,
    deadline: Instant,
) {
    let claim = Claim::new(blob.account(), lease.wish());
    let result = fetch_again(blob, lease.chunk(), wrong, wrong_source, deadline, &claim).await;
    drop(claim);
    finish(lease, result, deadline);
}

/// Tells the result of a fetch that had until `deadline`.
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
    claim: &Claim,
) -> Result<(), ReadError> {
    let chunk = blob.chunk(at);
    let mut places = blob.sources();
    places.retain(|place| !Arc::ptr_eq(place, wrong_source));
    places.push(wrong_source.clone());
    let mut from = wrong_source.clone();
    while !places.is_empty() {
        tracing::warn!(error = %wrong, from = from.describe(), "wrong bytes, fetching the chunk again");
        let range = chunk.stored..chunk.stored_end();
        let answer = match read(blob, &places, range, u64::MAX, deadline, claim, &**blob).await {
            Ok(answer) => answer,
            Err(error) => {
                tracing::warn!(%error, "cannot fetch the chunk again");
                break;
            }
        };
        let (place, started) = (answer.place.clone(), answer.started);
        let worker = blob.clone();
        let accept = move || {
            let mut buffer = Vec::new();
            let decoded = worker.decode(worker.chunk(at), &answer.bytes, &mut buffer)?;
            worker.accept(at, decoded)
        };
        match blob.run(false, accept).await {
            Err(again @ ReadError::Corrupt { .. }) => wrong = again,
            result => {
                place.was_right();
                return result;
            }
        }
        place.was_wrong(started);
        places.retain(|other| !Arc::ptr_eq(other, &place));
        from = place;
    }
    Err(wrong)
}

/// What was asked for early, as an answer of the place that is asked first; `None` if it does not
/// come.
async fn held_answer(blob: &Arc<CachedBlob>, held: EarlyBytes, claim: &Claim) -> Option<Answer> {
    let started = Instant::now();
    (0..held.requests()).for_each(|_| blob.request());
    let bytes = timeout(HELD, held.bytes()).await.ok()??;
    let place = blob.sources().into_iter().next()?;
    blob.arrived(bytes.len() as u64);
    let permit = blob.workers().room().take(bytes.len() as u64, claim).await;
    Some(Answer { bytes, place, started, _permit: permit })
}

/// Reads `range` from the blob's places, and begins anew when others take theirs, or when one comes
/// and nothing to speak of has arrived.
async fn read_anywhere(
    blob: &Arc<CachedBlob>,
    range: Range<Stored>,
    part: u64,
    deadline: Instant,
    claim: &Claim,
) -> Result<Answer, ReadError> {
    loop {
        let [mut replaced, mut added] = [blob.replaced(), blob.added()].map(Box::pin);
        // What happens from here on counts, also before it is waited for.
        replaced.as_mut().enable();
        added.as_mut().enable();
        let (places, counter) = (blob.sources(), Counter::of(blob));
        let mut reading = pin!(read(blob, &places, range.clone(), part, deadline, claim, &counter));
        loop {
            tokio::select! {
                answer = &mut reading => return answer,
                () = &mut replaced => break,
                () = &mut added => {
                    if !counter.is_fast() {
                        break;
                    }
                    added.set(blob.added());
                }
            }
        }
    }
}

/// Counts what arrives for one read.
struct Counter<'a> {
    blob: &'a CachedBlob,
    begun: Instant,
    bytes: AtomicU64,
}

impl<'a> Counter<'a> {
    fn of(blob: &'a CachedBlob) -> Self {
        Counter { blob, begun: Instant::now(), bytes: AtomicU64::new(0) }
    }

    /// Whether so much has arrived that to begin anew would be a waste.
    fn is_fast(&self) -> bool {
        let expected = self.begun.elapsed().as_secs_f64() * FAST;
        let bytes = self.bytes.load(Ordering::Relaxed);
        bytes > 0 && bytes as f64 >= expected
    }
}

impl Meter for Counter<'_> {
    fn request(&self) {
        self.blob.request();
    }

    fn arrived(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.blob.arrived(bytes);
    }
}

/// Reads `range` from some of the blob's places.
async fn read(
    blob: &Arc<CachedBlob>,
    places: &[Arc<TrackedSource>],
    range: Range<Stored>,
    part: u64,
    deadline: Instant,
    claim: &Claim,
    meter: &dyn Meter,
) -> Result<Answer, ReadError> {
    let room = blob.workers().room();
    let need = Need { range, part, deadline, room, claim, meter };
    race::read(places, &need).await.map_err(|source| ReadError::Source {
        blob: blob.id(),
        range: need.range,
        source,
    })
}

#[cfg(test)]
mod tests {
    use lazuli_image::{Algorithm, Decoded, chunk::Part};

    use super::*;

    /// Chunks of these stored sizes, each with a gap of this size before it.
    fn chunks(sizes: &[(u64, u32)]) -> Vec<Chunk> {
        let mut stored = 0;
        let chunk = |(number, (gap, size)): (usize, &(u64, u32))| {
            let start = stored + gap;
            stored = start + u64::from(*size);
            Chunk {
                number: number as u32,
                digest: Algorithm::Blake3.digest(b""),
                stored: Stored(start),
                stored_size: *size,
                decoded: Decoded(number as u64 * 4096),
                decoded_size: *size,
                part: None,
            }
        };
        sizes.iter().enumerate().map(chunk).collect()
    }

    /// Chunks of which each run has this number of chunks in a batch with this stored size, one run
    /// behind the other.
    fn batches(runs: &[(usize, u32)]) -> Vec<Chunk> {
        let sizes = runs.iter().flat_map(|(count, size)| (0..*count).map(|at| (at, *size)));
        let mut chunks = chunks(&sizes.clone().map(|_| (0, 1)).collect::<Vec<_>>());
        let mut start = 0;
        for (chunk, (at, size)) in chunks.iter_mut().zip(sizes) {
            start += if at == 0 { u64::from(size) } else { 0 };
            (chunk.stored, chunk.stored_size) = (Stored(start - u64::from(size)), size);
            chunk.part = Some(Part { offset: at as u32, size: 10 * size });
        }
        chunks
    }

    #[test]
    fn batches_come_whole_and_count_once() {
        let chunks = batches(&[(4, 100), (3, 200), (2, 300)]);
        type Case = (Range<usize>, u64, Range<usize>);
        let cases: [Case; 5] = [
            (1..2, 0, 0..4),
            (5..6, 0, 4..7),
            (1..3, 300, 0..7),
            (1..2, 299, 0..4),
            (0..9, 0, 0..9),
        ];
        for (wanted, amplify, expected) in cases {
            let wide = neighbours(&chunks, wanted.clone(), amplify, |_| true);
            assert_eq!(wide, expected, "{wanted:?} up to {amplify}");
        }
        let whole = |wanted: &[usize]| whole_units(&chunks, wanted).collect::<Vec<_>>();
        assert!(whole(&[]).is_empty());
        assert_eq!(whole(&[1]), [0, 1, 2, 3]);
        assert_eq!(whole(&[2, 3, 8]), [0, 1, 2, 3, 7, 8]);
        // All of a batch is in one request, and requests never overlap.
        assert_eq!(plan(&chunks, &[0, 1, 4, 6]).len(), 1);
        let large = batches(&[(2, 3 << 20), (2, 3 << 20)]);
        assert_eq!(plan(&large, &[0, 1, 2, 3]), [0..2, 2..4]);
    }

    /// Chunks behind points at these stored bytes, each of which reaches to those.
    fn pieces(reaches: &[(u64, u64)]) -> Vec<Chunk> {
        let mut chunks = chunks(&vec![(0, 1); reaches.len()]);
        for (chunk, (start, end)) in chunks.iter_mut().zip(reaches) {
            (chunk.stored, chunk.stored_size) = (Stored(*start), (end - start) as u32);
            chunk.part =
                Some(Part { offset: (end - start) as u32, size: (end - start) as u32 + 1 });
        }
        chunks
    }

    #[test]
    fn what_follows_a_point_is_fetched_as_far_as_it_is_wanted() {
        // The second point is before the end of the last chunk of the first one.
        let chunks = pieces(&[(0, 100), (0, 200), (0, 300), (250, 400), (250, 500)]);
        type Case = (Range<usize>, u64, Range<usize>);
        let cases: [Case; 7] = [
            (0..1, 0, 0..1),
            // What is before it has to be decoded anyway.
            (1..2, 0, 0..2),
            (1..2, 299, 0..2),
            (1..2, 300, 0..3),
            (1..2, 400, 0..4),
            (4..5, 0, 3..5),
            (2..5, 0, 0..5),
        ];
        for (wanted, amplify, expected) in cases {
            let wide = neighbours(&chunks, wanted.clone(), amplify, |_| true);
            assert_eq!(wide, expected, "{wanted:?} up to {amplify}");
        }
        let whole = |wanted: &[usize]| whole_units(&chunks, wanted).collect::<Vec<_>>();
        assert_eq!(whole(&[1]), [0, 1]);
        assert_eq!(whole(&[1, 4]), [0, 1, 3, 4]);
        assert_eq!(plan(&chunks, &[0, 1, 2, 3, 4]), std::iter::once(0..5).collect::<Vec<_>>());
        // What begins at one point is asked for once, however far it reaches.
        let far = pieces(&[(0, 100), (0, 3 << 20), (0, 9 << 20), (8 << 20, 11 << 20)]);
        assert_eq!(plan(&far, &[0, 1, 2, 3]), [0..3, 3..4]);
    }

    #[test]
    fn neighbours_come_along_up_to_the_limit() {
        let chunks = chunks(&[(0, 100), (0, 100), (0, 100), (GAP, 100), (0, 100), (GAP + 1, 100)]);
        type Case = (Range<usize>, u64, &'static [usize], Range<usize>);
        let cases: [Case; 8] = [
            (2..3, 0, &[], 2..3),
            (2..3, 199, &[], 2..3),
            (2..3, 200, &[], 2..4),
            (2..3, 299, &[], 2..4),
            (2..3, 1000, &[], 2..5),
            (2..3, 1000, &[3], 2..3),
            (2..3, 1000, &[4], 2..4),
            (5..6, 1000, &[], 5..6),
        ];
        for (wanted, amplify, there, expected) in cases {
            let wide = neighbours(&chunks, wanted.clone(), amplify, |at| !there.contains(&at));
            assert_eq!(wide, expected, "{wanted:?} up to {amplify}, without {there:?}");
        }
    }

    #[test]
    fn near_chunks_share_a_request() {
        let far = GAP + 1;
        let big = 3 << 20;
        let chunks =
            chunks(&[(0, 100), (0, 100), (GAP, 100), (far, 100), (0, big), (0, big), (0, 9 << 20)]);
        type Case = (&'static [usize], &'static [(usize, usize)]);
        let cases: [Case; 6] = [
            (&[], &[]),
            (&[0, 1, 2], &[(0, 3)]),
            (&[0, 2], &[(0, 1), (1, 2)]),
            (&[2, 3], &[(0, 1), (1, 2)]),
            (&[3, 4, 5, 6], &[(0, 2), (2, 3), (3, 4)]),
            (&[0, 4], &[(0, 1), (1, 2)]),
        ];
        for (missing, expected) in cases {
            let requests: Vec<_> =
                plan(&chunks, missing).iter().map(|r| (r.start, r.end)).collect();
            assert_eq!(requests, expected, "{missing:?}");
        }
    }
}
