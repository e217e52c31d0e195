//! The structures that RAFS v6 adds to EROFS, as they lie on disk. Layout only.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use crate::chunk::Part;

/// The source of a bootstrap. Its label names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// This very format.
    V6,
    /// RAFS v5, [translated](super::v5).
    V5,
    /// Tables of contents of [seekable layers](crate::seekable). Only these bootstraps have chunks
    /// that are larger than the chunk size, and blobs with different codecs and digests.
    Seekable,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Origin::V6 => "RAFS v6",
            Origin::V5 => "RAFS v5",
            Origin::Seekable => "seekable layers",
        })
    }
}

impl Origin {
    /// The label of such a bootstrap.
    pub(super) const fn label(self) -> [u8; 16] {
        match self {
            Origin::V6 => [0; 16],
            Origin::V5 => *b"RAFS v5\0\0\0\0\0\0\0\0\0",
            Origin::Seekable => *b"seekable layers\0",
        }
    }

    /// Parses a bootstrap's label. Other writers may put anything there.
    pub(super) fn of_label(label: &[u8; 16]) -> Self {
        let known = [Origin::V5, Origin::Seekable];
        known.into_iter().find(|origin| origin.label() == *label).unwrap_or(Origin::V6)
    }
}

/// Offset of the extended superblock, in bytes: right after the EROFS superblock.
pub const EXTENDED_OFFSET: u64 = 1152;
/// Offset of the device table, in bytes.
pub const DEVICE_TABLE_OFFSET: u64 = 1408;
/// Smallest and largest chunk size of an image, in bytes. A CI entry has 24 bits for a size.
pub const CHUNK_SIZES: std::ops::RangeInclusive<u32> = 0x1000..=0x100_0000;
/// Maximum number of chunks in a blob: a chunk index has 24 bits for the number, and the last value
/// stays unused.
pub const MAX_CHUNKS: u32 = 0xff_ffff;
/// Maximum number of chunks over all blobs of an image. A limit of readers' memory, not of the
/// format.
pub const MAX_ROWS: u64 = 4 << 20;
/// Alignment of blobs in the single-device view, in bytes.
pub const MAPPED_ALIGN: u64 = 0x8_0000;
/// Blob ids of a bootstrap that is embedded in the blob that it describes.
pub const EMBEDDED_ID: [u8; 64] = [b'x'; 64];

/// Bits of [`ExtendedSuperBlock::flags`].
pub mod flags {
    /// Chunks are stored raw.
    pub const COMPRESSOR_NONE: u64 = 0x1;
    /// Chunks are LZ4 blocks.
    pub const COMPRESSOR_LZ4: u64 = 0x2;
    /// Chunk digests are BLAKE3.
    pub const DIGEST_BLAKE3: u64 = 0x4;
    /// Chunk digests are SHA-256.
    pub const DIGEST_SHA256: u64 = 0x8;
    /// Owners are those of the source.
    pub const EXPLICIT_UID_GID: u64 = 0x10;
    /// Some inode has extended attributes.
    pub const HAS_XATTR: u64 = 0x20;
    /// Blobs are unconverted layers: gzip, or plain tar.
    pub const COMPRESSOR_GZIP: u64 = 0x40;
    /// Chunks are zstd frames.
    pub const COMPRESSOR_ZSTD: u64 = 0x80;
    /// Every blob has a digest array.
    pub const INLINED_CHUNK_DIGEST: u64 = 0x100;
    /// The "blobs" are plain tar files, and blocks have 512 bytes.
    pub const TARFS: u64 = 0x200;
    /// Nothing is encrypted.
    pub const ENCRYPTION_NONE: u64 = 0x100_0000;
    /// Chunks are encrypted with AES-128-XTS.
    pub const ENCRYPTION_AES: u64 = 0x200_0000;
    /// Every bit with a meaning, and the six that old readers must ignore (26 to 31).
    pub const KNOWN: u64 = 0x3ff | ENCRYPTION_NONE | ENCRYPTION_AES | 0xfc00_0000;
}

/// Bits of [`BlobEntry::features`].
pub mod features {
    /// Decoded chunks start on block borders.
    pub const ALIGNED: u32 = 0x1;
    /// The blob contains its bootstrap.
    pub const INLINED_FS_META: u32 = 0x2;
    /// CI entries have 24 bytes.
    pub const CHUNK_INFO_V2: u32 = 0x4;
    /// The blob is an unconverted gzip layer.
    pub const ZRAN: u32 = 0x8;
    /// Chunks and CI are in different blobs.
    pub const SEPARATE: u32 = 0x10;
    /// There is a digest array.
    pub const INLINED_CHUNK_DIGEST: u32 = 0x20;
    /// The blob is a plain tar.
    pub const TARFS: u32 = 0x40;
    /// Small chunks are compressed together.
    pub const BATCH: u32 = 0x80;
    /// Chunks are encrypted.
    pub const ENCRYPTED: u32 = 0x100;
    /// The bootstrap is a chunk dictionary.
    pub const CHUNKDICT_GENERATED: u32 = 0x200;
    /// Prefetched chunks are in a blob of their own.
    pub const SEPARATED_PREFETCH: u32 = 0x400;
    /// The content is not in a blob of the image.
    pub const EXTERNAL: u32 = 0x800;
    /// Sections are followed by tar headers.
    pub const HAS_TAR_HEADER: u32 = 0x1000_0000;
    /// There is a table of contents.
    pub const HAS_TOC: u32 = 0x2000_0000;
    /// The writer supports tar headers and tables of contents (2.2 and later).
    pub const CAP_TAR_TOC: u32 = 0x4000_0000;
    /// The features of every blob that this crate writes.
    pub const WRITTEN: u32 =
        ALIGNED | INLINED_CHUNK_DIGEST | HAS_TAR_HEADER | HAS_TOC | CAP_TAR_TOC;
    /// Further features of a written blob with batches.
    pub const WRITTEN_BATCHED: u32 = CHUNK_INFO_V2 | BATCH;
}

/// The RAFS extended superblock.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExtendedSuperBlock {
    /// See [`flags`].
    pub flags: U64,
    /// First byte of the blob table, on a block border.
    pub blob_table_offset: U64,
    /// Bytes of the blob table.
    pub blob_table_size: U32,
    /// Bytes per chunk.
    pub chunk_size: U32,
    /// First byte of the chunk table, on a block border.
    pub chunk_table_offset: U64,
    /// Bytes of the chunk table.
    pub chunk_table_size: U64,
    /// First byte of the prefetch table; 0 without one.
    pub prefetch_table_offset: U64,
    /// Bytes of the prefetch table.
    pub prefetch_table_size: U32,
    /// Zero.
    pub reserved: [u8; 204],
}

/// A row of the blob table.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct BlobEntry {
    /// Hex digits.
    pub id: [u8; 64],
    /// Position in the table.
    pub index: U32,
    /// As in the extended superblock.
    pub chunk_size: U32,
    /// Chunks in the blob.
    pub chunk_count: U32,
    /// [`crate::Codec`] number.
    pub compressor: U32,
    /// 0 BLAKE3, 1 SHA-256.
    pub digester: U32,
    /// See [`features`].
    pub features: U32,
    /// Bytes of the blob as stored.
    pub stored_size: U64,
    /// Bytes of the decoded blob, a multiple of the block size.
    pub decoded_size: U64,
    /// Bytes of the table of contents with its footer, or 0.
    pub toc_size: U32,
    /// [`crate::Codec`] number of the CI table.
    pub ci_compressor: U32,
    /// First byte of the CI table in the blob.
    pub ci_offset: U64,
    /// Stored bytes of the CI table.
    pub ci_stored_size: U64,
    /// Decoded bytes of the CI table.
    pub ci_size: U64,
    /// SHA-256 of the table of contents with its footer.
    pub toc_digest: [u8; 32],
    /// SHA-256 of the blob that has the CI table, with [`features::SEPARATE`].
    pub meta_digest: [u8; 32],
    /// Bytes of that blob.
    pub meta_size: U64,
    /// Only for unsupported features.
    pub cipher_iv: U64,
    /// 0: not encrypted.
    pub cipher: U32,
    /// Zero.
    pub reserved: [u8; 36],
}

/// A row of the chunk table.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ChunkEntry {
    /// Digest of the decoded bytes.
    pub digest: [u8; 32],
    /// Blob index, from 0.
    pub blob: U32,
    /// See [`chunk_flags`].
    pub flags: U32,
    /// Bytes as stored.
    pub stored_size: U32,
    /// Bytes once decoded.
    pub decoded_size: U32,
    /// First stored byte.
    pub stored: U64,
    /// First decoded byte.
    pub decoded: U64,
    /// The chunk's offset in one of the files that use it.
    pub file_offset: U64,
    /// Number in the blob.
    pub number: U32,
    /// CRC-32C, if the flag is set.
    pub crc32c: U32,
}

/// Bits of [`ChunkEntry::flags`].
pub mod chunk_flags {
    /// The stored bytes go through the codec.
    pub const COMPRESSED: u32 = 0x1;
    /// Not used by any writer.
    pub const HOLE: u32 = 0x2;
    /// Unsupported.
    pub const ENCRYPTED: u32 = 0x4;
    /// The stored place is that of a unit with several chunks, see `in_unit`. Upstream leaves it
    /// out, and the place with it.
    pub const BATCH: u32 = 0x8;
}

/// [`ChunkEntry::file_offset`] of a chunk in a unit with others, where no reader looks for an
/// offset: where it lies in the decoded unit.
pub(super) fn in_unit(part: Part) -> u64 {
    u64::from(part.size) << 32 | u64::from(part.offset)
}

/// The inverse of [`in_unit`].
pub(super) fn from_in_unit(word: u64) -> Part {
    Part { offset: word as u32, size: (word >> 32) as u32 }
}

/// First and last four bytes of the CI header.
pub const CI_MAGIC: u32 = 0xb10b_b10b;
/// Bytes of the CI header.
pub const CI_HEADER_SIZE: u64 = 4096;
/// Bytes of a CI entry, version 1.
pub const CI_ENTRY_SIZE: u64 = 16;
/// Bytes of a CI entry, version 2.
pub const CI_V2_ENTRY_SIZE: u64 = 24;
/// Bytes of what a CI table of version 2 says about a unit: a batch, or a [`Context`].
pub const CI_UNIT_SIZE: u64 = 40;
/// Most bytes of the CI tables of an image that have to be held in memory, those of version 2: ten
/// million chunks.
pub const MAX_CI_V2: u64 = 256 << 20;

/// A piece of a gzip file in a CI table: where and how decoding begins, and its length. Windows
/// follow the last context.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Context {
    /// First whole stored byte.
    pub stored: U64,
    /// Its offset in the unpacked file.
    pub decoded: U64,
    /// First byte of its window among the windows.
    pub window: U64,
    /// Stored bytes.
    pub stored_size: U32,
    /// Decoded bytes.
    pub decoded_size: U32,
    /// Bytes of its window, at most 32,768.
    pub window_size: U32,
    /// The byte before the first.
    pub before: u8,
    /// The number of its upper bits that belong to the piece.
    pub bits: u8,
    /// Zero.
    pub reserved: [u8; 2],
}

/// The header that follows the CI table.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct CiHeader {
    /// [`CI_MAGIC`].
    pub magic: U32,
    /// As in the blob table.
    pub features: U32,
    /// [`crate::Codec`] number of the CI table.
    pub compressor: U32,
    /// Chunks in the blob.
    pub entries: U32,
    /// First byte of the CI table in the blob.
    pub offset: U64,
    /// Stored bytes of the CI table.
    pub stored_size: U64,
    /// Decoded bytes of the CI table.
    pub size: U64,
    /// First byte of the units in the decoded CI table; 0 without any.
    pub units_offset: U64,
    /// Bytes of that, with windows.
    pub units_size: U64,
    /// Number of units.
    pub units: U32,
    /// Zero.
    pub reserved: [u8; 4032],
    /// [`CI_MAGIC`] again.
    pub magic2: U32,
}

/// An entry of the table of contents.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TocEntry {
    /// 1 raw, 2 zstd, 4 LZ4.
    pub flags: U32,
    /// Zero.
    pub reserved: U32,
    /// Name, NUL padded.
    pub name: [u8; 16],
    /// SHA-256 of the decoded section; see the writer for `image.blob`.
    pub digest: [u8; 32],
    /// First byte in the blob.
    pub offset: U64,
    /// Stored bytes.
    pub stored_size: U64,
    /// Decoded bytes.
    pub size: U64,
    /// Zero.
    pub reserved2: [u8; 48],
}

const _: () = {
    assert!(size_of::<ExtendedSuperBlock>() == 256);
    assert!(size_of::<BlobEntry>() == 256);
    assert!(size_of::<ChunkEntry>() == 80);
    assert!(size_of::<CiHeader>() as u64 == CI_HEADER_SIZE);
    assert!(size_of::<Context>() as u64 == CI_UNIT_SIZE);
    assert!(size_of::<TocEntry>() == 128);
};
