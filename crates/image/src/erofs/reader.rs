//! Reads inodes and their data. Every offset and size is checked before it is used.

use zerocopy::FromBytes;

use super::{
    FileType, Nid,
    layout::{
        CHUNK_BITS_MASK, CHUNK_INDEXES, ChunkIndex, DataLayout, INODE_EXTENDED, INODE_SLOT,
        InodeCompact, InodeExtended, XATTR_PREFIXES, XattrEntry, XattrHeader,
    },
};
use crate::{BLOCK_SIZE, FormatError, Mtime, Problem, Structure, tree::Device};

/// Longest symbolic link target in bytes that Linux follows (PATH_MAX without the NUL).
pub(crate) const MAX_TARGET: u64 = 4095;

/// An extended attribute's full name and its value.
pub type Xattr<'a> = (Vec<u8>, &'a [u8]);

/// An image's bytes with the geometry from its superblock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) geometry: Geometry,
}

/// The superblock's description of the inode area.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    /// First byte of the inode area.
    pub(crate) meta: u64,
    /// Base of compact inodes' times.
    pub(crate) epoch: i64,
    /// Nanoseconds of compact inodes' times.
    pub(crate) fixed_nanoseconds: u32,
    /// Bytes per chunk, a power of two.
    pub(crate) chunk_size: u32,
}

/// An inode as read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InodeView {
    /// Its number.
    pub nid: Nid,
    /// Its type.
    pub file_type: FileType,
    /// Permission bits with set-uid, set-gid and sticky: `0..=0o7777`.
    pub permissions: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Time of last modification.
    pub mtime: Mtime,
    /// Number of names that the image claims.
    pub nlink: u32,
    /// Bytes of content: of a file, of a link's target, of a directory's entries.
    pub size: u64,
    /// Offset of the inode in the bootstrap, in bytes.
    pub offset: u64,
    pub(crate) layout: DataLayout,
    /// First block, device number or chunk format word.
    pub(crate) data: u32,
    /// First byte after the inode itself.
    pub(crate) body: u64,
    /// Bytes of extended attributes, at `body`.
    pub(crate) xattr_size: u64,
}

impl InodeView {
    /// `st_mode`: type and permissions.
    pub const fn mode(&self) -> u32 {
        (self.file_type.mode() | self.permissions) as u32
    }

    /// The device number of a device node.
    pub const fn rdev(&self) -> Option<Device> {
        match self.file_type {
            FileType::CharDevice | FileType::BlockDevice => Some(Device::decode(self.data)),
            _ => None,
        }
    }

    /// Size of the extended attributes in the image, in bytes; 0 without any.
    pub const fn xattr_size(&self) -> u64 {
        self.xattr_size
    }

    /// First byte after the extended attributes.
    pub(crate) const fn tail(&self) -> u64 {
        self.body + self.xattr_size
    }

    pub(crate) fn error(&self, problem: impl Into<Problem>) -> FormatError {
        FormatError::new(self.nid, self.offset, problem)
    }
}

/// `len` bytes at `offset`, if the image has them.
pub(crate) fn slice(
    bytes: &[u8],
    offset: u64,
    len: u64,
    object: impl FnOnce() -> Structure,
) -> Result<&[u8], FormatError> {
    let end = offset.checked_add(len).filter(|end| *end <= bytes.len() as u64);
    match end {
        Some(end) => Ok(&bytes[offset as usize..end as usize]),
        None => Err(FormatError::new(
            object(),
            offset,
            Problem::OutOfBounds { len, available: bytes.len() as u64 },
        )),
    }
}

/// A structure at `offset`.
pub(crate) fn structure<T: FromBytes>(
    bytes: &[u8],
    offset: u64,
    object: impl FnOnce() -> Structure,
) -> Result<T, FormatError> {
    let found = slice(bytes, offset, size_of::<T>() as u64, object)?;
    Ok(T::read_from_bytes(found).expect("slice has the size of T"))
}

impl<'a> View<'a> {
    /// Parses and validates the inode itself; its data is validated when it is read.
    pub(crate) fn inode(&self, nid: Nid) -> Result<InodeView, FormatError> {
        let offset = nid
            .0
            .checked_mul(INODE_SLOT)
            .and_then(|at| at.checked_add(self.geometry.meta))
            .ok_or_else(|| FormatError::new(nid, 0, "outside the image"))?;
        let error = |problem: String| FormatError::new(nid, offset, problem);
        let compact: InodeCompact = structure(self.bytes, offset, || nid.into())?;
        let format = compact.format.get();
        let layout = match format & !INODE_EXTENDED {
            0 => DataLayout::FlatPlain,
            4 => DataLayout::FlatInline,
            8 => DataLayout::ChunkBased,
            _ => return Err(error(format!("format {format:#x} is not one that RAFS uses"))),
        };
        let mode = compact.mode.get();
        let file_type = FileType::from_mode(mode)
            .ok_or_else(|| error(format!("mode {mode:#o} has no known file type")))?;
        let xattr_size = match compact.xattr_count.get() {
            0 => 0,
            count => size_of::<XattrHeader>() as u64 + 4 * u64::from(count - 1),
        };
        let view = if format & INODE_EXTENDED != 0 {
            let inode: InodeExtended = structure(self.bytes, offset, || nid.into())?;
            InodeView {
                nid,
                file_type,
                permissions: mode & 0o7777,
                uid: inode.uid.get(),
                gid: inode.gid.get(),
                mtime: Mtime {
                    seconds: inode.mtime.get().cast_signed(),
                    nanoseconds: inode.mtime_nanoseconds.get(),
                },
                nlink: inode.nlink.get(),
                size: inode.size.get(),
                offset,
                layout,
                data: inode.data.get(),
                body: offset + size_of::<InodeExtended>() as u64,
                xattr_size,
            }
        } else {
            InodeView {
                nid,
                file_type,
                permissions: mode & 0o7777,
                uid: compact.uid.get().into(),
                gid: compact.gid.get().into(),
                mtime: Mtime {
                    seconds: self.geometry.epoch.saturating_add(compact.mtime.get().into()),
                    nanoseconds: self.geometry.fixed_nanoseconds,
                },
                nlink: compact.nlink.get().into(),
                size: compact.size.get().into(),
                offset,
                layout,
                data: compact.data.get(),
                body: offset + size_of::<InodeCompact>() as u64,
                xattr_size,
            }
        };
        self.validate(&view)?;
        Ok(view)
    }

    fn validate(&self, inode: &InodeView) -> Result<(), FormatError> {
        if inode.mtime.nanoseconds >= 1_000_000_000 {
            return Err(inode.error(format!("{} nanoseconds", inode.mtime.nanoseconds)));
        }
        let chunked = inode.layout == DataLayout::ChunkBased;
        if chunked != (inode.file_type == FileType::Regular) {
            return Err(inode.error(format!(
                "a {:?} with data layout {:?}: only regular files are made of chunks, and always",
                inode.file_type, inode.layout
            )));
        }
        match inode.file_type {
            FileType::Regular => {
                let kernel_bits = inode.data & CHUNK_BITS_MASK;
                let image_bits = (u64::from(self.geometry.chunk_size) / BLOCK_SIZE).ilog2();
                if inode.data & !CHUNK_BITS_MASK != CHUNK_INDEXES || kernel_bits < image_bits {
                    return Err(inode.error(format!(
                        "chunk format {:#x}: expected {CHUNK_INDEXES:#x} and at least {image_bits}",
                        inode.data
                    )));
                }
                if inode.size > i64::MAX as u64 {
                    return Err(inode.error(format!("a file of {} bytes", inode.size)));
                }
            }
            FileType::Symlink if !(1..=MAX_TARGET).contains(&inode.size) => {
                return Err(inode.error(format!("a link target of {} bytes", inode.size)));
            }
            FileType::Directory if !(1..=self.bytes.len() as u64).contains(&inode.size) => {
                return Err(inode.error(format!("a directory of {} bytes", inode.size)));
            }
            _ => {}
        }
        Ok(())
    }

    /// Block `index` of the content of a directory or symbolic link; the last one may be shorter.
    pub(crate) fn block(&self, inode: &InodeView, index: u64) -> Result<&'a [u8], FormatError> {
        let start = index * BLOCK_SIZE;
        let len = BLOCK_SIZE.min(inode.size.saturating_sub(start));
        // The last block of an inline inode follows the inode; a full last block would not fit
        // there.
        let inline = inode.layout == DataLayout::FlatInline && start + len == inode.size;
        let offset = if inline { inode.tail() } else { u64::from(inode.data) * BLOCK_SIZE + start };
        if inline && offset % BLOCK_SIZE + len > BLOCK_SIZE {
            return Err(inode.error(format!("{len} inline bytes cross a block border")));
        }
        slice(self.bytes, offset, len, || inode.nid.into())
    }

    /// A symbolic link's target.
    pub(crate) fn target(&self, inode: &InodeView) -> Result<&'a [u8], FormatError> {
        if inode.file_type != FileType::Symlink {
            return Err(inode.error(format!("a {:?} is not a symbolic link", inode.file_type)));
        }
        let target = self.block(inode, 0)?;
        if target.contains(&0) {
            return Err(inode.error("a link target with a NUL in it"));
        }
        Ok(target)
    }

    /// The chunk indexes of a regular file.
    pub(crate) fn chunk_indexes(&self, inode: &InodeView) -> Result<&'a [ChunkIndex], FormatError> {
        if inode.file_type != FileType::Regular {
            return Err(inode.error(format!("a {:?} has no chunks", inode.file_type)));
        }
        let count = inode.size.div_ceil(self.geometry.chunk_size.into());
        // At most 2^63 / 2^12 chunks of 8 bytes, so this does not overflow.
        let len = count * size_of::<ChunkIndex>() as u64;
        let offset = inode.tail().next_multiple_of(8);
        let found =
            slice(self.bytes, offset, len, || Structure::OfInode("chunk indexes", inode.nid.0))?;
        Ok(<[ChunkIndex]>::ref_from_bytes(found).expect("a whole number of unaligned entries"))
    }

    /// Extended attributes in the order of the image.
    pub(crate) fn xattrs(&self, inode: &InodeView) -> Result<Vec<Xattr<'a>>, FormatError> {
        if inode.xattr_size == 0 {
            return Ok(Vec::new());
        }
        let object = || Structure::OfInode("extended attributes", inode.nid.0);
        let error = |problem: &str| Err(FormatError::new(object(), inode.body, problem.to_owned()));
        let area = slice(self.bytes, inode.body, inode.xattr_size, object)?;
        let (header, mut rest) =
            XattrHeader::read_from_prefix(area).expect("xattr_size includes the header");
        if header.shared_count != 0 {
            return error("shared attributes are not part of RAFS");
        }
        let mut found = Vec::new();
        while !rest.is_empty() {
            let Ok((entry, after)) = XattrEntry::read_from_prefix(rest) else {
                return error("the area ends inside an entry");
            };
            let Some((_, prefix)) = XATTR_PREFIXES.iter().find(|(n, _)| *n == entry.prefix) else {
                return error("an unknown name prefix");
            };
            let name_len = usize::from(entry.name_len);
            let value_size = usize::from(entry.value_size.get());
            let Some((body, _)) = after.split_at_checked(name_len + value_size) else {
                return error("an entry reaches out of the area");
            };
            let (name, value) = body.split_at(name_len);
            // The two ACLs are complete names, every other prefix needs something after it.
            if name.is_empty() == prefix.ends_with(b".") {
                return error("too little or too much of a name after its prefix");
            }
            if name.contains(&0) || prefix.len() + name_len > 255 {
                return error("a name with a NUL in it or of more than 255 bytes");
            }
            found.push(([prefix, name].concat(), value));
            let used = (size_of::<XattrEntry>() + body.len()).next_multiple_of(4);
            rest = rest.get(used..).unwrap_or_default();
        }
        Ok(found)
    }
}
