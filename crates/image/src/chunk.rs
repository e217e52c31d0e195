//! Chunks and the blobs that hold them.

use std::{
    ops::{Deref, DerefMut},
    slice,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::{Codec, Decoded, Digest, Stored};

/// Position of a blob in its image's blob table, from 0. EROFS calls the same blob device `index + 1`.
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
    /// First stored byte: of the chunk, or of the whole batch.
    pub stored: Stored,
    /// Stored bytes: of the chunk, or of the whole batch. The same as [`Chunk::unit_size`] when they are stored raw.
    pub stored_size: u32,
    /// First decoded byte, on a block border.
    pub decoded: Decoded,
    /// Decoded bytes, 1 to the image's chunk size.
    pub decoded_size: u32,
    /// Where in a batch it lies, if it was compressed together with others.
    pub batch: Option<Batch>,
}

/// Part of a batch: small chunks that follow each other in a blob and were compressed as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// First byte of the chunk in the decoded batch, in which chunks lie back to back.
    pub offset: u32,
    /// Bytes of the decoded batch.
    pub size: u32,
}

/// Most bytes of a decoded batch; the format's limit for chunks, too.
pub const MAX_BATCH: u32 = 16 << 20;

impl Chunk {
    /// Bytes to which the stored ones decode.
    pub const fn unit_size(&self) -> u32 {
        match self.batch {
            Some(batch) => batch.size,
            None => self.decoded_size,
        }
    }

    /// Whether the stored bytes have to go through the blob's codec.
    pub const fn is_compressed(&self) -> bool {
        self.stored_size != self.unit_size()
    }

    /// Whether the chunk can lie where it says in its batch, if it is in one.
    pub fn is_within_batch(&self) -> bool {
        self.batch.is_none_or(|Batch { offset, size }| {
            size <= MAX_BATCH
                && offset.checked_add(self.decoded_size).is_some_and(|end| end <= size)
        })
    }

    /// Whether the two chunks were compressed together. What is stored of one is stored of the other.
    pub fn shares_unit(&self, other: &Chunk) -> bool {
        let size = |chunk: &Chunk| chunk.batch.map(|batch| batch.size);
        self.batch.is_some()
            && (self.stored, self.stored_size, size(self))
                == (other.stored, other.stored_size, size(other))
    }

    /// Whether `next` may come behind this chunk: neither overlaps the other, as stored, in their batch or decoded.
    pub fn may_precede(&self, next: &Chunk) -> bool {
        let end = |chunk: &Chunk| {
            chunk.batch.map_or(0, |batch| batch.offset).saturating_add(chunk.decoded_size)
        };
        let stored = match next.batch {
            Some(batch) if self.shares_unit(next) => end(self) <= batch.offset,
            _ => self.stored_end() <= next.stored,
        };
        stored && self.number < next.number && self.decoded_end() <= next.decoded
    }

    /// The chunk's bytes in `unit`, to which the stored ones decode; `None` if that is too short.
    pub fn part_of<'a>(&self, unit: &'a [u8]) -> Option<&'a [u8]> {
        let start = self.batch.map_or(0, |batch| batch.offset as usize);
        unit.get(start..)?.get(..self.decoded_size as usize)
    }

    /// Stored bytes that are there for this chunk: of a batch its share. For sums over many chunks.
    pub fn stored_share(&self) -> u64 {
        let stored = u64::from(self.stored_size);
        self.batch.map_or(stored, |batch| {
            (stored * u64::from(self.decoded_size)).div_ceil(u64::from(batch.size).max(1))
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

/// What an image says about one of its blobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// SHA-256 of the blob as stored in the registry.
    pub id: Digest,
    /// How compressed chunks are compressed.
    pub codec: Codec,
    /// Bytes of the whole blob as stored, chunks and tables.
    pub stored_size: u64,
    /// Bytes of all chunks once decoded, each rounded up to a block.
    pub decoded_size: u64,
    /// Chunks in ascending order of number, and so of both offsets. Numbers may be missing in images
    /// that others made.
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
    /// The chunk with this number.
    pub fn chunk(&self, number: u32) -> Option<&Chunk> {
        let at = self.chunks.binary_search_by_key(&number, |chunk| chunk.number).ok()?;
        Some(&self.chunks[at])
    }
}
