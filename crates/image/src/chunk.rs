//! Chunks and the blobs that hold them.

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
    /// First stored byte.
    pub stored: Stored,
    /// Stored bytes; the same as `decoded_size` when the chunk is stored raw.
    pub stored_size: u32,
    /// First decoded byte, on a block border.
    pub decoded: Decoded,
    /// Decoded bytes, 1 to the image's chunk size.
    pub decoded_size: u32,
}

impl Chunk {
    /// Whether the stored bytes have to go through the blob's codec.
    pub const fn is_compressed(&self) -> bool {
        self.stored_size != self.decoded_size
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
    pub chunks: Vec<Chunk>,
}

impl Blob {
    /// The chunk with this number.
    pub fn chunk(&self, number: u32) -> Option<&Chunk> {
        let at = self.chunks.binary_search_by_key(&number, |chunk| chunk.number).ok()?;
        Some(&self.chunks[at])
    }
}
