//! Files that Linux reads wrongly where each blob is a block device of its own.

use std::{
    collections::{HashSet, VecDeque},
    ffi::OsStr,
    os::unix::ffi::OsStrExt as _,
    path::PathBuf,
};

use super::{Bootstrap, bootstrap::Budget};
use crate::{
    FormatError,
    erofs::{FileType, InodeView, Nid},
};

impl<B: AsRef<[u8]>> Bootstrap<B> {
    /// Finds a file with a chunk that ends at a place in one blob, and a next chunk that begins at
    /// the same place in another blob. `None` if there is none.
    ///
    /// Linux reads both chunks from the first blob when it reads ahead from one to the other, if
    /// blobs are block devices: `iomap` joins reads of consecutive sectors without comparing their
    /// devices. Files that back a mount directly, and blobs that are parts of one device, are read
    /// right.
    pub fn file_across_blobs(&self) -> Result<Option<PathBuf>, FormatError> {
        if self.blobs().len() < 2 {
            return Ok(None);
        }
        let mut budget = Budget::new(self.bytes());
        let mut seen = HashSet::from([self.root()]);
        let mut pending = VecDeque::from([(self.root(), PathBuf::from("/"))]);
        while let Some((nid, path)) = pending.pop_front() {
            budget.charge(&self.inode(nid)?, self.chunk_size())?;
            for entry in self.read_dir(nid, 0)? {
                let entry = entry?;
                let is_file = entry.file_type == FileType::Regular;
                let is_directory = entry.file_type == FileType::Directory;
                if entry.is_dot() || !(is_file || is_directory) || !seen.insert(entry.nid) {
                    continue;
                }
                let path = path.join(OsStr::from_bytes(entry.name));
                if is_directory {
                    pending.push_back((entry.nid, path));
                } else if self.is_across_blobs(entry.nid, &mut budget)? {
                    return Ok(Some(path));
                }
            }
        }
        Ok(None)
    }

    fn is_across_blobs(&self, file: Nid, budget: &mut Budget) -> Result<bool, FormatError> {
        let inode: InodeView = self.inode(file)?;
        if inode.file_type != FileType::Regular {
            return Ok(false);
        }
        budget.charge(&inode, self.chunk_size())?;
        let mut previous = None;
        for chunk in self.chunks_of(&inode)? {
            let (chunk, at) = chunk?;
            // Only the last chunk of a file can be shorter.
            let end = at.0 + u64::from(self.chunk_size());
            if previous.is_some_and(|(blob, end)| blob != chunk.blob && end == at.0) {
                return Ok(true);
            }
            previous = Some((chunk.blob, end));
        }
        Ok(false)
    }
}
