//! Chunks and the blobs that hold them.

use std::{
    mem,
    ops::{Deref, DerefMut},
    slice,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::{Codec, Decoded, Digest, Points, Stored, codec::Unit};

/// Position of a blob in its image's blob table, from 0. EROFS calls the same blob device `index +
/// 1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BlobIndex(pub u8);

/// One chunk of a file: which blob, and which chunk in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ChunkRef {
    /// The blob.
    pub blob: BlobIndex,
    /// [`Chunk::number`] in that blob.
    pub number: u32,
}

/// A piece of file content inside a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Chunk number in the blob, `0..1 << 24`.
    pub number: u32,
    /// Digest of the decoded bytes.
    pub digest: Digest,
    /// First stored byte of the chunk's unit.
    pub stored: Stored,
    /// Stored bytes that have to be decoded to get the chunk: its whole unit, or, of a unit that
    /// begins at a [point](crate::points), as many as lead to the chunk's end.
    pub stored_size: u32,
    /// First decoded byte, on a block border.
    pub decoded: Decoded,
    /// Decoded bytes, 1 to the image's chunk size.
    pub decoded_size: u32,
    /// Its place in its unit, unless it is the whole unit.
    pub part: Option<Part>,
}

/// The place of a chunk in its unit.
///
/// A batch is a unit of small chunks that follow each other and were compressed as one. What a gzip
/// file decodes to from a point on is another: its chunks have the point in common, and each
/// reaches further than the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// First byte of the chunk in the decoded unit.
    pub offset: u32,
    /// Bytes to which the chunk's stored bytes decode.
    pub size: u32,
}

/// Maximum size of a decoded unit, in bytes; the format's limit for chunks, too.
pub const MAX_UNIT: u32 = 16 << 20;

impl Chunk {
    /// Bytes to which the stored ones decode.
    pub const fn unit_size(&self) -> u32 {
        match self.part {
            Some(part) => part.size,
            None => self.decoded_size,
        }
    }

    /// Returns whether the stored size differs from the decoded size, so that the bytes go through
    /// the blob's codec. Meaningless for units that begin at a point, see [`Blob::unit`].
    pub const fn is_compressed(&self) -> bool {
        self.stored_size != self.unit_size()
    }

    /// Its unit, compressed from its first byte on with `codec` unless it is stored raw.
    pub fn unit(&self, codec: Codec) -> Unit<'static> {
        let codec = if self.is_compressed() { codec } else { Codec::None };
        Unit::whole(codec, self.unit_size())
    }

    /// Returns whether the chunk lies inside its unit. Always true outside units.
    pub fn is_within_unit(&self) -> bool {
        self.part.is_none_or(|Part { offset, size }| {
            size <= MAX_UNIT && offset.checked_add(self.decoded_size).is_some_and(|end| end <= size)
        })
    }

    /// Returns whether both chunks are decoded from one unit. Decoding the one that reaches further
    /// yields the other too.
    pub fn shares_unit(&self, other: &Chunk) -> bool {
        self.part.is_some() && other.part.is_some() && self.stored == other.stored
    }

    /// Stored bytes that `next`, a later chunk, needs beyond those of this one.
    pub fn stored_beyond(&self, next: &Chunk) -> u64 {
        next.stored_end().0.saturating_sub(self.stored_end().max(next.stored).0)
    }

    /// The chunk's bytes in `unit`, to which the stored ones decode, if they have the right digest.
    pub fn verified<'a>(&self, unit: &'a [u8]) -> Result<&'a [u8], ChunkError> {
        let bytes = self.part_of(unit).ok_or(ChunkError::Short { size: unit.len() })?;
        let actual = self.digest.algorithm.digest(bytes);
        if actual != self.digest {
            return Err(ChunkError::Digest { actual, expected: self.digest });
        }
        Ok(bytes)
    }

    /// Slices the chunk's bytes out of `unit`, the decoded unit; `None` if it is too short.
    pub fn part_of<'a>(&self, unit: &'a [u8]) -> Option<&'a [u8]> {
        let start = self.part.map_or(0, |part| part.offset as usize);
        unit.get(start..)?.get(..self.decoded_size as usize)
    }

    /// The chunk's share of its unit's stored bytes, so that sums count shared units once.
    pub fn stored_share(&self) -> u64 {
        let stored = u64::from(self.stored_size);
        self.part.map_or(stored, |part| {
            (stored * u64::from(self.decoded_size)).div_ceil(u64::from(part.size).max(1))
        })
    }

    /// One past the last stored byte.
    pub const fn stored_end(&self) -> Stored {
        Stored(self.stored.0 + self.stored_size as u64)
    }

    /// One past the last decoded byte.
    pub const fn decoded_end(&self) -> Decoded {
        Decoded(self.decoded.0 + self.decoded_size as u64)
    }
}

/// Why decoded bytes are not the chunk that the image names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// The chunk ends behind its unit.
    #[error("its unit has {size} bytes")]
    Short {
        /// Bytes of the decoded unit.
        size: usize,
    },
    /// The bytes are others.
    #[error("digest is {actual}, expected {expected}")]
    Digest {
        /// Digest of the bytes.
        actual: Digest,
        /// The digest in the image.
        expected: Digest,
    },
}

/// One blob, as described by an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// SHA-256 of the blob as stored in the registry.
    pub id: Digest,
    /// How compressed chunks are compressed.
    pub codec: Codec,
    /// The points at which a decoder can begin; only with [`Codec::Gzip`], and only once they are
    /// known.
    pub points: Points,
    /// Bytes of the whole blob as stored, chunks and tables.
    pub stored_size: u64,
    /// Bytes of all chunks once decoded, each rounded up to a block.
    pub decoded_size: u64,
    /// Chunks in ascending order of number, and so of both offsets. Numbers may be missing in
    /// images that others made.
    pub chunks: ChunkList,
}

/// The chunks of a blob. Copies share them until one is changed: an image can have millions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkList(Arc<Vec<Chunk>>);

impl ChunkList {
    /// The chunks as a list of their own, which can grow.
    pub fn to_mut(&mut self) -> &mut Vec<Chunk> {
        Arc::make_mut(&mut self.0)
    }
}

impl From<Vec<Chunk>> for ChunkList {
    fn from(chunks: Vec<Chunk>) -> Self {
        ChunkList(Arc::new(chunks))
    }
}

impl FromIterator<Chunk> for ChunkList {
    fn from_iter<I: IntoIterator<Item = Chunk>>(chunks: I) -> Self {
        chunks.into_iter().collect::<Vec<_>>().into()
    }
}

impl Deref for ChunkList {
    type Target = [Chunk];

    fn deref(&self) -> &[Chunk] {
        &self.0
    }
}

impl DerefMut for ChunkList {
    fn deref_mut(&mut self) -> &mut [Chunk] {
        self.to_mut()
    }
}

impl<'a> IntoIterator for &'a ChunkList {
    type Item = &'a Chunk;
    type IntoIter = slice::Iter<'a, Chunk>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl Blob {
    /// Returns whether this is an unconverted layer whose chunks are all of it, byte for byte: one
    /// file, of an artifact. A tar has headers as well.
    pub fn is_one_file(&self) -> bool {
        let mut end = Stored(0);
        let follows = |chunk: &Chunk| {
            let before = mem::replace(&mut end, chunk.stored_end());
            chunk.stored == before && chunk.part.is_none() && !chunk.is_compressed()
        };
        self.codec == Codec::Gzip && self.chunks.iter().all(follows) && end.0 == self.stored_size
    }

    /// The chunk with this number.
    pub fn chunk(&self, number: u32) -> Option<&Chunk> {
        let at = self.chunks.binary_search_by_key(&number, |chunk| chunk.number).ok()?;
        Some(&self.chunks[at])
    }

    /// How the stored bytes of `chunk` are decoded.
    pub fn unit(&self, chunk: &Chunk) -> Unit<'_> {
        match (self.codec, chunk.part) {
            (Codec::Gzip, Some(part)) => Unit::at_point(self.points.at(chunk.stored), part.size),
            (Codec::ZstdLayer, Some(part)) => Unit::of_frames(part.size),
            _ => chunk.unit(self.codec),
        }
    }

    /// Returns whether `next` may follow `chunk`. Decoded chunks must not overlap. Stored units may
    /// overlap only in ordinary layers, and none ends before an earlier one.
    pub fn is_in_order(&self, chunk: &Chunk, next: &Chunk) -> bool {
        let end = |chunk: &Chunk| {
            chunk.part.map_or(0, |part| part.offset).saturating_add(chunk.decoded_size)
        };
        let in_unit = || end(chunk) <= next.part.map_or(0, |part| part.offset);
        let stored = match self.codec {
            Codec::Gzip | Codec::ZstdLayer if chunk.shares_unit(next) => {
                in_unit() && chunk.stored_size <= next.stored_size
            }
            Codec::Gzip | Codec::ZstdLayer => {
                chunk.stored <= next.stored && chunk.stored_end() <= next.stored_end()
            }
            _ if chunk.shares_unit(next) => {
                in_unit()
                    && (chunk.stored_size, chunk.unit_size())
                        == (next.stored_size, next.unit_size())
            }
            _ => chunk.stored_end() <= next.stored,
        };
        stored && chunk.number < next.number && chunk.decoded_end() <= next.decoded
    }
}
