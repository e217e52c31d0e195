//! Chunks grouped by the unit that they are decoded from.

use crate::Chunk;

/// Some chunks of one unit, each with what the caller knows about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitChunks<T> {
    chunks: Vec<T>,
    furthest: usize,
}

impl<T> UnitChunks<T> {
    /// The chunks in the caller's order; at least one.
    pub fn chunks(&self) -> &[T] {
        &self.chunks
    }

    /// The chunk that reaches furthest: decoding its stored bytes yields all the others as well.
    pub fn furthest(&self) -> &T {
        &self.chunks[self.furthest]
    }

    /// The chunks in the caller's order; at least one.
    pub fn into_chunks(self) -> Vec<T> {
        self.chunks
    }
}

/// Groups neighbours in a list of chunks of one blob that share a unit. `chunk` returns the chunk
/// of an item.
pub fn units<'c, T>(
    items: impl IntoIterator<Item = T>,
    chunk: impl Fn(&T) -> &'c Chunk,
) -> impl Iterator<Item = UnitChunks<T>> {
    let mut items = items.into_iter().peekable();
    std::iter::from_fn(move || {
        let mut unit = UnitChunks { chunks: vec![items.next()?], furthest: 0 };
        let mut furthest = chunk(&unit.chunks[0]);
        while let Some(item) = items.next_if(|item| chunk(item).shares_unit(furthest)) {
            let other = chunk(&item);
            if other.unit_size() > furthest.unit_size() {
                (furthest, unit.furthest) = (other, unit.chunks.len());
            }
            unit.chunks.push(item);
        }
        Some(unit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, Decoded, Stored, chunk::Part};

    /// A chunk whose stored bytes begin at `stored`; with `reach`, a part of a unit that decodes
    /// to that many bytes.
    fn chunk(number: u32, stored: u64, reach: Option<u32>) -> Chunk {
        Chunk {
            number,
            digest: Algorithm::Blake3.digest(&[]),
            stored: Stored(stored),
            stored_size: 1,
            decoded: Decoded(u64::from(number) * 4096),
            decoded_size: 1,
            part: reach.map(|size| Part { offset: 0, size }),
        }
    }

    /// The numbers of the chunks of each unit, and of the furthest.
    fn grouped(chunks: &[Chunk]) -> Vec<(Vec<u32>, u32)> {
        units(chunks, |chunk| *chunk)
            .map(|unit| {
                (unit.chunks().iter().map(|it| it.number).collect(), unit.furthest().number)
            })
            .collect()
    }

    #[test]
    fn neighbours_that_share_a_unit_are_grouped() {
        assert_eq!(grouped(&[]), []);
        // Whole units never share, even if their stored bytes do.
        assert_eq!(grouped(&[chunk(0, 0, None), chunk(1, 0, None)]), [(vec![0], 0), (vec![1], 1)]);
        let batches = [(0, 0, Some(9)), (1, 0, Some(9)), (2, 5, Some(7)), (3, 8, None)];
        let batches = batches.map(|(number, stored, reach)| chunk(number, stored, reach));
        assert_eq!(grouped(&batches), [(vec![0, 1], 0), (vec![2], 2), (vec![3], 3)]);
    }

    #[test]
    fn the_furthest_chunk_need_not_be_the_last() {
        let behind_a_point = [(0, 4), (1, 9), (2, 6)];
        let chunks = behind_a_point.map(|(number, reach)| chunk(number, 0, Some(reach)));
        assert_eq!(grouped(&chunks), [(vec![0, 1, 2], 1)]);
    }
}
