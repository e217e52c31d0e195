//! Plans which stored ranges to request for chunks.
//!
//! Pure: chunks in, ranges out. A node and the command share the rules and differ in their
//! [`Planner`].

use std::ops::Range;

use crate::{Chunk, Stored};

/// How a reader weighs bytes against requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planner {
    /// Maximum number of stored bytes between two chunks that one request reads and throws away.
    pub gap: u64,
    /// Maximum number of stored bytes in one request, unless a single unit has more.
    pub max_request: u64,
}

impl Planner {
    /// For a node, where a reader may wait for any request. At 100 Mbit/s and 10 ms, a round trip
    /// costs as much as 128 KiB. Requests beyond 4 MiB are split, since several streams fill a link
    /// better than one, and a failure costs less.
    pub const NODE: Planner = Planner { gap: 128 << 10, max_request: 4 << 20 };

    /// For the command, which has many requests in flight, and no reader that waits for one of
    /// them: they are larger, and throw away less, since other requests hide a round trip.
    pub const COMMAND: Planner = Planner { gap: 64 << 10, max_request: 8 << 20 };

    /// Widens `wanted`, a range of chunks, by the missing chunks behind it, until the missing ones
    /// have `amplify` stored bytes. Chunks of the same unit are free and are added in front as
    /// well.
    pub fn neighbours(
        &self,
        chunks: &[Chunk],
        wanted: Range<usize>,
        amplify: u64,
        is_missing: impl Fn(usize) -> bool,
    ) -> Range<usize> {
        let Range { mut start, mut end } = wanted;
        let beyond = |at: usize| chunks[at - 1].stored_beyond(&chunks[at]);
        let size = |at: usize| if at > start { beyond(at) } else { chunks[at].stored_size.into() };
        let mut bytes: u64 = (start..end).filter(|at| is_missing(*at)).map(size).sum();
        while end < chunks.len() && is_missing(end) && self.bridges(&chunks[end - 1], &chunks[end])
        {
            let more = beyond(end);
            if more > 0 && bytes + more > amplify {
                break;
            }
            bytes += more;
            end += 1;
        }
        while start > 0 && is_missing(start - 1) && chunks[start - 1].shares_unit(&chunks[start]) {
            start -= 1;
        }
        start..end
    }

    /// Cuts chunks of one blob, in ascending order, into requests: the positions in `chunks` that
    /// each covers. A unit is never cut.
    pub fn requests<'a>(&self, chunks: impl Iterator<Item = &'a Chunk>) -> Vec<Range<usize>> {
        let mut requests: Vec<Range<usize>> = Vec::new();
        let mut open: Option<(&Chunk, &Chunk)> = None;
        for (position, chunk) in chunks.enumerate() {
            let joins = open.is_some_and(|(first, last)| {
                last.shares_unit(chunk)
                    || self.bridges(last, chunk)
                        && chunk.stored_end().0 - first.stored.0 <= self.max_request
            });
            match requests.last_mut() {
                Some(request) if joins => request.end = position + 1,
                _ => requests.push(position..position + 1),
            }
            open = Some((open.filter(|_| joins).map_or(chunk, |(first, _)| first), chunk));
        }
        requests
    }

    /// Returns whether one request should read both chunks; `high` lies behind `low`.
    pub fn bridges(&self, low: &Chunk, high: &Chunk) -> bool {
        gap(low, high) <= self.gap
    }
}

/// Stored bytes between a chunk and a later one.
pub fn gap(low: &Chunk, high: &Chunk) -> u64 {
    high.stored.0.saturating_sub(low.stored_end().0)
}

/// The stored bytes from the first of some chunks to the last; empty without chunks.
pub fn stored_range<'a>(chunks: impl IntoIterator<Item = &'a Chunk>) -> Range<Stored> {
    let mut chunks = chunks.into_iter();
    let Some(first) = chunks.next() else { return Stored(0)..Stored(0) };
    first.stored..chunks.last().unwrap_or(first).stored_end()
}

/// Adds to `chunks`, positions in ascending order, all others in the same units.
pub fn whole_units<'a>(all: &'a [Chunk], chunks: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
    let mut next = 0;
    chunks.iter().flat_map(move |&at| {
        let (mut start, mut end) = (at, at + 1);
        while start > next && all[start - 1].shares_unit(&all[at]) {
            start -= 1;
        }
        let comes_along = |other: &Chunk| other.stored_end() == all[at].stored_end();
        while end < all.len() && all[end].shares_unit(&all[at]) && comes_along(&all[end]) {
            end += 1;
        }
        start = start.max(next);
        next = next.max(end);
        start..end
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, Decoded, chunk::Part};

    const PLANNER: Planner = Planner::NODE;

    fn requests(chunks: &[Chunk], missing: &[usize]) -> Vec<Range<usize>> {
        PLANNER.requests(missing.iter().map(|at| &chunks[*at]))
    }

    /// Chunks of these stored sizes, each with a gap of this size before it.
    fn chunks(sizes: &[(u64, u32)]) -> Vec<Chunk> {
        let mut stored = 0;
        let chunk = |(number, (gap, size)): (usize, &(u64, u32))| {
            let start = stored + gap;
            stored = start + u64::from(*size);
            Chunk {
                number: number as u32,
                digest: Algorithm::Blake3.digest(b""),
                stored: Stored(start),
                stored_size: *size,
                decoded: Decoded(number as u64 * 4096),
                decoded_size: *size,
                part: None,
            }
        };
        sizes.iter().enumerate().map(chunk).collect()
    }

    /// Chunks of which each run has this number of chunks in a batch with this stored size, one run
    /// behind the other.
    fn batches(runs: &[(usize, u32)]) -> Vec<Chunk> {
        let sizes = runs.iter().flat_map(|(count, size)| (0..*count).map(|at| (at, *size)));
        let mut chunks = chunks(&sizes.clone().map(|_| (0, 1)).collect::<Vec<_>>());
        let mut start = 0;
        for (chunk, (at, size)) in chunks.iter_mut().zip(sizes) {
            start += if at == 0 { u64::from(size) } else { 0 };
            (chunk.stored, chunk.stored_size) = (Stored(start - u64::from(size)), size);
            chunk.part = Some(Part { offset: at as u32, size: 10 * size });
        }
        chunks
    }

    #[test]
    fn batches_come_whole_and_count_once() {
        let chunks = batches(&[(4, 100), (3, 200), (2, 300)]);
        type Case = (Range<usize>, u64, Range<usize>);
        let cases: [Case; 5] = [
            (1..2, 0, 0..4),
            (5..6, 0, 4..7),
            (1..3, 300, 0..7),
            (1..2, 299, 0..4),
            (0..9, 0, 0..9),
        ];
        for (wanted, amplify, expected) in cases {
            let wide = PLANNER.neighbours(&chunks, wanted.clone(), amplify, |_| true);
            assert_eq!(wide, expected, "{wanted:?} up to {amplify}");
        }
        let whole = |wanted: &[usize]| whole_units(&chunks, wanted).collect::<Vec<_>>();
        assert!(whole(&[]).is_empty());
        assert_eq!(whole(&[1]), [0, 1, 2, 3]);
        assert_eq!(whole(&[2, 3, 8]), [0, 1, 2, 3, 7, 8]);
        // All of a batch is in one request, and requests never overlap.
        assert_eq!(requests(&chunks, &[0, 1, 4, 6]).len(), 1);
        let large = batches(&[(2, 3 << 20), (2, 3 << 20)]);
        assert_eq!(requests(&large, &[0, 1, 2, 3]), [0..2, 2..4]);
    }

    /// Chunks behind points at these stored bytes, each of which reaches to those.
    fn pieces(reaches: &[(u64, u64)]) -> Vec<Chunk> {
        let mut chunks = chunks(&vec![(0, 1); reaches.len()]);
        for (chunk, (start, end)) in chunks.iter_mut().zip(reaches) {
            (chunk.stored, chunk.stored_size) = (Stored(*start), (end - start) as u32);
            chunk.part =
                Some(Part { offset: (end - start) as u32, size: (end - start) as u32 + 1 });
        }
        chunks
    }

    #[test]
    fn a_piece_is_fetched_as_far_as_it_is_wanted() {
        // The second point is before the end of the last chunk of the first one.
        let chunks = pieces(&[(0, 100), (0, 200), (0, 300), (250, 400), (250, 500)]);
        type Case = (Range<usize>, u64, Range<usize>);
        let cases: [Case; 7] = [
            (0..1, 0, 0..1),
            // The chunks before it in the unit are decoded anyway.
            (1..2, 0, 0..2),
            (1..2, 299, 0..2),
            (1..2, 300, 0..3),
            (1..2, 400, 0..4),
            (4..5, 0, 3..5),
            (2..5, 0, 0..5),
        ];
        for (wanted, amplify, expected) in cases {
            let wide = PLANNER.neighbours(&chunks, wanted.clone(), amplify, |_| true);
            assert_eq!(wide, expected, "{wanted:?} up to {amplify}");
        }
        let whole = |wanted: &[usize]| whole_units(&chunks, wanted).collect::<Vec<_>>();
        assert_eq!(whole(&[1]), [0, 1]);
        assert_eq!(whole(&[1, 4]), [0, 1, 3, 4]);
        assert_eq!(requests(&chunks, &[0, 1, 2, 3, 4]), std::iter::once(0..5).collect::<Vec<_>>());
        // All chunks behind one point share one request, however far it reaches.
        let far = pieces(&[(0, 100), (0, 3 << 20), (0, 9 << 20), (8 << 20, 11 << 20)]);
        assert_eq!(requests(&far, &[0, 1, 2, 3]), [0..3, 3..4]);
    }

    #[test]
    fn neighbours_come_along_up_to_the_limit() {
        let chunks = chunks(&[
            (0, 100),
            (0, 100),
            (0, 100),
            (PLANNER.gap, 100),
            (0, 100),
            (PLANNER.gap + 1, 100),
        ]);
        type Case = (Range<usize>, u64, &'static [usize], Range<usize>);
        let cases: [Case; 8] = [
            (2..3, 0, &[], 2..3),
            (2..3, 199, &[], 2..3),
            (2..3, 200, &[], 2..4),
            (2..3, 299, &[], 2..4),
            (2..3, 1000, &[], 2..5),
            (2..3, 1000, &[3], 2..3),
            (2..3, 1000, &[4], 2..4),
            (5..6, 1000, &[], 5..6),
        ];
        for (wanted, amplify, there, expected) in cases {
            let wide =
                PLANNER.neighbours(&chunks, wanted.clone(), amplify, |at| !there.contains(&at));
            assert_eq!(wide, expected, "{wanted:?} up to {amplify}, without {there:?}");
        }
    }

    #[test]
    fn near_chunks_share_a_request() {
        let far = PLANNER.gap + 1;
        let big = 3 << 20;
        let chunks = chunks(&[
            (0, 100),
            (0, 100),
            (PLANNER.gap, 100),
            (far, 100),
            (0, big),
            (0, big),
            (0, 9 << 20),
        ]);
        type Case = (&'static [usize], &'static [(usize, usize)]);
        let cases: [Case; 6] = [
            (&[], &[]),
            (&[0, 1, 2], &[(0, 3)]),
            (&[0, 2], &[(0, 1), (1, 2)]),
            (&[2, 3], &[(0, 1), (1, 2)]),
            (&[3, 4, 5, 6], &[(0, 2), (2, 3), (3, 4)]),
            (&[0, 4], &[(0, 1), (1, 2)]),
        ];
        for (missing, expected) in cases {
            let requests: Vec<_> =
                requests(&chunks, missing).iter().map(|r| (r.start, r.end)).collect();
            assert_eq!(requests, expected, "{missing:?}");
        }
    }
}
