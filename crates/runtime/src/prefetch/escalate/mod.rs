//! Escalation: an unforeseen start may use the whole link for what it most likely reads next.
//!
//! ```text
//! miss of a chunk that is neither here, nor in flight, nor foreseen
//!    ├─▶ buys bytes
//!    └─▶ scope: directories of the misses ─▶ their packages ─▶ the image
//!           └─▶ ranking: likeliest files first ─▶ ahead, until what was bought is spent
//! ```
//!
//! The guess goes on from the files in which something is missed, see [`super::content`].
//!
//! A miss costs one round trip, one bandwidth-delay product of bytes. It buys half as much near the
//! misses, as much when the whole image is in scope, and up to as much for each chunk that its own
//! file lacks: while a start keeps missing, the link is busy, and soon after misses stop, so does
//! escalation. If what was bought did not spare the start many round trips, a miss buys less.
//! A start may spend [`Settings::escalate_bytes`](super::Settings::escalate_bytes).

mod files;
mod miss_listener;
mod ranking;

use std::{
    collections::{BTreeSet, HashSet},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{sync::mpsc::UnboundedSender, time::Instant};

pub(crate) use self::miss_listener::MissListener;
use self::{
    files::Files,
    ranking::{Ranking, Scope},
};
use super::{
    Image, Prefetcher,
    fetch_in_order::{self, ChunkAt, Gaps, Gauge, Pace, Purpose},
    timed_slot::TimedSlot,
};
use crate::cache::{Cache, CachedBlob};

/// Minimum interval between two orderings of the files. Ordering 50,000 files takes 4 ms, so
/// ordering uses at most 8 % of a processor.
const HOLDS: Duration = Duration::from_millis(50);

/// Lower bound for the bytes that fill the link: 1 Gbit/s at 4 ms, or nothing was measured yet.
const LEAST: u64 = 512 << 10;

/// The link to a nearer registry, where a miss is short: bytes in a second, and the lower bound for
/// those that fill it.
const LINK_OF_NEAR: u64 = 125_000_000;
const LEAST_OF_NEAR: u64 = 64 << 10;

/// Bytes that a miss buys, in halves of those that fill the link.
const NEAR: u64 = 1;
const ANYWHERE: u64 = 2;

/// Bytes in flight, as such a multiple: they count until they are decoded and written. A reader
/// that comes meanwhile waits behind what the link carries of them.
const IN_FLIGHT: u64 = 4;

/// Bytes that a start gets before its misses buy less if most bytes were not read, as a multiple of
/// those that fill the link: what eight misses buy in the whole image.
const TRIAL: u64 = 8;

/// Chunks that a start must have read for each round trip of its bytes' transfer. More than one,
/// because a start reads several chunks of a file at once, and bytes also take processors.
const WORTH: u64 = 4;

/// Upper bound for the bytes that fill the link: 1 Gbit/s at 32 ms.
const FULL: u64 = 4 << 20;

/// How long one start may hold the slot: longer than a registry that answers needs to fill the link
/// twice.
const LONGEST: Duration = Duration::from_millis(250);

/// State that all escalating starts of a node share: only one of them has bytes in flight at a
/// time.
#[derive(Debug)]
pub(super) struct Escalation {
    pace: Pace,
    slot: TimedSlot,
    waiting: AtomicUsize,
}

impl Default for Escalation {
    fn default() -> Self {
        let (slot, waiting) = Default::default();
        Escalation { pace: Pace::from(LEAST), slot, waiting }
    }
}

/// A start that waits for the slot.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Escalation {
    /// Runs `work` while it holds the slot, for [`LONGEST`] at most.
    async fn in_slot<T>(&self, work: impl Future<Output = T>) -> T {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let waiting = Waiting(&self.waiting);
        let work = async {
            drop(waiting);
            work.await
        };
        self.slot.run(LONGEST, work).await
    }

    /// Returns whether a start that has fetched this many bytes in its round should yield to
    /// another one.
    fn is_enough(&self, bytes: u64) -> bool {
        bytes >= self.pace.bytes() && self.waiting.load(Ordering::Relaxed) > 0
    }
}

/// Fetches what readers most likely ask for next, until the start's bytes are spent, the image is
/// no longer served, or a server is overloaded. Doesn't detect the end of the start. Tells `missed`
/// the paths of the files in which something is missed.
pub(super) async fn escalate(
    listener: &MissListener,
    prefetcher: &Prefetcher,
    image: &Image,
    missed: UnboundedSender<Vec<u8>>,
) {
    let escalation = &prefetcher.escalation;
    let left = AtomicU64::new(prefetcher.settings.escalate_bytes);
    if prefetcher.settings.escalate_bytes == 0 {
        return;
    }
    let mut known = listener.take();
    while known.missed.is_empty() {
        listener.more().await;
        let more = listener.take();
        known.touched.extend(more.touched);
        known.foreseen.extend(more.foreseen);
        known.missed = more.missed;
    }
    let begun = Instant::now();
    let Some(ranking) = rank(image).await else { return };
    let mut gauge = Gauge::fixed(&escalation.pace);
    let mut start = Start {
        listener,
        image,
        escalation,
        begun,
        ranking,
        cache: &prefetcher.cache,
        left: &left,
        missed,
        credit: 0,
        spent: Vec::new(),
        unread: HashSet::new(),
        spared: 0,
        order: Vec::new(),
        place: 0,
        ordered: None,
        is_stale: true,
        is_refused: false,
    };
    start.learn(known);
    while start.left() > 0 && !start.is_refused {
        if start.credit == 0 {
            listener.more().await;
            start.listen();
            continue;
        }
        let step = async {
            let full = start.fills_the_link();
            escalation.pace.set(IN_FLIGHT * full);
            let gaps = Gaps { most: full / 2, left: Some(&left) };
            let order = Round { start: &mut start, bytes: 0 };
            let purpose = Purpose::Guess(&prefetcher.cache, gaps);
            fetch_in_order::fetch_by(&image.blobs, order, u64::MAX, None, &mut gauge, purpose).await
        };
        if escalation.in_slot(step).await.is_err() {
            // Readers of chunks that cannot be fetched get the error.
            return;
        }
        if image.blobs.strong_count() == 0 {
            return;
        }
    }
}

/// Walks through the image, on a thread for long work.
async fn rank(image: &Image) -> Option<Ranking> {
    let (bootstrap, blobs) = (image.bootstrap.clone(), image.blobs.upgrade()?);
    let walk = move || {
        let position = |blob: usize, number| blobs.get(blob)?.position(number);
        let files = Files::of(&bootstrap, position);
        Ranking::new(files, |(blob, chunk)| blobs[blob].chunk(chunk).stored_share())
    };
    tokio::task::spawn_blocking(walk).await.ok()
}

/// A start that escalates.
struct Start<'a> {
    listener: &'a MissListener,
    image: &'a Image,
    escalation: &'a Escalation,
    begun: Instant,
    ranking: Ranking,
    cache: &'a Cache,
    /// Is told the paths of files in which something is missed.
    missed: UnboundedSender<Vec<u8>>,
    /// Bytes that it may have yet, and that its misses have bought.
    left: &'a AtomicU64,
    credit: u64,
    /// Bytes that it has had of each blob, the chunks among them that were not read yet, and the
    /// number of those that were. Complete blobs are left out: their readers are not seen.
    spent: Vec<u64>,
    unread: HashSet<ChunkAt>,
    spared: u64,
    /// Files to fetch, the next one last, and the number of its chunks that were examined.
    order: Vec<u32>,
    place: usize,
    ordered: Option<Instant>,
    /// Something was read since they were ordered.
    is_stale: bool,
    /// A server has enough to do.
    is_refused: bool,
}

impl Start<'_> {
    fn left(&self) -> u64 {
        self.left.load(Ordering::Relaxed)
    }

    /// Records the reads since the last call.
    fn listen(&mut self) {
        let news = self.listener.take();
        if !news.touched.is_empty() || !news.foreseen.is_empty() {
            self.learn(news);
        }
    }

    fn learn(&mut self, news: miss_listener::News) {
        let (scope, was_idle) = (self.ranking.scope(), self.credit == 0);
        for place in &news.foreseen {
            self.ranking.note_foreseen(*place);
        }
        for place in &news.touched {
            self.ranking.note_read(*place);
            self.spared += u64::from(self.unread.remove(place));
        }
        for place in &news.missed {
            self.ranking.note_missed(*place);
            if let Some(path) = self.ranking.first_path(*place, &*self.image.bootstrap) {
                tracing::debug!(path = %path.escape_ascii(), "a start reads what was not foreseen");
                // The guess may have ended.
                let _ = self.missed.send(path);
            }
            let full = self.fills_the_link();
            let spent = self.spent_where_reads_are_seen();
            let worth = worth_of_a_miss(full, self.ranking.scope(), spent, self.spared);
            self.credit = self.credit.saturating_add(worth);
        }
        // A start reads several chunks of a file at once.
        let files: BTreeSet<_> =
            news.missed.iter().filter_map(|place| self.ranking.owner(*place)).collect();
        for file in files {
            self.credit = self.credit.saturating_add(self.worth_of_its_rest(file));
        }
        self.is_stale = true;
        if !news.missed.is_empty() {
            self.is_refused |= self.has_failed();
        }
        if was_idle || self.ranking.scope() != scope {
            self.ordered = None;
        }
    }

    /// Bytes that a miss buys of its own file: all that nobody fetches, as far as it has no more
    /// bytes than would arrive while a reader waits for each of its chunks.
    fn worth_of_its_rest(&self, file: u32) -> u64 {
        let Some(blobs) = self.image.blobs.upgrade() else { return 0 };
        let sizes = self.ranking.places(file).iter().filter_map(|place| {
            let (blob, chunk) = (&blobs[place.0], place.1);
            let is_on_its_way = blob.is_under_way(chunk) || self.listener.is_touched(*place);
            (!is_on_its_way).then(|| blob.chunk(chunk).stored_share())
        });
        worth_of_a_file(self.fills_the_link(), sizes)
    }

    /// Bytes in flight that fill the link to the image's registry.
    fn fills_the_link(&self) -> u64 {
        let round_trip = fetch_in_order::round_trip(&self.image.blobs);
        let least = least_for(round_trip);
        self.cache.link_speed().bytes_in(round_trip).clamp(least, FULL)
    }

    fn spent_where_reads_are_seen(&self) -> u64 {
        let Some(blobs) = self.image.blobs.upgrade() else { return 0 };
        let seen = self.spent.iter().zip(blobs.iter()).filter(|(_, blob)| !blob.is_complete());
        seen.map(|(spent, _)| spent).sum()
    }

    fn has_failed(&self) -> bool {
        let Some(blobs) = self.image.blobs.upgrade() else { return true };
        let failed = |blob: &&Arc<CachedBlob>| {
            blob.sources().iter().any(|source| source.has_failed_since(self.begun))
        };
        let failed = blobs.iter().find(failed);
        if let Some(blob) = failed {
            tracing::info!(blob = %blob.id(), "escalation ends: a server has enough to do");
        }
        failed.is_some()
    }

    /// The next chunk of a likely file that is missing, and its stored bytes.
    fn next_missing(&mut self) -> Option<(ChunkAt, u64)> {
        let blobs = self.image.blobs.upgrade()?;
        if self.is_stale && self.ordered.is_none_or(|at| at.elapsed() > HOLDS) {
            self.order = self.ranking.order();
            self.order.reverse();
            (self.place, self.ordered, self.is_stale) = (0, Some(Instant::now()), false);
            self.is_refused |= self.has_failed();
        }
        while let Some(file) = self.order.last() {
            let places = self.ranking.places(*file);
            let Some(&(blob, chunk)) = places.get(self.place) else {
                self.order.pop();
                self.place = 0;
                continue;
            };
            let size = blobs[blob].chunk(chunk).stored_share();
            let is_on_its_way = blobs[blob].is_under_way(chunk);
            if size <= self.left() && !is_on_its_way && !self.listener.is_touched((blob, chunk)) {
                return Some(((blob, chunk), size));
            }
            self.place += 1;
        }
        None
    }
}

/// The chunks that a start fetches before it yields the slot.
struct Round<'a, 'b> {
    start: &'a mut Start<'b>,
    bytes: u64,
}

impl Iterator for Round<'_, '_> {
    type Item = ChunkAt;

    fn next(&mut self) -> Option<ChunkAt> {
        self.start.listen();
        if self.start.credit == 0
            || self.start.is_refused
            || self.start.escalation.is_enough(self.bytes)
        {
            return None;
        }
        let next = self.start.next_missing();
        let next = next.filter(|(_, size)| self.bytes == 0 || *size <= self.start.credit);
        let Some((place, size)) = next.filter(|_| !self.start.is_refused) else {
            // The remaining credit buys nothing: no file is left, or the next chunk is too big.
            self.start.credit = 0;
            return None;
        };
        self.start.place += 1;
        self.bytes += size;
        self.start.left.fetch_sub(size, Ordering::Relaxed);
        if self.start.spent.len() <= place.0 {
            self.start.spent.resize(place.0 + 1, 0);
        }
        self.start.spent[place.0] += size;
        self.start.unread.insert(place);
        self.start.credit = self.start.credit.saturating_sub(size);
        Some(place)
    }
}

/// Lower bound for the bytes that fill the link to a registry that is as far as this; zero is not
/// known.
fn least_for(round_trip: Duration) -> u64 {
    if round_trip.is_zero() {
        return LEAST;
    }
    let bytes = u128::from(LINK_OF_NEAR) * round_trip.as_micros() / 1_000_000;
    (bytes as u64).clamp(LEAST_OF_NEAR, LEAST)
}

/// Bytes that a miss buys where `full` fill the link, after `spent` bytes have spared a start so
/// many misses.
fn worth_of_a_miss(full: u64, scope: Scope, spent: u64, spared: u64) -> u64 {
    let was_worth_it = spent < TRIAL * full || spared * full >= WORTH * spent;
    let times = match scope {
        Scope::Image if was_worth_it => ANYWHERE,
        _ => NEAR,
    };
    (times * full / 2).max(full.min(LEAST))
}

/// Bytes that a miss buys of a file that lacks chunks of these `sizes`, where `full` fill the link.
fn worth_of_a_file(full: u64, sizes: impl Iterator<Item = u64>) -> u64 {
    let (bytes, count) = sizes.fold((0, 0), |(bytes, count), size| (bytes + size, count + 1));
    bytes.min(count * full)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_miss_buys_the_rest_of_its_file_unless_each_chunk_takes_longer_than_a_wait() {
        let full = 1 << 20;
        assert_eq!(worth_of_a_file(full, [300_000, 2_000_000, 200_000].into_iter()), 2_500_000);
        assert_eq!(worth_of_a_file(full, [2 << 20; 3].into_iter()), 3 * full);
        assert_eq!(worth_of_a_file(full, std::iter::empty()), 0);
    }

    #[test]
    fn near_registries_take_few_bytes_to_fill_their_link() {
        for (micros, least) in [(0, LEAST), (1, LEAST_OF_NEAR), (1_000, 125_000), (20_000, LEAST)] {
            assert_eq!(least_for(Duration::from_micros(micros)), least, "{micros}");
        }
    }

    #[test]
    fn a_miss_buys_less_when_earlier_ones_bought_what_is_not_read() {
        let full = 1 << 20;
        assert_eq!(worth_of_a_miss(full, Scope::Directories, 0, 0), full / 2);
        assert_eq!(worth_of_a_miss(full, Scope::Image, 7 * full, 0), full, "too early");
        assert_eq!(worth_of_a_miss(full, Scope::Image, 8 * full, 32), full);
        assert_eq!(worth_of_a_miss(full, Scope::Image, 8 * full, 31), full / 2);
        assert_eq!(worth_of_a_miss(full, Scope::Packages, 40 * full, 1), full / 2);
        assert_eq!(worth_of_a_miss(LEAST, Scope::Directories, 0, 0), LEAST);
        assert_eq!(worth_of_a_miss(LEAST_OF_NEAR, Scope::Image, 0, 0), LEAST_OF_NEAR);
    }
}
