//! The chunk information ("CI") table at the tail of a blob: 16 bytes for each chunk in version 1;
//! in version 2 24 bytes, and behind them 40 bytes for each unit of several chunks: a batch, or a
//! piece of a gzip file, which upstream calls context ("zran"). The windows of contexts come last.

use zerocopy::FromBytes;

use super::{
    TailInfo,
    layout::{
        CI_ENTRY_SIZE, CI_UNIT_SIZE, CI_V2_ENTRY_SIZE, Context, MAX_CHUNKS, MAX_CI_V2,
        features::{BATCH, CHUNK_INFO_V2, ZRAN},
    },
};
use crate::{
    BLOCK_SIZE, Chunk, Decoded, Points, Stored,
    chunk::{MAX_UNIT, Part},
    points::{MAX_WINDOW, NewPoint},
};

/// Bits of the first word of an entry of version 2.
mod flags {
    pub(super) const COMPRESSED: u8 = 0x1;
    pub(super) const ZRAN: u8 = 0x2;
    pub(super) const BATCH: u8 = 0x4;
    pub(super) const ENCRYPTED: u8 = 0x8;
    /// A CRC-32C in place of a batch; no digest, and not read.
    const HAS_CRC32C: u8 = 0x10;
    pub(super) const KNOWN: u8 = COMPRESSED | ZRAN | BATCH | ENCRYPTED | HAS_CRC32C;
}

/// Returns whether a decoded CI table may have this size, for a blob with these features and this
/// number of chunks. In version 2, each unit has at least one chunk.
pub(super) fn size_fits(blob_features: u32, chunks: u32, size: u64) -> bool {
    let chunks = u64::from(chunks);
    if blob_features & CHUNK_INFO_V2 == 0 {
        return blob_features & (BATCH | ZRAN) == 0 && size == CI_ENTRY_SIZE * chunks;
    }
    let Some(units) = size.checked_sub(CI_V2_ENTRY_SIZE * chunks) else { return false };
    let units_fit = match blob_features & (BATCH | ZRAN) {
        0 => units == 0,
        BATCH => units % CI_UNIT_SIZE == 0 && units / CI_UNIT_SIZE <= chunks,
        // Windows follow, of any size.
        ZRAN => units >= CI_UNIT_SIZE,
        _ => false,
    };
    size <= MAX_CI_V2 && units_fit
}

/// A decoded CI table.
pub(super) struct CiTable<'a> {
    entries: &'a [u8],
    units: Units<'a>,
    is_v2: bool,
}

/// The units of a table.
enum Units<'a> {
    /// Stored and decoded size, and padding.
    Batches(&'a [u8]),
    Contexts {
        contexts: &'a [Context],
        windows: &'a [u8],
    },
}

impl<'a> CiTable<'a> {
    /// Returns `None` if the length of `bytes` differs from the one in `tail`, or is impossible.
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
        let (entries, units) = bytes.split_at((entry * u64::from(tail.chunk_count)) as usize);
        let units = if tail.has_contexts() {
            let count = count_of_contexts(entries);
            let (contexts, windows) = units.split_at_checked(count * CI_UNIT_SIZE as usize)?;
            Units::Contexts { contexts: <[Context]>::ref_from_bytes(contexts).ok()?, windows }
        } else {
            Units::Batches(units)
        };
        Some(CiTable { entries, units, is_v2 })
    }

    /// The number of units that it describes.
    pub(super) fn unit_count(&self) -> u64 {
        match self.units {
            Units::Batches(batches) => batches.len() as u64 / CI_UNIT_SIZE,
            Units::Contexts { contexts, .. } => contexts.len() as u64,
        }
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

    /// Returns the place of a chunk of an unconverted layer: its own stored bytes, and the first of
    /// its decoded ones in the unpacked layer.
    pub(super) fn own_place(&self, number: u32) -> Result<(CiEntry, u64), String> {
        let at = number as usize * CI_V2_ENTRY_SIZE as usize;
        let entry = self.entries.get(at..).and_then(<[u8]>::first_chunk).filter(|_| self.is_v2);
        let entry = entry.ok_or_else(|| format!("no entry {number}"))?;
        let checked = self.decode_v2(entry)?;
        let [_, b, data] = words(entry);
        let stored = Stored(b & STORED_MASK);
        let own = CiEntry { stored, stored_size: (b >> 40) as u32, part: None, ..checked };
        let start = match &self.units {
            Units::Contexts { contexts, .. } => {
                let context = contexts.get((data >> 32) as usize);
                context.and_then(|it| it.decoded.get().checked_add(data & 0xffff_ffff))
            }
            Units::Batches(_) => Some(stored.0),
        };
        let is_of_layer = checked.part.is_some() == matches!(self.units, Units::Contexts { .. });
        let start = start.filter(|_| is_of_layer);
        Ok((own, start.ok_or_else(|| format!("entry {number} is in no layer"))?))
    }

    fn decode_v2(&self, entry: &[u8; CI_V2_ENTRY_SIZE as usize]) -> Result<CiEntry, String> {
        let [a, b, data] = words(entry);
        let bits = (a >> 56) as u8;
        for (bit, what) in [(flags::ENCRYPTED, "encryption"), (!flags::KNOWN, "an unknown flag")] {
            if bits & bit != 0 {
                return Err(format!("flags {bits:#x}: {what} is not supported"));
            }
        }
        let mut found = CiEntry {
            stored: Stored(b & STORED_MASK),
            stored_size: (b >> 40) as u32,
            decoded: Decoded((a & 0xffff_ffff) * BLOCK_SIZE),
            decoded_size: (a >> 32 & 0xff_ffff) as u32 + 1,
            part: None,
        };
        let (number, offset) = ((data >> 32) as usize, data as u32);
        match (bits & (flags::BATCH | flags::ZRAN), &self.units) {
            (0, _) => {
                if (bits & flags::COMPRESSED != 0) != (found.stored_size != found.decoded_size) {
                    return Err(format!("flags {bits:#x} do not agree with {found:?}"));
                }
            }
            (flags::BATCH, Units::Batches(batches)) => {
                let at = number.saturating_mul(CI_UNIT_SIZE as usize);
                let batch = batches.get(at..).and_then(<[u8]>::first_chunk::<8>);
                let [a, b, c, d, e, f, g, h] =
                    *batch.ok_or_else(|| format!("batch {number} does not exist"))?;
                found.stored_size = u32::from_le_bytes([a, b, c, d]);
                found.part = Some(Part { offset, size: u32::from_le_bytes([e, f, g, h]) });
            }
            (flags::ZRAN, Units::Contexts { contexts, .. }) => {
                let context = contexts.get(number);
                let context = context.ok_or_else(|| format!("context {number} does not exist"))?;
                found.place_in(context, offset)?;
            }
            _ => return Err(format!("flags {bits:#x}: the blob has no such units")),
        }
        Ok(found)
    }

    /// The points at which its contexts begin.
    pub(super) fn points(&self) -> Result<Points, String> {
        let Units::Contexts { contexts, windows } = self.units else {
            return Ok(Points::default());
        };
        let point = |(number, context): (usize, &Context)| {
            let (at, size) = (context.window.get(), context.window_size.get() as usize);
            let window = usize::try_from(at).ok().and_then(|at| windows.get(at..)?.get(..size));
            let fits = size <= MAX_WINDOW && context.bits < 8;
            let window = window.filter(|_| fits);
            let window = window.ok_or_else(|| format!("context {number}: {context:?}"))?;
            Ok(NewPoint {
                stored: Stored(context.stored.get()),
                bits: context.bits,
                before: if context.bits == 0 { 0 } else { context.before },
                window: window.to_vec(),
            })
        };
        let points = contexts.iter().enumerate().map(point).collect::<Result<Vec<_>, String>>()?;
        let mut sorted: Vec<_> = points.iter().collect();
        sorted.sort_by_key(|point| point.stored);
        let differ = |pair: &&[&NewPoint]| pair[0].stored == pair[1].stored && pair[0] != pair[1];
        if let Some([point, _]) = sorted.windows(2).find(differ) {
            return Err(format!("two different contexts begin at {}", point.stored));
        }
        Ok(points.into_iter().collect())
    }
}

/// Counts contexts by their chunks: entries don't state the number, but each context has a chunk.
fn count_of_contexts(entries: &[u8]) -> usize {
    let (entries, _) = entries.as_chunks::<{ CI_V2_ENTRY_SIZE as usize }>();
    let number = |entry| (words(entry)[2] >> 32) as usize;
    entries.iter().map(|entry| number(entry) + 1).max().unwrap_or(0)
}

fn words(entry: &[u8; CI_V2_ENTRY_SIZE as usize]) -> [u64; 3] {
    [0, 8, 16].map(|at| {
        let bytes = entry[at..at + 8].iter().rev();
        bytes.fold(0, |word, byte| word << 8 | u64::from(*byte))
    })
}

/// The table of `chunks`, in version 2 if there are batches. `Err` has the chunk that does not fit.
pub(super) fn table(chunks: &[Chunk]) -> Result<Vec<u8>, &Chunk> {
    if chunks.iter().all(|chunk| chunk.part.is_none()) {
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
        if let Some(part) = chunk.part
            && previous.is_none_or(|previous| !previous.shares_unit(chunk))
        {
            count += 1;
            batches.extend_from_slice(&chunk.stored_size.to_le_bytes());
            batches.extend_from_slice(&part.size.to_le_bytes());
            batches.resize((count * CI_UNIT_SIZE) as usize, 0);
        }
        let words = CiEntry::of(chunk).encode_v2(count.saturating_sub(1)).ok_or(chunk)?;
        words.iter().for_each(|word| table.extend_from_slice(&word.to_le_bytes()));
        previous = Some(chunk);
    }
    table.append(&mut batches);
    Ok(table)
}

/// The place of a chunk in a piece of a gzip layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlaceInPiece {
    pub(super) unit: u32,
    pub(super) offset: u32,
}

/// The entry of a chunk of an unconverted layer, either in a piece or stored raw. `None` when a
/// field does not fit.
pub(super) fn layer_entry(chunk: &Chunk, place: Option<PlaceInPiece>) -> Option<[u64; 3]> {
    let entry = CiEntry::of(chunk);
    match place {
        Some(PlaceInPiece { unit, offset }) => {
            let bits = flags::ZRAN | flags::COMPRESSED;
            entry.words(bits, u64::from(unit) << 32 | u64::from(offset))
        }
        None => entry.encode_v2(0),
    }
}

/// A chunk's place, as encoded in a CI entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CiEntry {
    pub(super) stored: Stored,
    pub(super) stored_size: u32,
    pub(super) decoded: Decoded,
    pub(super) decoded_size: u32,
    /// Only in version 2.
    pub(super) part: Option<Part>,
}

/// Sizes have 24 bits and are stored less 1: the low 20 at bit 44, the high 4 wherever there is
/// room.
const SIZE_LOW_SHIFT: u32 = 44;
const SIZE_LOW_BITS: u32 = 20;
const DECODED_MASK: u64 = 0xfff_ffff_f000;
const DECODED_HIGH_SHIFT: u32 = 8;
const STORED_MASK: u64 = 0xff_ffff_ffff;
const STORED_HIGH_SHIFT: u32 = 40;

impl CiEntry {
    /// The entry of `chunk`.
    pub(super) const fn of(chunk: &Chunk) -> Self {
        CiEntry {
            stored: chunk.stored,
            stored_size: chunk.stored_size,
            decoded: chunk.decoded,
            decoded_size: chunk.decoded_size,
            part: chunk.part,
        }
    }

    /// Turns the place in the stream, where the chunk's own bytes are, into one in the unit with
    /// the number of `context`: from where that begins to where the chunk ends.
    fn place_in(&mut self, context: &Context, offset: u32) -> Result<(), String> {
        let size = offset.checked_add(self.decoded_size);
        let size = size.filter(|size| *size <= context.decoded_size.get().min(MAX_UNIT));
        let size = size.ok_or_else(|| format!("{self:?} is not within {context:?}"))?;
        let (start, whole) = (context.stored.get(), u64::from(context.stored_size.get()));
        let end = self.stored.0 + u64::from(self.stored_size);
        // A chunk decoded entirely from earlier input has no stored bytes of its own.
        let reach = end.checked_sub(start).filter(|reach| (1..=whole).contains(reach));
        self.stored = Stored(start);
        self.stored_size = reach.unwrap_or(whole) as u32;
        self.part = Some(Part { offset, size });
        Ok(())
    }

    /// The words of version 2 with these flags and this third word. `None` when a field does not
    /// fit.
    fn words(&self, bits: u8, data: u64) -> Option<[u64; 3]> {
        let block = self.decoded.0 / BLOCK_SIZE;
        let size = u64::from(self.decoded_size).checked_sub(1)?;
        let fits = self.decoded.0.is_multiple_of(BLOCK_SIZE)
            && block <= u32::MAX.into()
            && size < 1 << 24
            && self.stored.0 & !STORED_MASK == 0
            && self.stored_size < 1 << 24;
        let words = [
            u64::from(bits) << 56 | size << 32 | block,
            u64::from(self.stored_size) << 40 | self.stored.0,
            data,
        ];
        fits.then_some(words)
    }

    /// The words of version 2; `number` is that of the batch, if there is one. `None` when a field
    /// does not fit.
    fn encode_v2(&self, number: u64) -> Option<[u64; 3]> {
        match self.part {
            Some(part) => {
                let bits = flags::BATCH | flags::COMPRESSED;
                let data = number << 32 | u64::from(part.offset);
                CiEntry { stored_size: 0, ..*self }.words(bits, data)
            }
            None if self.stored_size == self.decoded_size => self.words(0, 0),
            None => self.words(flags::COMPRESSED, 0),
        }
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
            part: None,
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
    fn entries_are_encoded_as_upstream_encodes_them() {
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
                part: None,
            };
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            assert_eq!(entry.encode().unwrap()[..], bytes);
            assert_eq!(CiEntry::decode(bytes.as_slice().try_into().unwrap()), entry);
        }
    }

    #[test]
    fn every_field_survives_at_its_limits() {
        for size in [1, 2, 1 << 20, (1 << 20) + 1, 1 << 24] {
            for (stored, decoded) in [(0, 0), (STORED_MASK, DECODED_MASK)] {
                let entry = CiEntry {
                    stored: Stored(stored),
                    stored_size: size,
                    decoded: Decoded(decoded),
                    decoded_size: size,
                    part: None,
                };
                assert_eq!(CiEntry::decode(&entry.encode().unwrap()), entry);
            }
        }
        let good = CiEntry {
            stored: Stored(0),
            stored_size: 1,
            decoded: Decoded(0),
            decoded_size: 1,
            part: None,
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
