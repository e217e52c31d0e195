//! The rest of images: what their starts did not need comes with what the link has left.

use std::{
    ops::RangeInclusive,
    sync::{
        Arc, Mutex as StdMutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::{
    sync::Mutex,
    task::JoinHandle,
    time::{Instant, sleep, sleep_until},
};

use super::{
    Prefetcher,
    fetch_in_order::{Blobs, ChunkAt},
    spare_slots::SpareSlots,
    whole::{expect, missing},
    yield_to_readers::yield_while,
};
use crate::{
    cache::{BytesFrom, Cache, CachedBlob},
    error::ReadError,
    sync::lock,
};

/// How long a request waits for readers, and for what starts, pulls and clients wait for: a second
/// on the whole node, at most.
const COURTESY: Duration = Duration::from_secs(1);

/// How long the link carries a request: a reader that comes meanwhile waits behind it.
const PIECE_TIME: Duration = Duration::from_millis(4);

/// Stored bytes of a request: what the link carries in that time, but large beside the cost of a
/// request, and no more than arrives soon from a server that is not the link's limit.
const PIECE: RangeInclusive<u64> = 128 << 10..=512 << 10;

/// How long a request keeps other images waiting: one may take a second at 4 Mbit/s.
const LONGEST: Duration = Duration::from_secs(1);

/// Pause after which a full disk, or a registry that does not deliver, is tried again.
const RETRY: Duration = Duration::from_secs(60);

/// Decoded bytes for which the disk is looked at in one go: with a limit of the cache, that lists
/// all of it.
const ROOM: u64 = 64 << 20;

/// Interval over which the speed is measured.
const MEASURED: Duration = Duration::from_secs(2);

/// What the rests of all images share.
#[derive(Debug)]
pub(super) struct Rest {
    slots: SpareSlots,
    /// Images whose rest is being fetched, in turns.
    images: AtomicUsize,
    /// Decoded bytes for which there was room.
    room: AtomicU64,
    speed: StdMutex<Speed>,
    /// When the next request may begin. Held by the one that is about to: each of them waits.
    turn: Mutex<Instant>,
}

/// Bytes that arrived lately.
#[derive(Debug)]
struct Speed {
    since: Instant,
    bytes: u64,
    /// Bytes per second in the interval before; 0 before one has ended.
    before: f64,
}

/// An image whose rest is being fetched, as long as this lives.
struct UnderWay<'a>(&'a AtomicUsize);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Default for Rest {
    fn default() -> Self {
        Rest {
            slots: SpareSlots::default(),
            images: AtomicUsize::new(0),
            room: AtomicU64::new(0),
            speed: StdMutex::new(Speed::new()),
            turn: Mutex::new(Instant::now()),
        }
    }
}

impl Speed {
    fn new() -> Self {
        Speed { since: Instant::now(), bytes: 0, before: 0.0 }
    }

    fn arrived(&mut self, bytes: u64) {
        self.bytes += bytes;
        let elapsed = self.since.elapsed();
        if elapsed >= MEASURED {
            let before = self.bytes as f64 / elapsed.as_secs_f64();
            *self = Speed { before, ..Speed::new() };
        }
    }
}

impl Rest {
    /// Counts an image.
    fn under_way(&self) -> UnderWay<'_> {
        if self.images.fetch_add(1, Ordering::Relaxed) == 0 {
            *lock(&self.speed) = Speed::new();
        }
        UnderWay(&self.images)
    }

    /// Returns whether the disk has room for so many decoded bytes more. Blocks briefly.
    fn has_room(&self, cache: &Cache, decoded: u64) -> bool {
        let take = |left: u64| left.checked_sub(decoded);
        if self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
            return true;
        }
        if cache.has_room_for_the_rest(ROOM) {
            self.room.store(ROOM.saturating_sub(decoded), Ordering::Relaxed);
            return true;
        }
        cache.has_room_for_the_rest(decoded)
    }

    /// The time in which so many missing bytes of one image arrive if nothing changes; `None`
    /// while nothing arrives, or before that can be said.
    pub(super) fn time_for(&self, bytes: u64) -> Option<Duration> {
        let images = self.images.load(Ordering::Relaxed);
        let speed = lock(&self.speed).before;
        if images == 0 || speed == 0.0 {
            return None;
        }
        Duration::try_from_secs_f64(images as f64 * bytes as f64 / speed).ok()
    }

    /// Waits until it is the turn of a request that `begin` makes: nobody else is in a hurry, and
    /// `rate` stored bytes per second are not exceeded.
    async fn turn<T>(&self, cache: &Cache, rate: u64, begin: impl FnOnce() -> (u64, T)) -> T {
        let mut next = self.turn.lock().await;
        sleep_until(*next).await;
        let is_urgent = || cache.is_awaited() || cache.has_urgent_fetches();
        yield_while(is_urgent, COURTESY).await;
        let (bytes, begun) = begin();
        *next = Instant::now() + Duration::from_secs_f64(bytes as f64 / rate as f64);
        begun
    }
}

/// Why it does not continue now.
struct Pause;

/// Fetches everything that is missing, at no more than `rate` stored bytes per second for all
/// images, while the disk has room.
pub(super) async fn bring(prefetcher: &Prefetcher, blobs: &Blobs, rate: u64) {
    while let Err(Pause) = try_to_bring(prefetcher, blobs, rate).await {
        sleep(RETRY).await;
    }
}

async fn try_to_bring(prefetcher: &Prefetcher, blobs: &Blobs, rate: u64) -> Result<(), Pause> {
    // Repeat as long as that makes progress: chunks that turned out to be missing from other blobs
    // were skipped.
    let mut before = usize::MAX;
    if let Some(all) = blobs.upgrade() {
        let missing = missing(&all);
        let decoded =
            missing.iter().map(|(at, chunk)| u64::from(all[*at].chunk(*chunk).decoded_size));
        // A peer that is told fetches all of it, perhaps to the same disk.
        if prefetcher.cache.has_room_for_the_rest(decoded.sum()) {
            expect(&all);
        }
    }
    loop {
        let Some(all) = blobs.upgrade().map(|blobs| missing(&blobs)) else { return Ok(()) };
        if all.is_empty() || all.len() >= before {
            return Ok(());
        }
        before = all.len();
        let _under_way = prefetcher.rest.under_way();
        bring_chunks(prefetcher, blobs, &all, rate).await?;
    }
}

/// Fetches some chunks, in as many requests at a time as there is room for.
async fn bring_chunks(
    prefetcher: &Prefetcher,
    blobs: &Blobs,
    mut rest: &[ChunkAt],
    rate: u64,
) -> Result<(), Pause> {
    let slots = &prefetcher.rest.slots;
    let mut under_way = FuturesUnordered::new();
    while !rest.is_empty() {
        while under_way.len() >= slots.width() {
            under_way.next().await.unwrap_or(Ok(()))?;
        }
        let Some(alive) = blobs.upgrade() else { return Ok(()) };
        let (piece, later) = rest.split_at(piece(rest, &alive, piece_size(&prefetcher.cache)));
        rest = later;
        under_way.push(bring_piece(prefetcher, blobs, piece, rate));
    }
    while let Some(done) = under_way.next().await {
        done?;
    }
    Ok(())
}

/// Fetches chunks of a blob that follow each other.
async fn bring_piece(
    prefetcher: &Prefetcher,
    blobs: &Blobs,
    piece: &[ChunkAt],
    rate: u64,
) -> Result<(), Pause> {
    let Prefetcher { cache, rest, .. } = prefetcher;
    let begin = || {
        // The image may have ended meanwhile.
        let requests = blobs.upgrade().map(|alive| begin(rest, cache, &alive, piece));
        let requests = requests.unwrap_or(Ok(Vec::new()));
        let bytes = requests.iter().flatten().map(|(bytes, _)| bytes).sum();
        (bytes, (bytes, requests))
    };
    let request = async |(bytes, requests): (u64, Result<Requests, Pause>)| {
        // Small ones say more about the distance than about the link.
        let mut came = Some(bytes).filter(|bytes| *bytes >= piece_size(cache) / 2);
        let Ok(requests) = requests else { return (None, Err(Pause)) };
        for (_, request) in requests {
            match request.await {
                Ok(Ok(())) => {}
                // Told in the log; bytes that no source has right are left to their readers.
                Ok(Err(ReadError::Corrupt { .. })) => came = None,
                Ok(Err(_)) | Err(_) => return (None, Err(Pause)),
            }
        }
        lock(&rest.speed).arrived(bytes);
        (came, Ok(()))
    };
    rest.slots.run(LONGEST, rest.turn(cache, rate, begin), request).await
}

/// Requests and their stored bytes.
type Requests = Vec<(u64, JoinHandle<Result<(), ReadError>>)>;

/// Sends the requests for a piece, if the disk has room.
fn begin(
    rest: &Rest,
    cache: &Cache,
    blobs: &[Arc<CachedBlob>],
    piece: &[ChunkAt],
) -> Result<Requests, Pause> {
    let (blob, first) = (&blobs[piece[0].0], piece[0].1);
    let chunks: Vec<_> = (first..first + piece.len()).collect();
    let decoded = chunks.iter().map(|at| u64::from(blob.chunk(*at).decoded_size));
    if !rest.has_room(cache, decoded.sum()) {
        tracing::info!("the rest of an image is not fetched: the disk or the cache is nearly full");
        return Err(Pause);
    }
    Ok(blob.prefetch(&chunks, u64::MAX, BytesFrom::BackgroundRequest))
}

/// Stored bytes of a request at the present speed of the link.
fn piece_size(cache: &Cache) -> u64 {
    cache.link_speed().bytes_in(PIECE_TIME).clamp(*PIECE.start(), *PIECE.end())
}

/// How many of `rest`, which is not empty, are the next piece: chunks of one blob that follow each
/// other and have `most` stored bytes, to the end of a unit, of which the begin would be fetched
/// twice otherwise.
fn piece(rest: &[ChunkAt], blobs: &[Arc<CachedBlob>], most: u64) -> usize {
    let (blob, first) = rest[0];
    let mut bytes = 0;
    let fits = |(number, place): (usize, &ChunkAt)| {
        let chunk = blobs[blob].chunk(place.1.min(first + number));
        bytes += chunk.stored_share();
        let goes_on = || chunk.shares_unit(blobs[blob].chunk((first + number).saturating_sub(1)));
        *place == (blob, first + number) && (number == 0 || bytes <= most || goes_on())
    };
    rest.iter().enumerate().map(fits).take_while(|fits| *fits).count()
}
