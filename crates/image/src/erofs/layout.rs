//! The structures of an EROFS image as they lie on disk. Layout only: no logic, no validation.
//!
//! Everything is little endian. Names follow the kernel's `erofs_fs.h` where it has one.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

/// Offset of the superblock, in bytes.
pub const SUPERBLOCK_OFFSET: u64 = 1024;
/// First four bytes of the superblock.
pub const SUPERBLOCK_MAGIC: u32 = 0xe0f5_e1e2;
/// log2 of [`crate::BLOCK_SIZE`].
pub const BLOCK_BITS: u8 = 12;
/// `feature_compat` bit: a RAFS extended superblock follows.
pub const COMPAT_RAFS_V6: u32 = 0x4000_0000;
/// `feature_incompat` bit: files may be made of chunks.
pub const INCOMPAT_CHUNKED_FILE: u32 = 0x4;
/// `feature_incompat` bit: there is a table of further devices.
pub const INCOMPAT_DEVICE_TABLE: u32 = 0x8;
/// Unit of [`SuperBlock::device_slot`], and size of a [`DeviceSlot`], in bytes.
pub const DEVICE_SLOT_SIZE: u64 = 128;
/// The device table follows both superblocks: slot 11, byte 1408.
pub const DEVICE_SLOT: u16 = 11;
/// Maximum number of devices of an image: chunk indexes have 8 bits for `blob + 1`, and 255 stays
/// unused.
pub const MAX_DEVICES: usize = 254;
/// Unit of inode numbers ("nid"), in bytes.
pub const INODE_SLOT: u64 = 32;
/// Bytes per directory entry before its name.
pub const DIRENT_SIZE: usize = 12;
/// Bit of the chunk format word: chunk indexes have 8 bytes.
pub const CHUNK_INDEXES: u32 = 0x20;
/// The bits of the chunk format word that hold log2(chunk size / block size).
pub const CHUNK_BITS_MASK: u32 = 0x1f;

/// The superblock.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SuperBlock {
    /// [`SUPERBLOCK_MAGIC`].
    pub magic: U32,
    /// CRC-32C; 0 in RAFS.
    pub checksum: U32,
    /// Features that a reader may ignore.
    pub feature_compat: U32,
    /// [`BLOCK_BITS`].
    pub block_bits: u8,
    /// Superblock extension slots; 0 in RAFS.
    pub extension_slots: u8,
    /// nid of the root directory.
    pub root_nid: U16,
    /// Number of names in the image.
    pub inode_count: U64,
    /// Base of the times of compact inodes, seconds.
    pub epoch: U64,
    /// Nanoseconds of the times of compact inodes.
    pub fixed_nanoseconds: U32,
    /// Blocks of all devices together.
    pub blocks: U32,
    /// First block of the inode area; nid 0.
    pub meta_block: U32,
    /// First block of the shared xattr area; 0 in RAFS.
    pub xattr_block: U32,
    /// File system UUID.
    pub uuid: [u8; 16],
    /// Label.
    pub volume_name: [u8; 16],
    /// Features that a reader must support.
    pub feature_incompat: U32,
    /// Compression algorithms of EROFS itself; 0 in RAFS.
    pub compression: U16,
    /// Number of device slots.
    pub device_count: U16,
    /// Offset of the device table, in units of [`DEVICE_SLOT_SIZE`].
    pub device_slot: U16,
    /// Later features; 0 in RAFS.
    pub rest: [u8; 38],
}

/// One further device: a data blob.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DeviceSlot {
    /// Blob id in hex digits.
    pub tag: [u8; 64],
    /// Decoded size in blocks.
    pub blocks: U32,
    /// First block in the single-device view.
    pub mapped_block: U32,
    /// Zero.
    pub reserved: [u8; 56],
}

/// An inode in 64 bytes, the only form that the writer emits.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct InodeExtended {
    /// Bit 0: extended. Bits 1 to 3: data layout.
    pub format: U16,
    /// 0, or 1 + (bytes of the xattr area after its header) / 4.
    pub xattr_count: U16,
    /// `st_mode`.
    pub mode: U16,
    /// Zero.
    pub reserved: U16,
    /// Bytes of content.
    pub size: U64,
    /// First block, device number or chunk format word.
    pub data: U32,
    /// A running number; readers use the nid instead.
    pub ino: U32,
    /// Owner.
    pub uid: U32,
    /// Group.
    pub gid: U32,
    /// Seconds since 1970, two's complement.
    pub mtime: U64,
    /// Nanoseconds to add.
    pub mtime_nanoseconds: U32,
    /// Number of names.
    pub nlink: U32,
    /// Zero.
    pub reserved2: [u8; 16],
}

/// An inode in 32 bytes; read only.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct InodeCompact {
    /// As in [`InodeExtended`].
    pub format: U16,
    /// As in [`InodeExtended`].
    pub xattr_count: U16,
    /// `st_mode`.
    pub mode: U16,
    /// Number of names.
    pub nlink: U16,
    /// Bytes of content.
    pub size: U32,
    /// Seconds since the superblock's epoch.
    pub mtime: U32,
    /// As in [`InodeExtended`].
    pub data: U32,
    /// A running number.
    pub ino: U32,
    /// Owner.
    pub uid: U16,
    /// Group.
    pub gid: U16,
    /// Zero.
    pub reserved: U32,
}

/// How an inode's content is found. The discriminants are those of bits 1 to 3 of the format field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataLayout {
    /// Consecutive blocks.
    FlatPlain = 0,
    /// Consecutive blocks, the last partial one right after the inode.
    FlatInline = 2,
    /// Chunk indexes after the inode.
    ChunkBased = 4,
}

/// Format bit 0: the inode has 64 bytes.
pub const INODE_EXTENDED: u16 = 1;

/// A directory entry without its name.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Dirent {
    /// The inode's number.
    pub nid: U64,
    /// Offset of the name in the block.
    pub name_offset: U16,
    /// [`super::FileType`] number.
    pub file_type: u8,
    /// Zero.
    pub reserved: u8,
}

/// Start of an inode's extended attributes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct XattrHeader {
    /// Bloom filter over names; 0 in RAFS.
    pub name_filter: U32,
    /// References to the shared area; 0 in RAFS.
    pub shared_count: u8,
    /// Zero.
    pub reserved: [u8; 7],
}

/// One extended attribute; name, value and padding to 4 bytes follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct XattrEntry {
    /// Bytes of the name without its prefix.
    pub name_len: u8,
    /// Number of the prefix, see [`XATTR_PREFIXES`].
    pub prefix: u8,
    /// Bytes of the value.
    pub value_size: U16,
}

/// Prefix numbers of extended attributes. The two ACLs are whole names.
pub const XATTR_PREFIXES: [(u8, &[u8]); 5] = [
    (1, b"user."),
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (4, b"trusted."),
    (6, b"security."),
];

/// One chunk of a regular file.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ChunkIndex {
    /// Bits 0 to 15 of the chunk's number in its blob. The kernel ignores them.
    pub number_low: U16,
    /// Device: blob index + 1. The kernel masks this field to the number of devices.
    pub device: u8,
    /// Bits 16 to 23 of the chunk's number.
    pub number_high: u8,
    /// First block in the decoded blob.
    pub block: U32,
}

const _: () = {
    assert!(size_of::<SuperBlock>() == 128);
    assert!(size_of::<DeviceSlot>() as u64 == DEVICE_SLOT_SIZE);
    assert!(size_of::<InodeExtended>() == 64);
    assert!(size_of::<InodeCompact>() == 32);
    assert!(size_of::<Dirent>() == DIRENT_SIZE);
    assert!(size_of::<XattrHeader>() == 12);
    assert!(size_of::<XattrEntry>() == 4);
    assert!(size_of::<ChunkIndex>() == 8);
};
