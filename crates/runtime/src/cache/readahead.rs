//! Readahead: what to fetch when readers continue where their last miss ended.

use std::{collections::VecDeque, sync::Mutex};

use lazuli_image::{
    Chunk,
    plan::{Planner, gap},
};

use crate::sync::lock;

/// Maximum number of runs followed in one blob: files that a program reads at the same time.
const RUNS: usize = 8;

/// Misses after which something is fetched ahead. In big files programs jump about, and sometimes
/// to where they have been.
const SURE: u32 = 3;

/// Stored bytes that one connection is asked for ahead: one answer in a few round trips, and few
/// requests.
pub(super) const PART: u64 = 1 << 20;

/// The sequential runs of readers in one blob, as far as their misses show them, the latest last.
#[derive(Debug, Default)]
pub(super) struct Runs(Mutex<VecDeque<Run>>);

/// A run of consecutive misses.
#[derive(Debug)]
struct Run {
    /// The chunk behind the last requested one.
    end: usize,
    /// The number of misses.
    misses: u32,
    /// Stored bytes that were asked for.
    bytes: u64,
}

impl Runs {
    /// Records a miss whose missing chunks begin at `first`, and whose requests have `bytes` stored
    /// bytes up to the chunk `end`. Returns the end of the chunks to read ahead: missing chunks
    /// behind `end` with as many bytes as the run has so far, so that a run doubles with each miss,
    /// up to one request.
    pub(super) fn follow(
        &self,
        chunks: &[Chunk],
        first: usize,
        end: usize,
        bytes: u64,
        is_missing: impl Fn(usize) -> bool,
    ) -> usize {
        let mut runs = lock(&self.0);
        let goes_on = |run: &Run| {
            run.end <= first && Planner::NODE.bridges(&chunks[run.end - 1], &chunks[first])
        };
        let known = runs.iter().rposition(goes_on).and_then(|at| runs.remove(at));
        let mut run = known.unwrap_or(Run { end, misses: 0, bytes: 0 });
        (run.end, run.misses, run.bytes) = (end, run.misses.saturating_add(1), run.bytes + bytes);
        let allowed = if run.misses < SURE { 0 } else { run.bytes.min(Planner::NODE.max_request) };
        let mut ahead = 0;
        while run.end < chunks.len() && is_missing(run.end) {
            let (last, next) = (&chunks[run.end - 1], &chunks[run.end]);
            let cost = gap(last, next) + next.stored_share();
            if !Planner::NODE.bridges(last, next) || ahead + cost > allowed {
                break;
            }
            ahead += cost;
            run.end += 1;
        }
        run.bytes += ahead;
        let end = run.end;
        // A run that ends here is the same one, requested again.
        runs.retain(|other| other.end != end);
        runs.push_back(run);
        if runs.len() > RUNS {
            runs.pop_front();
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use lazuli_image::{Algorithm, Decoded, Stored};

    use super::*;

    /// Chunks of 100 KiB, one after the other, the last one after a gap that is not fetched along.
    fn chunks(count: u64) -> Vec<Chunk> {
        let size = 100 << 10;
        let chunk = |number: u64| Chunk {
            number: number as u32,
            digest: Algorithm::Blake3.digest(b""),
            stored: Stored(
                number * size + if number + 1 == count { Planner::NODE.gap + 1 } else { 0 },
            ),
            stored_size: size as u32,
            decoded: Decoded(number * size),
            decoded_size: size as u32,
            part: None,
        };
        (0..count).map(chunk).collect()
    }

    #[test]
    fn the_third_miss_of_a_run_has_more_fetched_ahead() {
        let chunks = chunks(101);
        // Misses with their numbers of chunks, and where the readahead after the last one ends.
        type Case = (&'static str, &'static [(usize, usize)], usize);
        let cases: [Case; 8] = [
            ("one", &[(0, 1)], 1),
            ("two", &[(0, 1), (1, 1)], 2),
            ("three", &[(0, 1), (1, 1), (2, 1)], 6),
            ("four", &[(0, 1), (1, 1), (2, 1), (6, 1)], 14),
            ("with a gap that is fetched along", &[(0, 1), (2, 1), (4, 1)], 8),
            ("with a gap that is not", &[(0, 1), (3, 1), (6, 1)], 7),
            ("backwards", &[(9, 1), (8, 1), (7, 1)], 8),
            ("up to a request", &[(0, 20), (20, 20), (40, 5)], 85),
        ];
        for (what, misses, expected) in cases {
            let runs = Runs::default();
            let follow = |&(first, count): &(usize, usize)| {
                let bytes = count as u64 * (100 << 10);
                runs.follow(&chunks, first, first + count, bytes, |_| true)
            };
            assert_eq!(misses.iter().map(follow).last(), Some(expected), "{what}");
        }
    }

    #[test]
    fn readahead_stops_at_ready_or_distant_chunks() {
        let chunks = chunks(40);
        let runs = Runs::default();
        let follow =
            |first, end, there: usize| runs.follow(&chunks, first, end, 1 << 20, |at| at != there);
        assert_eq!([follow(0, 1, 99), follow(1, 2, 99), follow(2, 3, 5)], [1, 2, 5]);
        // The last miss is too far away.
        assert_eq!(follow(5, 6, 99), 39);
        // The same again, and others in between, more than are remembered.
        for _ in 0..3 {
            assert_eq!(follow(0, 1, 99), 1);
        }
        (0..RUNS).for_each(|at| assert_eq!(follow(3 * at, 3 * at + 1, 99), 3 * at + 1));
    }
}
