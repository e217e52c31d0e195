//! Distributions of durations.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Upper bounds of the buckets in seconds: from a disk's read to the default of
/// `fetch.deadline_seconds`. Longer times are counted above all of them.
pub const BOUNDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// Counts durations by [`BOUNDS`].
#[derive(Debug, Default)]
pub(super) struct Histogram {
    buckets: [AtomicU64; BOUNDS.len() + 1],
    micros: AtomicU64,
}

/// The counts of a histogram.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HistogramCounts {
    /// Counts for each bound of [`BOUNDS`], and for larger values. Each value is in one bucket.
    pub buckets: [u64; BOUNDS.len() + 1],
    /// All of them together.
    pub count: u64,
    /// Seconds of all of them together.
    pub sum: f64,
}

impl Histogram {
    pub(super) fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = BOUNDS.partition_point(|bound| *bound < seconds);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.micros.fetch_add(micros, Ordering::Relaxed);
    }

    pub(super) fn counts(&self) -> HistogramCounts {
        let buckets = self.buckets.each_ref().map(|bucket| bucket.load(Ordering::Relaxed));
        let sum = Duration::from_micros(self.micros.load(Ordering::Relaxed)).as_secs_f64();
        HistogramCounts { buckets, count: buckets.iter().sum(), sum }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_includes_its_bound() {
        let histogram = Histogram::default();
        for millis in [0, 1, 2, 1000, 90_000] {
            histogram.observe(Duration::from_millis(millis));
        }
        let counts = histogram.counts();
        assert_eq!(counts.buckets, [2, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]);
        assert_eq!((counts.count, counts.sum), (5, 91.003));
    }
}
