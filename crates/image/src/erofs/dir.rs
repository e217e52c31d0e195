//! Directories: blocks of sorted entries, each block with its own names.

use zerocopy::FromBytes;

use super::{
    FileType, InodeView, Nid,
    layout::{DIRENT_SIZE, Dirent},
    reader::View,
};
use crate::{BLOCK_SIZE, FormatError, Name};

/// One name in a directory, `.` and `..` included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirEntry<'a> {
    /// The name.
    pub name: &'a [u8],
    /// The inode it leads to.
    pub nid: Nid,
    /// The type that the entry claims for that inode.
    pub file_type: FileType,
    /// The offset at which a listing continues after this entry, see
    /// [`crate::rafs::Bootstrap::read_dir`].
    pub next_offset: u64,
}

impl DirEntry<'_> {
    /// Returns whether the entry is `.` or `..`.
    pub fn is_dot(&self) -> bool {
        matches!(self.name, b"." | b"..")
    }
}

/// One block of a directory.
struct Block<'a> {
    bytes: &'a [u8],
    entries: &'a [Dirent],
    inode: InodeView,
    index: u64,
}

impl<'a> Block<'a> {
    fn open(view: &View<'a>, inode: &InodeView, index: u64) -> Result<Self, FormatError> {
        let bytes = view.block(inode, index)?;
        let error = || inode.error(format!("directory block {index} has a bad number of entries"));
        let (first, _) = Dirent::read_from_prefix(bytes).map_err(|_| error())?;
        // Names start right after the last entry, so the first name's place tells their number.
        let table = usize::from(first.name_offset.get());
        if table == 0 || !table.is_multiple_of(DIRENT_SIZE) || table >= bytes.len() {
            return Err(error());
        }
        let entries = <[Dirent]>::ref_from_bytes(&bytes[..table]).map_err(|_| error())?;
        Ok(Block { bytes, entries, inode: *inode, index })
    }

    fn name(&self, at: usize) -> Result<&'a [u8], FormatError> {
        let start = usize::from(self.entries[at].name_offset.get());
        let end = self.entries.get(at + 1).map(|next| usize::from(next.name_offset.get()));
        let name = self.bytes.get(start..end.unwrap_or(self.bytes.len()));
        let mut name = name.unwrap_or_default();
        if end.is_none() {
            // Only the last name of a block may be followed by padding.
            let len = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
            name = &name[..len];
        }
        if !matches!(name, b"." | b"..") && Name::new(name).is_err() {
            let index = self.index;
            return Err(self
                .inode
                .error(format!("entry {at} of directory block {index} has no valid name")));
        }
        Ok(name)
    }

    fn entry(&self, at: usize) -> Result<DirEntry<'a>, FormatError> {
        let entry = &self.entries[at];
        let file_type = FileType::from_dirent(entry.file_type).ok_or_else(|| {
            let problem = format!("an entry with the unknown file type {}", entry.file_type);
            self.inode.error(problem)
        })?;
        let next_offset = self.index * BLOCK_SIZE + at as u64 + 1;
        Ok(DirEntry { name: self.name(at)?, nid: Nid(entry.nid.get()), file_type, next_offset })
    }
}

/// A listing of a directory, see [`crate::rafs::Bootstrap::read_dir`].
#[derive(Debug)]
pub struct ReadDir<'a> {
    view: View<'a>,
    inode: InodeView,
    /// Block index × block size + index of the next entry in that block: a block has far fewer than
    /// 4096.
    offset: u64,
}

impl<'a> ReadDir<'a> {
    pub(crate) fn new(view: View<'a>, inode: InodeView, offset: u64) -> Result<Self, FormatError> {
        require_directory(&inode)?;
        Ok(ReadDir { view, inode, offset })
    }

    fn entry(&mut self) -> Result<Option<DirEntry<'a>>, FormatError> {
        loop {
            let (index, at) = (self.offset / BLOCK_SIZE, (self.offset % BLOCK_SIZE) as usize);
            if index >= self.inode.size.div_ceil(BLOCK_SIZE) {
                return Ok(None);
            }
            let block = Block::open(&self.view, &self.inode, index)?;
            if at < block.entries.len() {
                let entry = block.entry(at)?;
                self.offset = entry.next_offset;
                return Ok(Some(entry));
            }
            self.offset = (index + 1) * BLOCK_SIZE;
        }
    }
}

impl<'a> Iterator for ReadDir<'a> {
    type Item = Result<DirEntry<'a>, FormatError>;

    fn next(&mut self) -> Option<Self::Item> {
        let entry = self.entry();
        if entry.is_err() {
            self.offset = u64::MAX;
        }
        entry.transpose()
    }
}

/// Finds `name` by binary search, first over the blocks, then in one block.
pub(crate) fn lookup<'a>(
    view: &View<'a>,
    inode: &InodeView,
    name: &[u8],
) -> Result<Option<DirEntry<'a>>, FormatError> {
    require_directory(inode)?;
    // The block that can hold the name is the last one whose first name is not greater.
    let (mut low, mut high) = (0, inode.size.div_ceil(BLOCK_SIZE));
    while low < high {
        let middle = low + (high - low) / 2;
        if Block::open(view, inode, middle)?.name(0)? <= name {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    let Some(index) = low.checked_sub(1) else { return Ok(None) };
    let block = Block::open(view, inode, index)?;
    let (mut low, mut high) = (0, block.entries.len());
    while low < high {
        let middle = low + (high - low) / 2;
        match block.name(middle)?.cmp(name) {
            std::cmp::Ordering::Equal => return block.entry(middle).map(Some),
            std::cmp::Ordering::Less => low = middle + 1,
            std::cmp::Ordering::Greater => high = middle,
        }
    }
    Ok(None)
}

fn require_directory(inode: &InodeView) -> Result<(), FormatError> {
    match inode.file_type {
        FileType::Directory => Ok(()),
        other => Err(inode.error(format!("a {other:?} is not a directory"))),
    }
}
