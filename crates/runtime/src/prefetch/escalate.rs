//! A start that nobody foresaw takes the link's whole width, near what it misses.
//!
//! ```text
//! miss of a chunk that is neither here nor on its way
//!    └─▶ buys bytes ──▶ nearest missing chunks of the blob ──▶ ahead
//! ```
//!
//! Layers are archived in the order of a walk, so what lies near a chunk in a blob is first the rest of its file, then the
//! directory, then the package. Each unforeseen miss buys twice what fills the link: a start that keeps missing soon has all
//! of the image under way, one that misses here and there pays as much for a miss as it waited for it. What is bought and
//! not read costs bytes only, up to [`Settings::escalate_bytes`](super::Settings::escalate_bytes) for a start.

use std::{collections::HashSet, iter, ops::Range, sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::Instant};

use super::{
    Image, Prefetcher,
    ahead::{self, ChunkAt, Gauge, Purpose},
};
use crate::cache::{CachedBlob, Listener};

/// Misses that wait to be looked at. A start that has more at once gains nothing by them.
const PENDING: usize = 64;

/// How long one start keeps the others waiting: more than what fills the link twice takes with a registry that answers.
const LONGEST: Duration = Duration::from_millis(250);

/// Hears what readers of an image miss.
pub(super) struct Misses {
    misses: mpsc::Receiver<ChunkAt>,
    /// Kept alive for the blobs, which tell them.
    _listeners: Vec<Arc<Listener>>,
}

impl Misses {
    /// Listens from now on.
    pub(super) fn of(blobs: &[Arc<CachedBlob>]) -> Self {
        let (sender, misses) = mpsc::channel(PENDING);
        let listener = |(position, blob): (usize, &Arc<CachedBlob>)| {
            let (sender, blob_of_ear) = (sender.clone(), Arc::downgrade(blob));
            let listener: Arc<Listener> = Arc::new(move |chunks: Range<usize>| {
                let Some(blob) = blob_of_ear.upgrade() else { return };
                if let Some(chunk) = blob.first_unforeseen(chunks) {
                    let _ = sender.try_send((position, chunk));
                }
            });
            blob.tell(&listener);
            listener
        };
        Misses { _listeners: blobs.iter().enumerate().map(listener).collect(), misses }
    }

    /// Fetches what is near the misses until the start's bytes are spent, the image is not served any more, or a server has enough.
    /// Not when the start is over: nothing tells that here.
    pub(super) async fn escalate(mut self, prefetcher: &Prefetcher, image: &Image) {
        let begun = Instant::now();
        let mut left = prefetcher.settings.escalate_bytes;
        let mut gauge = Gauge::resume(&prefetcher.escalation.pace);
        let mut seen = HashSet::new();
        let mut pending = Vec::new();
        while left > 0 && self.misses.recv_many(&mut pending, PENDING).await > 0 {
            // The driver asks twice about a miss.
            pending.retain(|miss| seen.insert(*miss));
            if pending.is_empty() {
                continue;
            }
            let step = async {
                let order = self::step(prefetcher, image, begun, &mut pending, &mut left)?;
                gauge.pause();
                let hint = Purpose::Hint(&prefetcher.cache);
                // Readers who need what cannot be had will be told why.
                ahead::fetch_by(&image.blobs, order, None, &mut gauge, hint).await.ok()
            };
            // All starts of the node share what fills the link once.
            if prefetcher.escalation.turn.take(LONGEST, step).await.is_none() {
                return;
            }
        }
    }
}

/// What is near the `pending` misses, for which a part of what is `left` is spent. `None` when nothing more is to be fetched.
fn step(
    prefetcher: &Prefetcher,
    image: &Image,
    begun: Instant,
    pending: &mut Vec<ChunkAt>,
    left: &mut u64,
) -> Option<Vec<ChunkAt>> {
    let blobs = image.blobs.upgrade()?;
    let share = (2 * prefetcher.escalation.pace.bytes()).min(*left) / pending.len() as u64;
    let mut order = Vec::new();
    for (position, chunk) in pending.drain(..) {
        let blob = &blobs[position];
        if blob.sources().iter().any(|place| place.has_failed_since(begun)) {
            tracing::info!(blob = %blob.id(), "nothing more is fetched around misses: a server has enough to do");
            return None;
        }
        let size = |at: usize| blob.chunk(at).stored_share();
        let missing = |at: usize| if blob.is_under_way(at) { 0 } else { size(at) };
        let count = blob.stats().chunks_total as usize;
        let near = nearby(count, chunk, missing, share, *left);
        *left = left.saturating_sub(near.iter().map(|at| size(*at)).sum());
        order.extend(near.into_iter().map(|at| (position, at)));
    }
    Some(order)
}

/// Chunks around the chunk `at` of `count`, nearest first, until they have `bytes` missing bytes by `missing`, which says 0 of a chunk
/// that is not. One at least, unless it has more than `most`. Programs read on rather than back, so what follows is twice as near
/// as what comes before.
fn nearby(
    count: usize,
    at: usize,
    missing: impl Fn(usize) -> u64,
    mut bytes: u64,
    most: u64,
) -> Vec<usize> {
    let (mut after, mut before) = (at + 1..count, (0..at).rev());
    let mut next = move || {
        let turn = [after.next(), after.next(), before.next()];
        turn.iter().any(Option::is_some).then_some(turn)
    };
    let mut near = Vec::new();
    for candidate in iter::from_fn(&mut next).flatten().flatten() {
        let size = missing(candidate);
        if size == 0 {
            continue;
        }
        if size > bytes && (!near.is_empty() || size > most) {
            break;
        }
        bytes = bytes.saturating_sub(size);
        near.push(candidate);
    }
    near
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_is_nearer() {
        assert_eq!(nearby(10, 5, |_| 1, 6, 6), [6, 7, 4, 8, 9, 3]);
        assert_eq!(nearby(10, 5, |_| 1, 100, 100), [6, 7, 4, 8, 9, 3, 2, 1, 0]);
        assert_eq!(nearby(3, 0, |_| 1, 100, 100), [1, 2]);
        assert_eq!(nearby(3, 2, |_| 1, 100, 100), [1, 0]);
        assert!(nearby(1, 0, |_| 1, 100, 100).is_empty());
    }

    #[test]
    fn what_is_here_costs_nothing_and_is_passed_over() {
        let missing = |at: usize| if at.is_multiple_of(2) { 10 } else { 0 };
        assert_eq!(nearby(10, 5, missing, 25, 99), [6, 4]);
        assert!(nearby(10, 5, |_| 10, 9, 9).is_empty());
    }

    #[test]
    fn a_chunk_larger_than_the_step_is_a_step() {
        assert_eq!(nearby(10, 5, |_| 10, 9, 10), [6]);
    }
}
