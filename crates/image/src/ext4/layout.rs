//! The structures of an ext4 file system as they lie on disk. Layout only: no logic.
//!
//! Everything is little endian. Fields are named as in the kernel's `ext4.h`, without the prefixes.

use zerocopy::{
    Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32},
};

/// Offset of the superblock, in bytes.
pub(super) const SUPERBLOCK_OFFSET: usize = 1024;
/// Bytes of an inode.
pub(super) const INODE_SIZE: u64 = 256;
/// Bytes of an inode's fields beyond the first 128, up to and with `projid`.
pub(super) const EXTRA_ISIZE: u16 = 32;
/// The root directory's inode number.
pub(super) const ROOT_INO: u32 = 2;
/// The first inode number that is not reserved.
pub(super) const FIRST_INO: u32 = 11;
/// Bits of a bitmap of one block: the maximum of blocks and of inodes per group.
pub(super) const BITS_PER_BLOCK: u64 = 8 * 4096;
/// Names of a file or directory that are counted; directories with more have the count 1.
pub(super) const MAX_LINKS: u32 = 65_000;
/// Inode flag: the directory has a hash index.
pub(super) const INODE_INDEX: u32 = 0x1000;
/// Inode flag: `block` holds the root of an extent tree.
pub(super) const INODE_EXTENTS: u32 = 0x8_0000;
/// First four bytes of extended attributes, in an inode and in a block of their own.
pub(super) const XATTR_MAGIC: u32 = 0xea02_0000;
/// First two bytes of each node of an extent tree.
pub(super) const EXTENT_MAGIC: u16 = 0xf30a;

/// The superblock's constants, see [`SuperBlock`].
pub(super) mod superblock {
    /// `magic`.
    pub(crate) const MAGIC: u16 = 0xef53;
    /// `state`: unmounted cleanly.
    pub(crate) const CLEAN: u16 = 1;
    /// `errors`: go on.
    pub(crate) const CONTINUE: u16 = 1;
    /// `rev_level`: inode size and features count.
    pub(crate) const DYNAMIC: u32 = 1;
    /// `default_mount_opts`: `user_xattr,acl`. Kernels have both on by themselves since 2.6.39.
    pub(crate) const XATTR_AND_ACL: u32 = 0xc;
    /// `def_hash_version`: TEA, the hash of directories.
    pub(crate) const HASH_TEA: u8 = 2;
    /// `flags`: names are hashed as unsigned bytes.
    pub(crate) const UNSIGNED_HASH: u32 = 2;
    /// `feature_compat`: ext_attr, and sparse_super2, which lets no group but the first have a
    /// superblock: copies would lie inside the blobs.
    pub(crate) const COMPAT: u32 = 0x8 | 0x200;
    /// `feature_compat`: directories may have an index.
    pub(crate) const DIR_INDEX: u32 = 0x20;
    /// `feature_incompat`: filetype, extents, and flex_bg, which lets bitmaps and inode tables of
    /// all groups lie in front of the blobs.
    pub(crate) const INCOMPAT: u32 = 0x2 | 0x40 | 0x200;
    /// `feature_ro_compat`: sparse_super, large_file, huge_file, dir_nlink, extra_isize, and
    /// shared_blocks. The last one is unknown to the kernel, which therefore mounts the file system
    /// read-only or not at all; `e2fsck` knows it and lets files share blocks.
    pub(crate) const RO_COMPAT: u32 = 0x1 | 0x2 | 0x8 | 0x20 | 0x40 | 0x4000;
}

/// The superblock. All counts are of the device with the blobs.
#[derive(Clone, Copy, Debug, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct SuperBlock {
    pub(super) inodes_count: U32,
    pub(super) blocks_count: U32,
    pub(super) reserved_blocks: U32,
    pub(super) free_blocks: U32,
    pub(super) free_inodes: U32,
    pub(super) first_data_block: U32,
    /// log2(block size) - 10.
    pub(super) log_block_size: U32,
    /// The same for clusters, which are blocks here.
    pub(super) log_cluster_size: U32,
    pub(super) blocks_per_group: U32,
    pub(super) clusters_per_group: U32,
    pub(super) inodes_per_group: U32,
    pub(super) mount_time: U32,
    pub(super) write_time: U32,
    pub(super) mount_count: U16,
    /// -1: no limit.
    pub(super) max_mount_count: U16,
    pub(super) magic: U16,
    pub(super) state: U16,
    pub(super) errors: U16,
    pub(super) minor_rev_level: U16,
    pub(super) last_check: U32,
    pub(super) check_interval: U32,
    pub(super) creator_os: U32,
    pub(super) rev_level: U32,
    pub(super) reserved_uid: U16,
    pub(super) reserved_gid: U16,
    pub(super) first_ino: U32,
    pub(super) inode_size: U16,
    pub(super) block_group: U16,
    pub(super) feature_compat: U32,
    pub(super) feature_incompat: U32,
    pub(super) feature_ro_compat: U32,
    pub(super) uuid: [u8; 16],
    /// Name, directory of the last mount, preallocation, journal: none.
    pub(super) unused_0x78: [u8; 0xec - 0x78],
    /// Zeros: the hash starts from constants.
    pub(super) hash_seed: [U32; 4],
    pub(super) def_hash_version: u8,
    pub(super) unused_0xfd: [u8; 3],
    pub(super) default_mount_opts: U32,
    pub(super) unused_0x104: [u8; 0x15c - 0x104],
    pub(super) min_extra_isize: U16,
    pub(super) want_extra_isize: U16,
    pub(super) flags: U32,
    pub(super) unused_0x164: [u8; 0x174 - 0x164],
    /// log2 of the groups whose bitmaps and inode tables belong together.
    pub(super) log_groups_per_flex: u8,
    /// With the groups of copies of the superblock at 0x24c: none.
    pub(super) unused_0x175: [u8; 1024 - 0x175],
}

/// A group of blocks and inodes.
#[derive(Clone, Copy, Debug, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct GroupDescriptor {
    pub(super) block_bitmap: U32,
    pub(super) inode_bitmap: U32,
    pub(super) inode_table: U32,
    pub(super) free_blocks: U16,
    pub(super) free_inodes: U16,
    pub(super) used_dirs: U16,
    pub(super) flags: U16,
    pub(super) unused: [u8; 12],
}

/// An inode up to its extended attributes.
#[derive(Clone, Copy, Debug, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Inode {
    pub(super) mode: U16,
    pub(super) uid_low: U16,
    pub(super) size_low: U32,
    pub(super) atime: U32,
    pub(super) ctime: U32,
    pub(super) mtime: U32,
    pub(super) dtime: U32,
    pub(super) gid_low: U16,
    pub(super) links: U16,
    /// Units of 512 bytes: data, attributes and nodes of the extent tree.
    pub(super) blocks_low: U32,
    pub(super) flags: U32,
    pub(super) version: U32,
    /// Extent tree, device number or target of a short link.
    pub(super) block: [u8; 60],
    pub(super) generation: U32,
    /// Block of extended attributes; 0 for none.
    pub(super) file_acl: U32,
    pub(super) size_high: U32,
    pub(super) obsolete: U32,
    pub(super) blocks_high: U16,
    pub(super) file_acl_high: U16,
    pub(super) uid_high: U16,
    pub(super) gid_high: U16,
    pub(super) checksum: U16,
    pub(super) reserved: U16,
    pub(super) extra_isize: U16,
    pub(super) checksum_high: U16,
    /// Nanoseconds << 2 | epoch.
    pub(super) ctime_extra: U32,
    pub(super) mtime_extra: U32,
    pub(super) atime_extra: U32,
    pub(super) crtime: U32,
    pub(super) crtime_extra: U32,
    pub(super) version_high: U32,
    pub(super) projid: U32,
}

/// Begin of each node of an extent tree. 12 bytes, as the entries.
#[derive(Clone, Copy, Debug, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct ExtentHeader {
    pub(super) magic: U16,
    pub(super) entries: U16,
    pub(super) max: U16,
    /// 0 for leaves.
    pub(super) depth: U16,
    pub(super) generation: U32,
}

/// An entry of a leaf: a run of blocks.
#[derive(Clone, Copy, Debug, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct ExtentLeaf {
    pub(super) logical: U32,
    pub(super) len: U16,
    pub(super) start_high: U16,
    pub(super) start: U32,
}

/// An entry of another node: where the node below lies.
#[derive(Clone, Copy, Debug, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct ExtentIndex {
    pub(super) logical: U32,
    pub(super) node: U32,
    pub(super) node_high: U16,
    pub(super) unused: U16,
}

/// A directory entry without its name.
#[derive(Clone, Copy, Debug, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Dirent {
    /// 0 for an entry that is none.
    pub(super) ino: U32,
    /// Bytes to the next entry; the last one reaches to the end of the block.
    pub(super) record_len: U16,
    pub(super) name_len: u8,
    /// As in EROFS, see [`crate::erofs::FileType`].
    pub(super) file_type: u8,
}

/// Follows `.` and `..` in the first block of a directory with a hash index.
#[derive(Clone, Copy, Debug, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct IndexInfo {
    pub(super) reserved: U32,
    pub(super) hash_version: u8,
    /// Bytes of this structure.
    pub(super) info_len: u8,
    /// Levels of nodes between this block and the leaves: 0 or 1.
    pub(super) levels: u8,
    pub(super) unused: u8,
}

/// Takes the place of the hash of the first entry of an index.
#[derive(Clone, Copy, Debug, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct IndexCount {
    pub(super) limit: U16,
    pub(super) count: U16,
}

/// Begin of a block of extended attributes.
#[derive(Clone, Copy, Debug, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct XattrBlockHeader {
    pub(super) magic: U32,
    pub(super) references: U32,
    pub(super) blocks: U32,
    pub(super) hash: U32,
    pub(super) checksum: U32,
    pub(super) reserved: [U32; 3],
}

/// One extended attribute; its name and padding to 4 bytes follow.
#[derive(Clone, Copy, Debug, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct XattrEntry {
    pub(super) name_len: u8,
    pub(super) name_index: u8,
    pub(super) value_offset: U16,
    pub(super) value_inode: U32,
    pub(super) value_size: U32,
    pub(super) hash: U32,
}

const _: () = {
    assert!(size_of::<SuperBlock>() == 1024);
    assert!(size_of::<GroupDescriptor>() == 32);
    assert!(size_of::<Inode>() == 128 + EXTRA_ISIZE as usize);
    assert!(size_of::<ExtentHeader>() == 12);
    assert!(size_of::<ExtentLeaf>() == 12);
    assert!(size_of::<ExtentIndex>() == 12);
    assert!(size_of::<Dirent>() == 8);
    assert!(size_of::<IndexInfo>() == 8);
    assert!(size_of::<IndexCount>() == 4);
    assert!(size_of::<XattrBlockHeader>() == 32);
    assert!(size_of::<XattrEntry>() == 16);
};
