//! The chunk information ("CI") table at the tail of a blob: 16 bytes for each chunk in version 1; in version 2
//! 24 bytes, and behind them 40 bytes for each batch.

use crate::{BLOCK_SIZE, Chunk, Decoded, Stored, chunk::Batch};

use super::{
    TailInfo,
    layout::{
        CI_BATCH_SIZE, CI_ENTRY_SIZE, CI_V2_ENTRY_SIZE, MAX_CHUNKS, MAX_CI_V2,
        features::{BATCH, CHUNK_INFO_V2},
    },
};

/// Bits of the first word of an entry of version 2.
mod flags {
    pub(super) const COMPRESSED: u8 = 0x1;
    pub(super) const ZRAN: u8 = 0x2;
    pub(super) const BATCH: u8 = 0x4;
    pub(super) const ENCRYPTED: u8 = 0x8;
    /// A CRC-32C in place of a batch; no digest, and not looked at.
    const HAS_CRC32C: u8 = 0x10;
    pub(super) const KNOWN: u8 = COMPRESSED | ZRAN | BATCH | ENCRYPTED | HAS_CRC32C;
}

/// Whether a decoded CI table of a blob with these features and so many chunks may have this size: in version 2 each
/// batch has at least one chunk.
pub(super) fn size_fits(blob_features: u32, chunks: u32, size: u64) -> bool {
    let chunks = u64::from(chunks);
    if blob_features & CHUNK_INFO_V2 == 0 {
        return blob_features & BATCH == 0 && size == CI_ENTRY_SIZE * chunks;
    }
    let batches = size.checked_sub(CI_V2_ENTRY_SIZE * chunks);
    let most = if blob_features & BATCH == 0 { 0 } else { chunks };
    size <= MAX_CI_V2
        && batches.is_some_and(|rest| rest % CI_BATCH_SIZE == 0 && rest / CI_BATCH_SIZE <= most)
}

/// A decoded CI table.
pub(super) struct CiTable<'a> {
    entries: &'a [u8],
    batches: &'a [u8],
    is_v2: bool,
}

impl<'a> CiTable<'a> {
    /// `None` if `bytes` are not as many as `tail` says, or cannot be that many.
    pub(super) fn new(bytes: &'a [u8], tail: &TailInfo) -> Option<Self> {
        let size = bytes.len() as u64;
        if tail.chunk_count > MAX_CHUNKS
            || size != tail.ci_size
            || !size_fits(tail.features, tail.chunk_count, size)
        {
            return None;
        }
        let is_v2 = tail.features & CHUNK_INFO_V2 != 0;
        let entry = if is_v2 { CI_V2_ENTRY_SIZE } else { CI_ENTRY_SIZE };
        let (entries, batches) = bytes.split_at((entry * u64::from(tail.chunk_count)) as usize);
        Some(CiTable { entries, batches, is_v2 })
    }

    /// The entry of the chunk with this number.
    pub(super) fn get(&self, number: u32) -> Result<CiEntry, String> {
        let missing = || format!("no entry {number}");
        if !self.is_v2 {
            let at = number as usize * CI_ENTRY_SIZE as usize;
            let entry = self.entries.get(at..).and_then(<[u8]>::first_chunk);
            return entry.map(CiEntry::decode).ok_or_else(missing);
        }
        let at = number as usize * CI_V2_ENTRY_SIZE as usize;
        let entry = self.entries.get(at..).and_then(<[u8]>::first_chunk).ok_or_else(missing)?;
        self.decode_v2(entry).map_err(|problem| format!("entry {number}: {problem}"))
    }

    fn decode_v2(&self, entry: &[u8; CI_V2_ENTRY_SIZE as usize]) -> Result<CiEntry, String> {
        let word = |at: usize| {
            let bytes = entry[at..at + 8].iter().rev();
            bytes.fold(0, |word, byte| word << 8 | u64::from(*byte))
        };
        let (a, b, data) = (word(0), word(8), word(16));
        let bits = (a >> 56) as u8;
        for (bit, what) in [
            (flags::ZRAN, "a part of a gzip layer (zran)"),
            (flags::ENCRYPTED, "encryption"),
            (!flags::KNOWN, "an unknown flag"),
        ] {
            if bits & bit != 0 {
                return Err(format!("flags {bits:#x}: {what} is not supported"));
            }
        }
        let mut found = CiEntry {
            stored: Stored(b & STORED_MASK),
            stored_size: (b >> 40) as u32,
            decoded: Decoded((a & 0xffff_ffff) * BLOCK_SIZE),
            decoded_size: (a >> 32 & 0xff_ffff) as u32 + 1,
            batch: None,
        };
        if bits & flags::BATCH != 0 {
            let (number, offset) = (data >> 32, data as u32);
            let at = (number * CI_BATCH_SIZE) as usize;
            let batch = self.batches.get(at..).and_then(<[u8]>::first_chunk::<8>);
            let [a, b, c, d, e, f, g, h] =
                *batch.ok_or_else(|| format!("batch {number} does not exist"))?;
            found.stored_size = u32::from_le_bytes([a, b, c, d]);
            found.batch = Some(Batch { offset, size: u32::from_le_bytes([e, f, g, h]) });
        } else if (bits & flags::COMPRESSED != 0) != (found.stored_size != found.decoded_size) {
            return Err(format!("flags {bits:#x} do not agree with {found:?}"));
        }
        Ok(found)
    }
}

/// The table of `chunks`, in version 2 if there are batches. `Err` has the chunk that does not fit.
pub(super) fn table(chunks: &[Chunk]) -> Result<Vec<u8>, &Chunk> {
    if chunks.iter().all(|chunk| chunk.batch.is_none()) {
        let mut table = Vec::with_capacity(chunks.len() * CI_ENTRY_SIZE as usize);
        for chunk in chunks {
            table.extend_from_slice(&CiEntry::of(chunk).encode().ok_or(chunk)?);
        }
        return Ok(table);
    }
    let mut table = Vec::with_capacity(chunks.len() * CI_V2_ENTRY_SIZE as usize);
    let (mut batches, mut count) = (Vec::new(), 0_u64);
    let mut previous: Option<&Chunk> = None;
    for chunk in chunks {
        if let Some(batch) = chunk.batch
            && previous.is_none_or(|previous| !previous.shares_unit(chunk))
        {
            count += 1;
            batches.extend_from_slice(&chunk.stored_size.to_le_bytes());
            batches.extend_from_slice(&batch.size.to_le_bytes());
            batches.resize((count * CI_BATCH_SIZE) as usize, 0);
        }
        let words = CiEntry::of(chunk).encode_v2(count.saturating_sub(1)).ok_or(chunk)?;
        words.iter().for_each(|word| table.extend_from_slice(&word.to_le_bytes()));
        previous = Some(chunk);
    }
    table.append(&mut batches);
    Ok(table)
}

/// Where a chunk lies, as a CI entry says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CiEntry {
    pub(super) stored: Stored,
    pub(super) stored_size: u32,
    pub(super) decoded: Decoded,
    pub(super) decoded_size: u32,
    /// Only in version 2.
    pub(super) batch: Option<Batch>,
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
            batch: chunk.batch,
        }
    }

    /// The words of version 2; `number` is that of the batch, if there is one. `None` when a field does not fit.
    fn encode_v2(&self, number: u64) -> Option<[u64; 3]> {
        let block = self.decoded.0 / BLOCK_SIZE;
        let size = u64::from(self.decoded_size).checked_sub(1)?;
        let fits = self.decoded.0.is_multiple_of(BLOCK_SIZE)
            && block <= u32::MAX.into()
            && size < 1 << 24
            && self.stored.0 & !STORED_MASK == 0
            && self.stored_size < 1 << 24;
        let (bits, stored_size, data) = match self.batch {
            Some(batch) => {
                (flags::BATCH | flags::COMPRESSED, 0, number << 32 | u64::from(batch.offset))
            }
            None if self.stored_size == self.decoded_size => (0, self.stored_size, 0),
            None => (flags::COMPRESSED, self.stored_size, 0),
        };
        let words = [
            u64::from(bits) << 56 | size << 32 | block,
            u64::from(stored_size) << 40 | self.stored.0,
            data,
        ];
        fits.then_some(words)
    }

    /// The bytes of version 1. `None` when a field does not fit.
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

    /// Any 16 bytes are an entry of version 1.
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
            batch: None,
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
                batch: None,
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
                    batch: None,
                };
                assert_eq!(CiEntry::decode(&entry.encode().unwrap()), entry);
            }
        }
        let good = CiEntry {
            stored: Stored(0),
            stored_size: 1,
            decoded: Decoded(0),
            decoded_size: 1,
            batch: None,
        };
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
