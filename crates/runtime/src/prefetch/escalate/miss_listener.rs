//! Listens for the chunks that readers of an image touch and miss.

use std::{
    mem,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::Notify;

use super::super::fetch_in_order::ChunkAt;
use crate::{
    cache::{CachedBlob, Listener, ReadyMap},
    sync::lock,
};

/// Touches, misses and expectations since they were last [taken](MissListener::take).
#[derive(Debug, Default)]
pub(super) struct News {
    /// Chunks that readers touched for the first time, in order, those that they missed among them.
    pub(super) touched: Vec<ChunkAt>,
    /// Those that were neither present, nor in flight, nor foreseen.
    pub(super) missed: Vec<ChunkAt>,
    /// Chunks that are expected from now on.
    pub(super) foreseen: Vec<ChunkAt>,
}

/// Listens to the readers of an image. Each chunk is reported once, so memory is bounded by the
/// number of chunks.
pub(crate) struct MissListener {
    shared: Arc<Shared>,
    /// Kept alive for the blobs, which notify them.
    _listeners: Vec<Arc<Listener>>,
}

struct Shared {
    news: Mutex<News>,
    /// Wakes up the escalation: something was missed, or something that it brought is used.
    arrived: Notify,
    /// The chunks of each blob, by position.
    chunks: Vec<Chunks>,
    touched: AtomicUsize,
    missed: AtomicUsize,
}

struct Chunks {
    touched: ReadyMap,
    /// The guess asks for them, sooner or later.
    foreseen: ReadyMap,
}

impl MissListener {
    /// Listens from now on.
    pub(crate) fn of(blobs: &[Arc<CachedBlob>]) -> Self {
        let maps = |blob: &Arc<CachedBlob>| {
            let empty = || ReadyMap::new(blob.stats().chunks_total as usize, &[]);
            Chunks { touched: empty(), foreseen: empty() }
        };
        let shared = Arc::new(Shared {
            news: Mutex::default(),
            arrived: Notify::new(),
            chunks: blobs.iter().map(maps).collect(),
            touched: AtomicUsize::new(0),
            missed: AtomicUsize::new(0),
        });
        let listener = |(position, blob): (usize, &Arc<CachedBlob>)| {
            let (shared, asked) = (shared.clone(), Arc::downgrade(blob));
            let listener: Arc<Listener> = Arc::new(move |chunks| {
                chunks.for_each(|at| shared.hear((position, at), &asked));
            });
            blob.tell(&listener);
            listener
        };
        MissListener { _listeners: blobs.iter().enumerate().map(listener).collect(), shared }
    }

    /// Marks chunks as expected: they are about to be requested, so they don't count as misses.
    pub(crate) fn foresee(&self, places: &[ChunkAt]) {
        let is_new = |(blob, chunk): &&ChunkAt| self.shared.chunks[*blob].foreseen.set(*chunk);
        let new: Vec<_> = places.iter().filter(is_new).copied().collect();
        self.shared.lock().foreseen.extend(new);
    }

    /// Returns whether a reader has asked for a chunk. It may do so a moment before its request is
    /// in flight.
    pub(super) fn is_touched(&self, (blob, chunk): ChunkAt) -> bool {
        self.shared.chunks[blob].touched.is_ready(chunk)
    }

    /// Number of chunks touched so far, and how many of them were misses.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        (count(&self.shared.touched), count(&self.shared.missed))
    }

    /// Takes the news since the last call.
    pub(super) fn take(&self) -> News {
        mem::take(&mut *self.shared.lock())
    }

    /// Waits for news that were not [taken](MissListener::take).
    pub(super) async fn more(&self) {
        self.shared.arrived.notified().await;
    }
}

impl Shared {
    fn hear(&self, (position, at): ChunkAt, blob: &Weak<CachedBlob>) {
        let chunks = &self.chunks[position];
        if !chunks.touched.set(at) {
            return;
        }
        let missed = !chunks.foreseen.is_ready(at)
            && blob.upgrade().is_some_and(|blob| !blob.is_under_way(at));
        self.touched.fetch_add(1, Ordering::Relaxed);
        self.missed.fetch_add(usize::from(missed), Ordering::Relaxed);
        let mut news = self.lock();
        news.touched.push((position, at));
        if missed {
            news.missed.push((position, at));
        }
        drop(news);
        self.arrived.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, News> {
        lock(&self.news)
    }
}
