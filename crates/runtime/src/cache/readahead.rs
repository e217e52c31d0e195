//! Readahead: what to fetch when readers go on where their last miss ended.

use std::{collections::VecDeque, sync::Mutex};

use lazuli_image::{Chunk, plan::gap};

use crate::{plan::PLANNER, sync::lock};

/// Runs that are followed in one blob: the files that a program goes through at the same time.
const RUNS: usize = 8;

/// Misses after which something is fetched ahead. In big files programs jump about, and sometimes
/// to where they have been.
const SURE: u32 = 3;

/// Stored bytes that one connection is asked for ahead: one answer in a few round trips, and few
/// requests.
pub(super) const PART: u64 = 1 << 20;

/// What readers go through in one blob, as far as their misses show it. The latest run is the last.
#[derive(Debug, Default)]
pub(super) struct Runs(Mutex<VecDeque<Run>>);

/// Misses that follow each other.
#[derive(Debug)]
struct Run {
    /// The chunk after the last one that was asked for.
    end: usize,
    /// How many there were.
    misses: u32,
    /// Stored bytes that were asked for.
    bytes: u64,
}

impl Runs {
    /// Follows a miss whose missing chunks begin at `first`, and for which `bytes` stored bytes up
    /// to the chunk `end` are asked for. Returns the end of what is to be fetched ahead after it:
    /// of the missing chunks that follow, as many as have the bytes of the run so far, so a run has
    /// twice as much with each miss, but no more than one request.
    pub(super) fn follow(
        &self,
        chunks: &[Chunk],
        first: usize,
        end: usize,
        bytes: u64,
        is_missing: impl Fn(usize) -> bool,
    ) -> usize {
        let mut runs = lock(&self.0);
        let goes_on =
            |run: &Run| run.end <= first && PLANNER.bridges(&chunks[run.end - 1], &chunks[first]);
        let known = runs.iter().rposition(goes_on).and_then(|at| runs.remove(at));
        let mut run = known.unwrap_or(Run { end, misses: 0, bytes: 0 });
        (run.end, run.misses, run.bytes) = (end, run.misses.saturating_add(1), run.bytes + bytes);
        let allowed = if run.misses < SURE { 0 } else { run.bytes.min(PLANNER.max_request) };
        let mut ahead = 0;
        while run.end < chunks.len() && is_missing(run.end) {
            let (last, next) = (&chunks[run.end - 1], &chunks[run.end]);
            let cost = gap(last, next) + next.stored_share();
            if !PLANNER.bridges(last, next) || ahead + cost > allowed {
                break;
            }
            ahead += cost;
            run.end += 1;
        }
        run.bytes += ahead;
        let end = run.end;
        // One that ends here is the same, asked for again.
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
            stored: Stored(number * size + if number + 1 == count { PLANNER.gap + 1 } else { 0 }),
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
        // Misses, of how many chunks, and where what is fetched ahead of the last one ends.
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
    fn what_is_there_or_far_away_is_not_fetched_ahead() {
        let chunks = chunks(40);
        let runs = Runs::default();
        let follow =
            |first, end, there: usize| runs.follow(&chunks, first, end, 1 << 20, |at| at != there);
        assert_eq!([follow(0, 1, 99), follow(1, 2, 99), follow(2, 3, 5)], [1, 2, 5]);
        // The last one is too far away.
        assert_eq!(follow(5, 6, 99), 39);
        // The same again, and others in between, more than are remembered.
        for _ in 0..3 {
            assert_eq!(follow(0, 1, 99), 1);
        }
        (0..RUNS).for_each(|at| assert_eq!(follow(3 * at, 3 * at + 1, 99), 3 * at + 1));
    }
}
