//! Counters of readers' and starts' events, since the worker began.
//!
//! They are plain numbers, each of which costs an atomic addition, read or not. None is kept per
//! image or registry, so clients cannot make them take memory.

mod causes;
mod histogram;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use self::histogram::Histogram;
pub use self::{
    causes::{Driver, Origin, ReadFailure, StartFailure},
    histogram::{BOUNDS, HistogramCounts},
};
use crate::error::ReadError;

/// The counters of one worker.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    waits: Histogram,
    waiting: AtomicU64,
    failed_reads: [AtomicU64; ReadFailure::ALL.len()],
    wrong: [AtomicU64; Origin::ALL.len()],
    pub(crate) copied: AtomicU64,
    pub(crate) foreseen: AtomicU64,
    pub(crate) foreseen_read: AtomicU64,
    pub(crate) foreseen_unseen: AtomicU64,
    starts: [AtomicU64; Driver::ALL.len()],
    start_times: Histogram,
    failed_starts: [AtomicU64; StartFailure::ALL.len()],
}

/// The counters at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MetricCounts {
    /// Waits of readers that found data missing, including those that gave up.
    pub waits: HistogramCounts,
    /// Readers that wait now.
    pub waiting: u64,
    /// Reads that were answered with an error, by the number of the [`ReadFailure`].
    pub failed_reads: [u64; ReadFailure::ALL.len()],
    /// Answers with wrong bytes, by the number of their [`Origin`].
    pub wrong: [u64; Origin::ALL.len()],
    /// Decoded bytes that were copied from other blobs in the cache.
    pub copied: u64,
    /// Stored bytes that were asked for ahead of the readers of a start.
    pub foreseen: u64,
    /// The ones among these that a reader asked for.
    pub foreseen_read: u64,
    /// Those among them whose readers could not be seen, because their blob was complete.
    pub foreseen_unseen: u64,
    /// Mounts that were made, by the number of their [`Driver`].
    pub starts: [u64; Driver::ALL.len()],
    /// How long it took to make them.
    pub start_times: HistogramCounts,
    /// Mounts that were not made, by the number of the [`StartFailure`].
    pub failed_starts: [u64; StartFailure::ALL.len()],
}

impl Metrics {
    /// A reader waits, until the result is dropped.
    pub(crate) fn wait(self: &Arc<Self>) -> Wait {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Wait { metrics: self.clone(), since: Instant::now() }
    }

    /// A reader gets an error.
    pub(crate) fn read_failed(&self, error: &ReadError) {
        add(&self.failed_reads[ReadFailure::of(error) as usize]);
    }

    /// Counts a chunk whose bytes don't match its digest.
    pub(crate) fn wrong(&self, origin: Origin) {
        add(&self.wrong[origin as usize]);
    }

    /// A mount was made in this time.
    pub(crate) fn started(&self, driver: Driver, time: Duration) {
        add(&self.starts[driver as usize]);
        self.start_times.observe(time);
    }

    /// A mount was not made.
    pub(crate) fn start_failed(&self, cause: StartFailure) {
        add(&self.failed_starts[cause as usize]);
    }

    /// Reads the counters.
    pub(crate) fn counts(&self) -> MetricCounts {
        MetricCounts {
            waits: self.waits.counts(),
            waiting: read(&self.waiting),
            failed_reads: self.failed_reads.each_ref().map(read),
            wrong: self.wrong.each_ref().map(read),
            copied: read(&self.copied),
            foreseen: read(&self.foreseen),
            foreseen_read: read(&self.foreseen_read),
            foreseen_unseen: read(&self.foreseen_unseen),
            starts: self.starts.each_ref().map(read),
            start_times: self.start_times.counts(),
            failed_starts: self.failed_starts.each_ref().map(read),
        }
    }
}

fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// A reader that waits.
#[derive(Debug)]
pub(crate) struct Wait {
    metrics: Arc<Metrics>,
    since: Instant,
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.metrics.waiting.fetch_sub(1, Ordering::Relaxed);
        self.metrics.waits.observe(self.since.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_counts_as_waiting_until_it_is_answered() {
        let metrics = Arc::<Metrics>::default();
        let wait = metrics.wait();
        let counts = metrics.counts();
        assert_eq!((counts.waiting, counts.waits.count), (1, 0));
        drop(wait);
        let counts = metrics.counts();
        assert_eq!((counts.waiting, counts.waits.count), (0, 1));
    }
}
