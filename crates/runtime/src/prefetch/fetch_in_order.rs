//! Fetches chunks in a given order before readers ask for them.
//!
//! The most urgent chunks are requested first, in groups: chunks of one group that lie near each
//! other share a request, and as many groups are in flight as the link carries. Waiting readers
//! take precedence.

use std::{
    collections::BTreeMap,
    iter::{self, Peekable},
    mem,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use lazuli_image::{
    Chunk,
    plan::{Planner, gap},
};
use lazuli_registry::CONNECTIONS;

use super::yield_to_readers::{LONGEST_DELAY, yield_to_readers};
use crate::{
    cache::{BytesFrom, Cache, CachedBlob},
    error::ReadError,
    request_sizes::{FIRST_NEEDED, LEAST_PART},
    source::early::Early,
};

/// Stored bytes of the first group. Each further group is twice as big, up to [`GROUP`]: the
/// first reader comes soon.
const FIRST: u64 = 256 << 10;

/// Stored bytes of a later group.
const GROUP: u64 = 2 << 20;

/// Stored bytes in flight at first: 1 Gbit/s at 60 ms.
const LEAST: u64 = 8 << 20;

/// Maximum stored bytes in flight: 1 Gbit/s at 130 ms. A reader that comes meanwhile waits behind
/// them. Twice as many were 8 % faster at 100 ms, and no faster at 50 ms.
const MOST: u64 = 16 << 20;

/// Stored bytes in flight for a start, as a multiple of those that fill the link once its speed is
/// known. A miss waits behind them: with [`LEAST`], 0.7 s at 100 Mbit/s. The speed may have been
/// measured while connections were still growing.
const FILLS: u32 = 4;

/// Lower bound of these bytes, should the measured speed be too low.
const LEAST_FILL: u64 = 2 << 20;

/// Stored bytes of a group of an order while other readers wait: as much as one of them requests,
/// and one group at a time. In the network, and at the registry, their answers queue behind it.
const BESIDE: u64 = 256 << 10;

/// A chunk: position of the blob in its image, and of the chunk in the blob's layout.
pub(crate) type ChunkAt = (usize, usize);

/// The blobs of an image, as long as it is served.
pub(crate) type Blobs = Weak<[Arc<CachedBlob>]>;

/// The number of bytes in flight that fills the link to the registries. It grows as long as that
/// increases the speed, and so approaches the product of bandwidth and delay.
#[derive(Debug)]
pub(crate) struct Pace {
    bytes: AtomicU64,
    least: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Pace::from(LEAST)
    }
}

impl Pace {
    /// Keeps at least `least` bytes in flight, and [`MOST`] at most.
    pub(super) fn from(least: u64) -> Self {
        Pace { bytes: AtomicU64::new(least), least }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Keeps this many bytes in flight from now on.
    pub(super) fn set(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }
}

/// The reason for a fetch.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose<'a> {
    /// A hint: a start most likely needs it. Fetched if the disk has space.
    Hint(&'a Cache),
    /// A hint about chunks that are only likely: what lies between them comes along.
    Guess(&'a Cache, Gaps<'a>),
    /// An order of a waiting client. Readers take precedence, but not for long; then it is fetched
    /// in small parts.
    Order(&'a Cache),
}

impl Purpose<'_> {
    fn cache(&self) -> &Cache {
        match self {
            Purpose::Hint(cache) | Purpose::Guess(cache, _) | Purpose::Order(cache) => cache,
        }
    }

    /// Upper bound of the bytes in flight: readers of the start wait behind them.
    fn most_in_flight(self, blobs: &Blobs) -> u64 {
        let (Purpose::Hint(cache) | Purpose::Guess(cache, _)) = self else { return u64::MAX };
        let filling = cache.link_speed().bytes_in(FILLS * round_trip(blobs));
        if filling == 0 { u64::MAX } else { filling.max(LEAST_FILL) }
    }

    /// Returns whether other readers wait that take precedence. Hints are fetched at the same time
    /// as the start's own requests.
    fn is_beside_readers(self) -> bool {
        matches!(self, Purpose::Order(cache) if cache.is_awaited())
    }
}

/// Which missing chunks between the chunks of a group come along.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gaps<'a> {
    /// Maximum stored bytes between two chunks of the group.
    pub(crate) most: u64,
    /// Stored bytes that may be fetched yet, if they are limited. What comes along is taken off.
    pub(crate) left: Option<&'a AtomicU64>,
}

impl Gaps<'_> {
    /// Those that the requests for the chunks cover anyway.
    pub(crate) const OF_REQUESTS: Self = Gaps { most: Planner::NODE.gap, left: None };

    /// Adds them to chunks of a blob, which are in ascending order.
    fn fill(self, chunks: &mut Vec<usize>, blob: &CachedBlob) {
        let mut all = Vec::with_capacity(chunks.len());
        for at in chunks.drain(..) {
            let before = all.last().copied().unwrap_or(at);
            if gap(blob.chunk(before), blob.chunk(at)) <= self.most {
                let missing = (before + 1..at).filter(|between| !blob.is_under_way(*between));
                all.extend(missing.filter(|between| self.take(blob.chunk(*between))));
            }
            all.push(at);
        }
        *chunks = all;
    }

    /// Takes a chunk's bytes off; returns whether there were as many.
    fn take(self, chunk: &Chunk) -> bool {
        let take = |left: u64| left.checked_sub(chunk.stored_share());
        self.left.is_none_or(|left| {
            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
        })
    }
}

/// Measures a transfer, or several after each other.
pub(crate) struct Gauge<'a> {
    pace: &'a Pace,
    adapts: bool,
    since: Instant,
    arrived: u64,
    /// Bytes per second when the pace was last changed.
    rate: f64,
}

impl<'a> Gauge<'a> {
    pub(crate) fn new(pace: &'a Pace) -> Self {
        Gauge { pace, adapts: true, since: Instant::now(), arrived: 0, rate: 0.0 }
    }

    /// Leaves the pace as it is.
    pub(super) fn fixed(pace: &'a Pace) -> Self {
        Gauge { adapts: false, ..Gauge::new(pace) }
    }

    /// Bytes arrived while the link was kept busy.
    fn add(&mut self, bytes: u64) {
        self.arrived += bytes;
        let pace = self.pace.bytes();
        if self.arrived < pace || !self.adapts {
            return;
        }
        let rate = self.arrived as f64 / self.since.elapsed().as_secs_f64().max(1e-6);
        let next = if rate > 1.25 * self.rate {
            2 * pace
        } else if rate < 0.5 * self.rate {
            pace / 2
        } else {
            pace
        };
        self.pace.bytes.store(next.clamp(self.pace.least, MOST), Ordering::Relaxed);
        self.rate = rate;
        self.pause();
    }

    /// The link is not kept busy.
    fn pause(&mut self) {
        (self.since, self.arrived) = (Instant::now(), 0);
    }
}

/// Fetches the missing chunks of `order`; `early` may have their bytes already. Returns when all
/// are present, the image is no longer served, or the disk is nearly full.
///
/// # Errors
/// No source delivers: it ends with the first request that fails.
pub(crate) async fn fetch(
    blobs: &Blobs,
    order: Vec<ChunkAt>,
    early: Option<&Early>,
    pace: &Pace,
    purpose: Purpose<'_>,
) -> Result<(), ReadError> {
    let wanted = blobs.upgrade().map_or(0, |blobs| missing_bytes(&order, &blobs));
    fetch_by(blobs, order, wanted, early, &mut Gauge::new(pace), purpose).await
}

/// The same, measured by `gauge`, for an order that may be made while it is followed. `wanted` is
/// how many stored bytes it has.
pub(crate) async fn fetch_by(
    blobs: &Blobs,
    order: impl IntoIterator<Item = ChunkAt>,
    wanted: u64,
    early: Option<&Early>,
    gauge: &mut Gauge<'_>,
    purpose: Purpose<'_>,
) -> Result<(), ReadError> {
    let pace = gauge.pace;
    let urgent = purpose.cache().urgent_fetch();
    let mut order = order.into_iter().peekable();
    let mut under_way = FuturesUnordered::new();
    let mut bytes_under_way = 0;
    let mut size = FIRST;
    let mut has_early = early.is_some_and(Early::is_any);
    loop {
        let is_last = order.peek().is_none();
        loop {
            let is_beside = purpose.is_beside_readers();
            let in_flight = pace.bytes().min(purpose.most_in_flight(blobs));
            size = size.min(in_flight / 2);
            let (group, most) = if is_beside { (BESIDE, BESIDE) } else { (size, in_flight) };
            if !is_last && bytes_under_way + group <= most {
                break;
            }
            let Some((bytes, fetched)) = under_way.next().await else { break };
            bytes_under_way -= bytes;
            urgent.data_arrived();
            if is_beside {
                gauge.pause()
            } else {
                gauge.add(bytes)
            }
            match fetched {
                Ok(fetched) => fetched?,
                Err(error) => tracing::error!(%error, "a fetch ended in the middle"),
            }
        }
        if is_last {
            return Ok(());
        }
        match purpose {
            Purpose::Hint(cache) | Purpose::Guess(cache, _) if !cache.has_room_for_hints(size) => {
                tracing::info!("less is fetched ahead: the disk is nearly full");
                return Ok(());
            }
            Purpose::Hint(_) | Purpose::Guess(..) => {}
            Purpose::Order(cache) => yield_to_readers(cache, LONGEST_DELAY).await,
        }
        if purpose.is_beside_readers() {
            size = BESIDE;
        }
        let Some(blobs) = blobs.upgrade() else { return Ok(()) };
        let is_first = mem::take(&mut has_early);
        let group = if is_first {
            first_needed(&mut order, &blobs)
        } else {
            let group = group(&mut order, &blobs, size);
            size = (2 * size).min(GROUP);
            group
        };
        let held = match early {
            None if matches!(purpose, Purpose::Order(_)) => BytesFrom::BackgroundRequest,
            None => BytesFrom::Request,
            Some(early) if is_first => BytesFrom::EarlyAndRequest(early),
            Some(early) => BytesFrom::Early(early),
        };
        let part = (wanted.min(pace.bytes()) / CONNECTIONS).max(LEAST_PART);
        let mut group = by_blob(group);
        if let Purpose::Guess(_, gaps) = purpose {
            group.iter_mut().for_each(|(blob, chunks)| gaps.fill(chunks, &blobs[*blob]));
        }
        for (blob, chunks) in &group {
            for (bytes, request) in blobs[*blob].prefetch(chunks, part, held) {
                bytes_under_way += bytes;
                under_way.push(async move { (bytes, request.await) });
            }
        }
    }
}

/// The quickest answer of a source of the image; zero if none has answered.
pub(super) fn round_trip(blobs: &Blobs) -> Duration {
    let of_blob =
        |blob: &Arc<CachedBlob>| blob.sources().iter().find_map(|source| source.round_trip());
    let blobs = blobs.upgrade();
    blobs.iter().flat_map(|blobs| blobs.iter()).find_map(of_blob).unwrap_or_default()
}

/// Stored bytes of the missing chunks.
fn missing_bytes(order: &[ChunkAt], blobs: &[Arc<CachedBlob>]) -> u64 {
    let missing = order.iter().filter(|(blob, chunk)| !blobs[*blob].has(*chunk));
    missing.map(|(blob, chunk)| blobs[*blob].chunk(*chunk).stored_share()).sum()
}

/// Takes chunks from `order` until those that are missing have `size` stored bytes.
fn group(
    order: &mut impl Iterator<Item = ChunkAt>,
    blobs: &[Arc<CachedBlob>],
    size: u64,
) -> Vec<ChunkAt> {
    let mut bytes = 0;
    let mut missing = Vec::new();
    for (blob, chunk) in order {
        if blobs[blob].has(chunk) {
            continue;
        }
        missing.push((blob, chunk));
        bytes += blobs[blob].chunk(chunk).stored_share();
        if bytes >= size {
            break;
        }
    }
    missing
}

/// Takes chunks from `order` as long as they have no more than [`FIRST_NEEDED`] stored bytes.
fn first_needed(
    order: &mut Peekable<impl Iterator<Item = ChunkAt>>,
    blobs: &[Arc<CachedBlob>],
) -> Vec<ChunkAt> {
    let mut left = FIRST_NEEDED;
    let mut fits = |&(blob, chunk): &ChunkAt| {
        let rest = left.checked_sub(blobs[blob].chunk(chunk).stored_share());
        left = rest.unwrap_or(left);
        rest.is_some()
    };
    iter::from_fn(|| order.next_if(&mut fits)).collect()
}

/// Chunks by blob, in ascending order.
fn by_blob(places: Vec<ChunkAt>) -> BTreeMap<usize, Vec<usize>> {
    let mut chunks: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    places.into_iter().for_each(|(blob, chunk)| chunks.entry(blob).or_default().push(chunk));
    for chunks in chunks.values_mut() {
        chunks.sort_unstable();
        chunks.dedup();
    }
    chunks
}
