//! Reads inodes and the data behind them. Every offset and size is checked before it is used.

use std::collections::BTreeMap;

use zerocopy::FromBytes;

use super::{
    layout::{ALIGN, InodeEntry, SUPERBLOCK_SIZE, inode_flags},
    tables::Tables,
};
use crate::{
    FormatError, Metadata, Mtime, Problem, Structure,
    erofs::{
        FileType,
        reader::{slice, structure},
    },
    rafs::layout::ChunkEntry,
};

/// As in [`Metadata::xattrs`].
type Xattrs = BTreeMap<Box<[u8]>, Box<[u8]>>;

/// One name with its inode.
pub(super) struct Named<'a> {
    row: u32,
    offset: u64,
    /// Bytes of the inode and what follows it.
    pub(super) size: u64,
    pub(super) entry: InodeEntry,
    pub(super) file_type: FileType,
    pub(super) name: &'a [u8],
    /// Target of a symbolic link.
    pub(super) target: &'a [u8],
    /// Chunks of a regular file.
    pub(super) chunks: &'a [ChunkEntry],
    xattrs: &'a [u8],
}

impl<'a> Named<'a> {
    /// Reads the inode that `row` of the inode table leads to, counted from 1.
    pub(super) fn read(
        bytes: &'a [u8],
        tables: &Tables<'_>,
        row: u32,
    ) -> Result<Self, FormatError> {
        let object = || Structure::from(("inode", row));
        let place = row.checked_sub(1).and_then(|row| tables.inodes.get(row as usize));
        let offset = place.map_or(0, |place| u64::from(place.get()) * ALIGN);
        let error = |problem: String| FormatError::new(object(), offset, problem);
        if offset < SUPERBLOCK_SIZE.into() {
            return Err(error(format!("none of the {} in the inode table", tables.inodes.len())));
        }
        let entry: InodeEntry = structure(bytes, offset, object)?;
        let mode = entry.mode.get();
        let file_type = u16::try_from(mode).ok().and_then(FileType::from_mode);
        let file_type = file_type.ok_or_else(|| error(format!("mode {mode:#o}")))?;

        let mut at = offset + size_of::<InodeEntry>() as u64;
        let mut take = |size: u64| {
            let piece = slice(bytes, at, size, object)?;
            at = at.saturating_add(size).next_multiple_of(ALIGN);
            Ok::<_, FormatError>(piece)
        };
        let name = take(entry.name_size.get().into())?;
        let target = take(entry.target_size.get().into())?;
        let mut xattrs = &[][..];
        if entry.flags.get() & inode_flags::XATTR != 0 {
            let size = take(8)?.try_into().map_or(0, u64::from_le_bytes);
            xattrs = take(size)?;
        }
        let mut chunks = &[][..];
        if file_type == FileType::Regular {
            let size = u64::from(entry.children.get()) * size_of::<ChunkEntry>() as u64;
            chunks = <[ChunkEntry]>::ref_from_bytes(take(size)?).expect("whole entries");
        }
        let size = at - offset;
        Ok(Named { row, offset, size, entry, file_type, name, target, chunks, xattrs })
    }

    pub(super) fn error(&self, problem: impl Into<Problem>) -> FormatError {
        FormatError::new(("inode", self.row), self.offset, problem)
    }

    pub(super) fn metadata(&self) -> Result<Metadata, FormatError> {
        Ok(Metadata {
            permissions: self.entry.mode.get() as u16 & 0o7777,
            uid: self.entry.uid.get(),
            gid: self.entry.gid.get(),
            mtime: Mtime {
                seconds: self.entry.mtime_seconds.get().cast_signed(),
                nanoseconds: self.entry.mtime_nanoseconds.get(),
            },
            xattrs: self.xattrs()?,
        })
    }

    /// Extended attributes: the size of each in 4 bytes, its name, a NUL, its value.
    fn xattrs(&self) -> Result<Xattrs, FormatError> {
        let mut xattrs = BTreeMap::new();
        let mut rest = self.xattrs;
        while !rest.is_empty() {
            let pair = rest
                .split_first_chunk()
                .and_then(|(size, rest)| rest.split_at_checked(u32::from_le_bytes(*size) as usize));
            let (pair, behind) =
                pair.ok_or_else(|| self.error("an extended attribute that does not end"))?;
            rest = behind;
            let nul = pair.iter().position(|byte| *byte == 0);
            let nul = nul.ok_or_else(|| self.error("an extended attribute without a name"))?;
            let (name, value) = (&pair[..nul], &pair[nul + 1..]);
            if xattrs.insert(name.into(), value.into()).is_some() {
                let name = name.escape_ascii();
                return Err(self.error(format!("the extended attribute `{name}` twice")));
            }
        }
        Ok(xattrs)
    }
}
