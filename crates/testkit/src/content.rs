//! Content computed from seed and offset, so that any piece of a file can be compared without
//! keeping it.

use serde::{Deserialize, Serialize};

/// The increment of SplitMix64; each word of the content is its output for one state.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The first difference of some bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wrong {
    /// Bytes that differ.
    pub bytes: u64,
    /// Those of them that are 0, as holes read.
    pub zeros: u64,
}

/// Fills `bytes` with the content of `seed` from byte `offset` on. It does not compress.
pub fn fill(seed: u64, offset: u64, bytes: &mut [u8]) {
    let mut word = offset / 8;
    let mut skip = (offset % 8) as usize;
    let mut rest = bytes;
    while !rest.is_empty() {
        let (piece, later) = rest.split_at_mut(rest.len().min(8 - skip));
        piece.copy_from_slice(&at(seed, word)[skip..][..piece.len()]);
        (word, skip, rest) = (word + 1, 0, later);
    }
}

/// Compares `bytes` that were read at `offset` with the content of `seed`.
pub fn check(seed: u64, offset: u64, bytes: &[u8]) -> Wrong {
    let mut expected = vec![0; bytes.len()];
    fill(seed, offset, &mut expected);
    if expected == bytes {
        return Wrong::default();
    }
    let differing = bytes.iter().zip(&expected).filter(|(got, expected)| got != expected);
    differing.fold(Wrong::default(), |wrong, (got, _)| Wrong {
        bytes: wrong.bytes + 1,
        zeros: wrong.zeros + u64::from(*got == 0),
    })
}

/// Numbers that look random and are the same every time: the words of a content.
#[derive(Clone, Debug)]
pub struct Choices {
    seed: u64,
    drawn: u64,
}

impl Choices {
    /// Begins with the first word of the content of `seed`.
    pub fn new(seed: u64) -> Self {
        Choices { seed, drawn: 0 }
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.drawn += 1;
        u64::from_le_bytes(at(self.seed, self.drawn - 1))
    }

    /// A number from 0 to `limit` - 1; 0 if `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.any() % limit.max(1)
    }
}

/// Word `index` of the content of `seed`.
fn at(seed: u64, index: u64) -> [u8; 8] {
    let mut word = seed.wrapping_add(STEP.wrapping_mul(index.wrapping_add(1)));
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (word ^ (word >> 31)).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_is_a_piece_of_the_whole() {
        let mut whole = [0; 100];
        fill(7, 0, &mut whole);
        for start in 0..whole.len() {
            for end in start..whole.len() {
                assert_eq!(check(7, start as u64, &whole[start..end]), Wrong::default());
            }
        }
    }

    #[test]
    fn wrong_bytes_and_zeros_are_counted() {
        let mut bytes = [0; 64];
        fill(7, 5, &mut bytes);
        bytes[10] = !bytes[10];
        bytes[20..40].fill(0);
        let wrong = check(7, 5, &bytes);
        assert!((20..=21).contains(&wrong.bytes) && (19..=20).contains(&wrong.zeros), "{wrong:?}");
        assert!(check(8, 5, &bytes).bytes > 50);
    }
}
