//! The structures of RAFS v5 as they lie on disk. Layout only. Chunks have the entries of the
//! [chunk table](crate::rafs::layout::ChunkEntry) of v6.

use zerocopy::{
    FromBytes, Immutable, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

/// First bytes of a bootstrap.
pub const MAGIC: &[u8] = b"SFAR";
/// The version in the superblock.
pub const VERSION: u32 = 0x500;
/// Bytes of the superblock; all but the first 80 are reserved.
pub const SUPERBLOCK_SIZE: u32 = 8192;
/// Inodes and what belongs to them start at multiples of this.
pub const ALIGN: u64 = 8;

/// The superblock, up to its last field in use.
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SuperBlock {
    /// [`MAGIC`].
    pub magic: [u8; 4],
    /// [`VERSION`].
    pub version: U32,
    /// [`SUPERBLOCK_SIZE`].
    pub size: U32,
    /// Bytes per chunk.
    pub chunk_size: U32,
    /// See [`crate::rafs::layout::flags`].
    pub flags: U64,
    /// Number of inodes; hard links count once.
    pub inode_count: U64,
    /// First byte of the inode table.
    pub inode_table_offset: U64,
    /// First byte of the prefetch table.
    pub prefetch_table_offset: U64,
    /// First byte of the blob table.
    pub blob_table_offset: U64,
    /// Rows of the inode table, 4 bytes each.
    pub inode_table_rows: U32,
    /// Rows of the prefetch table, 4 bytes each.
    pub prefetch_table_rows: U32,
    /// Bytes of the blob table.
    pub blob_table_size: U32,
    /// Rows of the extended blob table; 0 before it was invented.
    pub extended_blob_rows: U32,
    /// First byte of the extended blob table.
    pub extended_blob_offset: U64,
}

/// A row of the extended blob table.
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExtendedBlob {
    /// Chunks in the blob.
    pub chunk_count: U32,
    /// See [`crate::rafs::layout::features`].
    pub features: U32,
    /// Bytes of the decoded blob, without gaps between its chunks.
    pub decoded_size: U64,
    /// Bytes of the blob as stored.
    pub stored_size: U64,
    /// Zero.
    pub reserved: [u8; 40],
}

/// An inode: of one name, so that hard links have one each. Its name, link target, extended
/// attributes and chunks follow.
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct InodeEntry {
    /// Digest over the digests of chunks or children.
    pub digest: [u8; 32],
    /// Number of the directory's inode.
    pub parent: U64,
    /// Number of the inode, the same for all its names.
    pub number: U64,
    /// Owner.
    pub uid: U32,
    /// Group.
    pub gid: U32,
    /// Project.
    pub project: U32,
    /// `st_mode`.
    pub mode: U32,
    /// Bytes of content.
    pub size: U64,
    /// `st_blocks`.
    pub blocks: U64,
    /// See [`inode_flags`].
    pub flags: U64,
    /// Number of names.
    pub nlink: U32,
    /// Row of a directory's first entry in the inode table, from 1.
    pub first_child: U32,
    /// Entries of a directory, chunks of a file.
    pub children: U32,
    /// Bytes of the name.
    pub name_size: U16,
    /// Bytes of the link target.
    pub target_size: U16,
    /// Device number.
    pub device: U32,
    /// Nanoseconds of the time of modification.
    pub mtime_nanoseconds: U32,
    /// Seconds of the time of modification, two's complement.
    pub mtime_seconds: U64,
    /// Zero.
    pub reserved: [u8; 8],
}

/// Bits of [`InodeEntry::flags`].
pub mod inode_flags {
    /// Extended attributes follow.
    pub const XATTR: u64 = 0x4;
    /// Chunks are missing.
    pub const HOLES: u64 = 0x8;
}

const _: () = {
    assert!(size_of::<SuperBlock>() == 80);
    assert!(size_of::<ExtendedBlob>() == 64);
    assert!(size_of::<InodeEntry>() == 128);
};

/// Returns whether `bytes` begin with the magic of a v5 bootstrap.
pub fn is_v5(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}
