//! Maps of sparse files: the old GNU one in header blocks, and GNU's three in PAX.

use super::number;

/// A segment of a sparse file with data; gaps between segments read as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// First byte in the file.
    pub(super) start: u64,
    /// Bytes.
    pub(super) length: u64,
}

/// Maximum number of segments that a map may have: 1 Mi, or 16 MiB of memory. A file with a hole in
/// every other block reaches it at 8 GiB.
pub(super) const MAX_SEGMENTS: usize = 1 << 20;

/// Bytes of one segment in an old GNU header.
const OLD_SEGMENT: usize = 24;

/// Adds the segments of an old GNU header field to `map`. Unused places are NUL.
pub(super) fn parse_old(field: &[u8], map: &mut Vec<Segment>) -> Option<()> {
    for place in field.chunks_exact(OLD_SEGMENT) {
        if place[0] == 0 {
            break;
        }
        let (start, length) = place.split_at(12);
        map.push(Segment {
            start: number::parse_unsigned(start)?,
            length: number::parse_unsigned(length)?,
        });
    }
    Some(())
}

/// Pairs up the numbers of a PAX map.
pub(super) fn pair(numbers: &[u64]) -> Option<Vec<Segment>> {
    if !numbers.len().is_multiple_of(2) {
        return None;
    }
    Some(numbers.chunks_exact(2).map(|pair| Segment { start: pair[0], length: pair[1] }).collect())
}

/// Checks that segments ascend inside a file of `size` bytes and hold `stored` bytes in all. The
/// error is the problem.
pub(super) fn check(map: &[Segment], size: u64, stored: u64) -> Result<(), String> {
    let mut end = 0;
    let mut total = 0u64;
    for (number, segment) in map.iter().enumerate() {
        let next = segment.start.checked_add(segment.length);
        match next {
            Some(next) if segment.start >= end && next <= size => end = next,
            _ => {
                return Err(format!(
                    "segment {number} of the sparse map ({} bytes at {}) is out of order or outside the file of {size} bytes",
                    segment.length, segment.start
                ));
            }
        }
        total += segment.length;
    }
    if total != stored {
        return Err(format!("the sparse map has {total} bytes of data, the archive {stored}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_must_ascend_inside_the_file() {
        let map = |numbers: &[u64]| pair(numbers).unwrap();
        assert_eq!(check(&map(&[0, 4, 8, 4, 100, 0]), 100, 8), Ok(()));
        for (numbers, size, stored) in [
            (&[4u64, 4, 0, 4][..], 100, 8),
            (&[0, 5, 4, 4], 100, 9),
            (&[96, 5], 100, 5),
            (&[u64::MAX, 2], u64::MAX, 2),
            (&[0, 4], 100, 5),
        ] {
            assert!(check(&map(numbers), size, stored).is_err(), "{numbers:?}");
        }
        assert_eq!(pair(&[1, 2, 3]), None);
    }
}
