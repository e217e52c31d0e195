//! The chunk information ("CI") table at the tail of a blob, version 1: 16 bytes for each chunk.

use crate::{BLOCK_SIZE, Chunk, Decoded, Stored};

use super::layout::CI_ENTRY_SIZE;

/// Where a chunk lies, as a CI entry says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CiEntry {
    pub(super) stored: Stored,
    pub(super) stored_size: u32,
    pub(super) decoded: Decoded,
    pub(super) decoded_size: u32,
}

/// Sizes have 24 bits and are stored less 1: the low 20 at bit 44, the high 4 wherever there is room.
const SIZE_LOW_SHIFT: u32 = 44;
const SIZE_LOW_BITS: u32 = 20;
const DECODED_MASK: u64 = 0xfff_ffff_f000;
const DECODED_HIGH_SHIFT: u32 = 8;
const STORED_MASK: u64 = 0xff_ffff_ffff;
const STORED_HIGH_SHIFT: u32 = 40;

impl CiEntry {
    /// What the entry of `chunk` says.
    pub(super) const fn of(chunk: &Chunk) -> Self {
        CiEntry {
            stored: chunk.stored,
            stored_size: chunk.stored_size,
            decoded: chunk.decoded,
            decoded_size: chunk.decoded_size,
        }
    }

    /// `None` when a field does not fit.
    pub(super) fn encode(&self) -> Option<[u8; CI_ENTRY_SIZE as usize]> {
        let fits = self.decoded.0 & !DECODED_MASK == 0 && self.stored.0 & !STORED_MASK == 0;
        if !fits || !self.decoded.0.is_multiple_of(BLOCK_SIZE) {
            return None;
        }
        let a = encode_size(self.decoded_size, DECODED_HIGH_SHIFT)? | self.decoded.0;
        let b = encode_size(self.stored_size, STORED_HIGH_SHIFT)? | self.stored.0;
        let mut bytes = [0; CI_ENTRY_SIZE as usize];
        bytes[..8].copy_from_slice(&a.to_le_bytes());
        bytes[8..].copy_from_slice(&b.to_le_bytes());
        Some(bytes)
    }

    /// Any 16 bytes are an entry.
    pub(super) fn decode(bytes: &[u8; CI_ENTRY_SIZE as usize]) -> Self {
        let (a, b) = bytes.split_at(8);
        let word =
            |half: &[u8]| half.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        let (a, b) = (word(a), word(b));
        CiEntry {
            stored: Stored(b & STORED_MASK),
            stored_size: decode_size(b, STORED_HIGH_SHIFT),
            decoded: Decoded(a & DECODED_MASK),
            decoded_size: decode_size(a, DECODED_HIGH_SHIFT),
        }
    }
}

fn encode_size(size: u32, high_shift: u32) -> Option<u64> {
    let less_one = u64::from(size.checked_sub(1)?);
    let high = less_one >> SIZE_LOW_BITS;
    // The low bits shift their upper part out of the word; that part is `high`.
    (high < 16).then_some(less_one << SIZE_LOW_SHIFT | high << high_shift)
}

fn decode_size(word: u64, high_shift: u32) -> u32 {
    let high = (word >> high_shift) & 0xf;
    ((word >> SIZE_LOW_SHIFT) | high << SIZE_LOW_BITS) as u32 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_upstream() {
        let cases: [(u64, u32, u64, u32, [u64; 2]); 3] = [
            (10, 6, 4096, 6, [0x0000_5000_0000_1000, 0x0000_5000_0000_000a]),
            (16, 1 << 20, 8192, 1 << 20, [0xffff_f000_0000_2000, 0xffff_f000_0000_0010]),
            (5_242_896, 122, 5_251_072, 1 << 20, [0xffff_f000_0050_2000, 0x0007_9000_0050_0010]),
        ];
        for (stored, stored_size, decoded, decoded_size, words) in cases {
            let entry = CiEntry {
                stored: Stored(stored),
                stored_size,
                decoded: Decoded(decoded),
                decoded_size,
            };
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            assert_eq!(entry.encode().unwrap()[..], bytes);
            assert_eq!(CiEntry::decode(bytes.as_slice().try_into().unwrap()), entry);
        }
    }

    #[test]
    fn every_field_at_its_limits() {
        for size in [1, 2, 1 << 20, (1 << 20) + 1, 1 << 24] {
            for (stored, decoded) in [(0, 0), (STORED_MASK, DECODED_MASK)] {
                let entry = CiEntry {
                    stored: Stored(stored),
                    stored_size: size,
                    decoded: Decoded(decoded),
                    decoded_size: size,
                };
                assert_eq!(CiEntry::decode(&entry.encode().unwrap()), entry);
            }
        }
        let good =
            CiEntry { stored: Stored(0), stored_size: 1, decoded: Decoded(0), decoded_size: 1 };
        let bad = [
            CiEntry { stored_size: 0, ..good },
            CiEntry { decoded_size: (1 << 24) + 1, ..good },
            CiEntry { stored: Stored(1 << 40), ..good },
            CiEntry { decoded: Decoded(1 << 44), ..good },
            CiEntry { decoded: Decoded(1), ..good },
        ];
        for entry in bad {
            assert_eq!(entry.encode(), None, "{entry:?}");
        }
    }
}
