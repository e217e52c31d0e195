//! Readahead: what to fetch when readers continue where their last miss ended.
//!
//! A run begins with misses. Once it is long, a window of bytes ahead of its reader is always
//! requested or ready, and grows part by part as the reader moves on: the link is never idle.
//!
//! ```text
//! read ──┤ reader ├────── window ──────┤ next part
//!                                     end
//! ```

use std::{collections::VecDeque, ops::Range, sync::Mutex};

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

/// Stored bytes after which a run is long: that of a big file. Programs that start read less of a
/// library, or of the files that lie side by side, in one go.
const LONG: u64 = 16 << 20;

/// The same in a blob that is one file, byte for byte: the weights of a model, which are read in
/// pieces of this size at least.
const LONG_OF_FILE: u64 = 2 << 20;

/// Stored bytes that are read ahead of a run that is not long.
const SHORT_WINDOW: u64 = Planner::NODE.max_request;

/// Stored bytes that a run may find fetched by others, between two misses.
const FETCHED_BY_OTHERS: u64 = 32 << 20;

/// Stored bytes of the least request ahead of a long run.
const PART: u64 = 1 << 20;

/// The same for chunks in units: what begins within a piece of a gzip layer is fetched from the
/// point before it on, so that each request costs up to a piece more.
const PART_OF_UNITS: u64 = Planner::NODE.max_request;

/// A window is requested in so many parts, unless these are smaller than [`PART`].
const PARTS: u64 = 8;

/// The sequential runs of readers in one blob, as far as their misses show them, the latest last.
#[derive(Debug)]
pub(super) struct Runs {
    runs: Mutex<VecDeque<Run>>,
    /// Stored bytes after which a run is long.
    long: u64,
}

/// A run of consecutive misses.
#[derive(Debug)]
struct Run {
    /// The chunk behind the last requested one.
    end: usize,
    /// The number of misses since it last went on behind what others had fetched.
    misses: u32,
    /// Stored bytes that were asked for since then, and in all.
    bytes: u64,
    total: u64,
}

impl Runs {
    /// None yet.
    pub(super) fn new(is_one_file: bool) -> Self {
        let long = if is_one_file { LONG_OF_FILE } else { LONG };
        Runs { runs: Mutex::default(), long }
    }

    /// Records a miss whose missing chunks begin at `first`, and whose requests have `bytes` stored
    /// bytes up to the chunk `end`. Returns the end of the chunks to read ahead: those behind `end`
    /// with as many bytes as the run has so far, so that a run doubles with each miss, up to
    /// `window` bytes if it is long. Some may be ready.
    pub(super) fn follow(
        &self,
        chunks: &[Chunk],
        first: usize,
        end: usize,
        bytes: u64,
        window: u64,
        is_missing: impl Fn(usize) -> bool,
    ) -> usize {
        let mut runs = lock(&self.runs);
        let goes_on = |run: &Run| run.is_followed_by(chunks, first, &is_missing);
        let known = runs.iter().rposition(goes_on).and_then(|at| runs.remove(at));
        let mut run = known.unwrap_or(Run { end, misses: 0, bytes: 0, total: 0 });
        if !Planner::NODE.bridges(&chunks[run.end - 1], &chunks[first]) {
            (run.misses, run.bytes) = (0, 0);
        }
        run.end = end;
        run.misses = run.misses.saturating_add(1);
        (run.bytes, run.total) = (run.bytes + bytes, run.total + bytes);
        if run.total >= self.long {
            run.extend(chunks, run.total.min(window), |_| true);
        } else if run.misses >= SURE {
            run.extend(chunks, run.bytes.min(SHORT_WINDOW), is_missing);
        }
        let end = run.end;
        // A run that ends here is the same one, requested again.
        runs.retain(|other| other.end != end);
        runs.push_back(run);
        if runs.len() > RUNS {
            runs.pop_front();
        }
        end
    }

    /// Returns the chunks to read ahead when a reader asks for `wanted`, which is ready or on its
    /// way: if less than `window` bytes of a long run are requested ahead of it, the next ones.
    /// Some may be ready. A window has `most` bytes at most.
    pub(super) fn reached(
        &self,
        chunks: &[Chunk],
        wanted: &Range<usize>,
        most: u64,
        window: impl FnOnce() -> u64,
    ) -> Range<usize> {
        if wanted.is_empty() {
            return 0..0;
        }
        let mut runs = lock(&self.runs);
        let ahead = |run: &Run| {
            let (end, reader) = (&chunks[run.end - 1], &chunks[wanted.end - 1]);
            end.stored_end().0.saturating_sub(reader.stored_end().0)
        };
        let is_reached = |run: &&mut Run| {
            run.total >= self.long && wanted.end <= run.end && ahead(run) < run.total
        };
        let nearest = runs.iter_mut().filter(is_reached).min_by_key(|run| run.end);
        let Some(run) = nearest else { return 0..0 };
        let (there, before) = (ahead(run), run.end);
        let part = part(&chunks[before - 1]);
        // Most reads end here, without a question about the link.
        if there + part > run.total.min(most) {
            return 0..0;
        }
        let allowed = run.total.min(window());
        if there + (allowed / PARTS).max(part) <= allowed {
            run.extend(chunks, allowed - there, |_| true);
        }
        before..run.end
    }
}

/// Stored bytes of the least request ahead for chunks like this one.
fn part(chunk: &Chunk) -> u64 {
    if chunk.part.is_some() { PART_OF_UNITS } else { PART }
}

/// Divides chunks that are read ahead into requests. Each asks for twice as many bytes as the one
/// before it, up to the largest request. They share the link, so the first one ends first, and its
/// reader causes the next requests while the last ones are still on their way.
pub(super) fn requests(chunks: &[Chunk], ahead: Range<usize>) -> Vec<Range<usize>> {
    let mut size = chunks.get(ahead.start).map_or(PART, part);
    let mut requests = Vec::new();
    let mut rest = ahead;
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |chunk: &&Chunk| {
            bytes += chunk.stored_share();
            bytes <= size
        };
        let count = chunks[rest.clone()].iter().take_while(fits).count().max(1);
        let mut end = rest.start + count;
        // The rest of a unit would be decoded, and perhaps fetched, once more.
        while end < rest.end && chunks[end - 1].shares_unit(&chunks[end]) {
            end += 1;
        }
        requests.push(rest.start..end);
        rest.start = end;
        size = (2 * size).min(Planner::NODE.max_request);
    }
    requests
}

impl Run {
    /// Moves its end by at most `allowed` stored bytes, over chunks that are `wanted`.
    fn extend(&mut self, chunks: &[Chunk], allowed: u64, wanted: impl Fn(usize) -> bool) {
        let mut ahead = 0;
        while self.end < chunks.len() && wanted(self.end) {
            let (last, next) = (&chunks[self.end - 1], &chunks[self.end]);
            let cost = gap(last, next) + next.stored_share();
            if !Planner::NODE.bridges(last, next) || ahead + cost > allowed {
                break;
            }
            ahead += cost;
            self.end += 1;
        }
        while ahead > 0
            && self.end < chunks.len()
            && chunks[self.end - 1].shares_unit(&chunks[self.end])
        {
            ahead += chunks[self.end].stored_share();
            self.end += 1;
        }
        self.bytes += ahead;
        self.total += ahead;
    }

    /// Returns whether a miss at `first` is the next of this run: nothing was skipped but chunks
    /// that others have fetched, or the small gap of a request.
    fn is_followed_by(
        &self,
        chunks: &[Chunk],
        first: usize,
        is_missing: impl Fn(usize) -> bool,
    ) -> bool {
        if self.end > first {
            return false;
        }
        let (last, next) = (&chunks[self.end - 1], &chunks[first]);
        if Planner::NODE.bridges(last, next) {
            return true;
        }
        let bridges = |at: usize| Planner::NODE.bridges(&chunks[at - 1], &chunks[at]);
        next.stored.0 - last.stored.0 <= FETCHED_BY_OTHERS
            && (self.end..=first).all(bridges)
            && !(self.end..first).any(is_missing)
    }
}

#[cfg(test)]
mod tests {
    use lazuli_image::{Algorithm, Decoded, Stored};

    use super::*;

    const WINDOW: u64 = 8 << 20;

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
            let runs = Runs::new(false);
            let follow = |&(first, count): &(usize, usize)| {
                let bytes = count as u64 * (100 << 10);
                runs.follow(&chunks, first, first + count, bytes, WINDOW, |_| true)
            };
            assert_eq!(misses.iter().map(follow).last(), Some(expected), "{what}");
        }
    }

    #[test]
    fn readahead_stops_at_ready_or_distant_chunks() {
        let chunks = chunks(40);
        let runs = Runs::new(false);
        let follow = |first, end, there: usize| {
            runs.follow(&chunks, first, end, 1 << 20, WINDOW, |at| at != there)
        };
        assert_eq!([follow(0, 1, 99), follow(1, 2, 99), follow(2, 3, 5)], [1, 2, 5]);
        // The last miss is too far away.
        assert_eq!(follow(5, 6, 99), 39);
        // The same again, and others in between, more than are remembered.
        for _ in 0..3 {
            assert_eq!(follow(0, 1, 99), 1);
        }
        (0..RUNS).for_each(|at| assert_eq!(follow(3 * at, 3 * at + 1, 99), 3 * at + 1));
    }

    #[test]
    fn a_run_becomes_long_behind_what_others_fetch() {
        let chunks = chunks(1000);
        // Of each 60 chunks others fetch 40, or all but one of these.
        for (others, expected) in [(40, 20 + 81), (39, 20)] {
            let runs = Runs::new(false);
            let is_missing = |at: usize| at % 60 < 60 - others;
            let miss = |number: usize| {
                let first = 60 * number;
                let end = runs.follow(&chunks, first, first + 20, 2 << 20, WINDOW, is_missing);
                end - first
            };
            let ends: Vec<_> = (0..8).map(miss).collect();
            assert_eq!(ends[..7], [20; 7], "{others}");
            assert_eq!(ends[7], expected, "{others}");
        }
    }

    #[test]
    fn a_window_before_the_reader_of_a_long_run_is_requested_always() {
        let chunks = chunks(1000);
        let runs = Runs::new(false);
        let miss = |first| runs.follow(&chunks, first, first + 20, 16 << 20, WINDOW, |_| true);
        assert_eq!(miss(0), 20 + 81);
        let reached = |wanted: Range<usize>| runs.reached(&chunks, &wanted, WINDOW, || WINDOW);
        assert!(reached(10..20).is_empty(), "was missed");
        assert!(reached(20..29).is_empty(), "less than a part is lacking");
        assert_eq!(reached(29..31), 101..112);
        assert!(reached(29..31).is_empty(), "again");
        assert!(reached(300..301).is_empty(), "far behind it");
        assert_eq!(reached(60..61), 112..142);
        // To the end, and not to what is too far away.
        let mut end = 142;
        for at in 61..999 {
            let next = reached(at..at + 1);
            assert!(next.is_empty() || next.start == end, "{at}: {next:?}");
            end = end.max(next.end);
            let ahead = end - (at + 1);
            assert!(end == 999 || (81 - 11..=81).contains(&ahead), "{at}: {ahead}");
        }
        assert!(reached(998..999).is_empty());
    }

    #[test]
    fn runs_in_a_blob_that_is_one_file_become_long_sooner() {
        let chunks = chunks(101);
        let ends = |is_one_file: bool| {
            let runs = Runs::new(is_one_file);
            let miss = |at: usize| runs.follow(&chunks, at, at + 10, 1 << 20, WINDOW, |_| true);
            [miss(0), miss(10)]
        };
        assert_eq!(ends(true), [10, 20 + 20]);
        assert_eq!(ends(false), [10, 20]);
    }

    #[test]
    fn the_first_request_of_a_window_ends_first() {
        let chunks = chunks(201);
        let counts = |ahead: Range<usize>| -> Vec<usize> {
            let requests = requests(&chunks, ahead.clone());
            assert!(requests.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert_eq!(requests.last().map_or(ahead.start, |last| last.end), ahead.end);
            requests.into_iter().map(|request| request.len()).collect()
        };
        assert_eq!(counts(0..150), [10, 20, 40, 40, 40]);
        assert_eq!(counts(7..8), [1]);
        assert!(counts(7..7).is_empty());
    }

    #[test]
    fn requests_do_not_cut_units() {
        let mut chunks = chunks(201);
        for unit in chunks.chunks_mut(3) {
            let (stored, size) = (unit[0].stored, 3 * unit[0].decoded_size);
            let stored_size = unit.iter().map(|chunk| chunk.stored_size).sum();
            for (chunk, number) in unit.iter_mut().zip(0..) {
                let offset = number * chunk.decoded_size;
                (chunk.stored, chunk.stored_size) = (stored, stored_size);
                chunk.part = Some(lazuli_image::chunk::Part { offset, size });
            }
        }
        let requests = requests(&chunks, 0..150);
        assert!(requests.iter().all(|request| request.start % 3 == 0 && request.end % 3 == 0));
        let counts: Vec<_> = requests.iter().map(|request| request.len()).collect();
        assert_eq!(counts, [42, 42, 42, 24], "4 MiB each");
    }

    #[test]
    fn short_runs_wait_for_their_misses() {
        let chunks = chunks(100);
        let runs = Runs::new(false);
        for first in 0..3 {
            runs.follow(&chunks, first, first + 1, 100 << 10, WINDOW, |_| true);
        }
        assert!(runs.reached(&chunks, &(3..6), WINDOW, || WINDOW).is_empty());
    }
}
