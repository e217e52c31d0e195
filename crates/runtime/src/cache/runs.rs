//! How much comes along with a miss of readers who go on where the last miss ended.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Mutex, PoisonError},
};

use lazuli_image::Chunk;

use crate::fetch::{GAP, MAX_REQUEST, gap};

/// Runs that are followed in one blob: the files that a program goes through at the same time.
const RUNS: usize = 8;

/// What readers go through in one blob, as far as their misses show it. The latest run is the last.
#[derive(Debug, Default)]
pub(super) struct Runs(Mutex<VecDeque<Run>>);

/// Chunks side by side that misses have brought.
#[derive(Debug)]
struct Run {
    chunks: Range<usize>,
    /// Their stored bytes.
    bytes: u64,
}

impl Runs {
    /// How many stored bytes a miss of `wanted` may have in all: `least`, or twice what its run has had so far, until a request
    /// is full.
    pub(super) fn allowance(&self, chunks: &[Chunk], wanted: &Range<usize>, least: u64) -> u64 {
        let runs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let run = runs.iter().rev().find(|run| run.is_beside(chunks, wanted));
        run.map_or(least, |run| (2 * run.bytes).clamp(least, MAX_REQUEST.max(least)))
    }

    /// Notes what a miss has brought: `fetched` bytes, and all of `around`, in which the rest was there.
    pub(super) fn note(&self, chunks: &[Chunk], around: Range<usize>, fetched: u64) {
        let mut runs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = runs.iter().rposition(|run| run.is_beside(chunks, &around));
        let run = match known.and_then(|at| runs.remove(at)) {
            Some(run) => Run {
                chunks: run.chunks.start.min(around.start)..run.chunks.end.max(around.end),
                bytes: run.bytes + fetched,
            },
            None => Run { chunks: around, bytes: fetched },
        };
        if runs.len() == RUNS {
            runs.pop_front();
        }
        runs.push_back(run);
    }
}

impl Run {
    /// Whether `other` goes on where it ends, or ends where it begins. What is missing inside of it was given up since.
    fn is_beside(&self, chunks: &[Chunk], other: &Range<usize>) -> bool {
        let near = |low: usize, high: usize| low < high && gap(&chunks[low], &chunks[high]) <= GAP;
        near(self.chunks.end - 1, other.start) || near(other.end - 1, self.chunks.start)
    }
}
