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
    erofs::{FileType, InodeView},
};

impl<B: AsRef<[u8]>> Bootstrap<B> {
    /// Finds a file in which one chunk ends at some offset of its blob, and the next chunk begins
    /// at the same offset of another blob.
    ///
    /// Where each blob is a block device, Linux reads both chunks from the first device if one read
    /// covers their border: `iomap` merges reads of consecutive sectors without comparing devices.
    /// Mounts that are backed by files, and blobs that share a device, are not affected.
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
                let path = || path.join(OsStr::from_bytes(entry.name));
                match entry.file_type {
                    FileType::Directory if !entry.is_dot() && seen.insert(entry.nid) => {
                        pending.push_back((entry.nid, path()));
                    }
                    FileType::Regular => {
                        let inode = self.inode(entry.nid)?;
                        // Most files have one chunk. Others may have many names.
                        if inode.size > self.chunk_size().into()
                            && seen.insert(entry.nid)
                            && self.is_across_blobs(&inode, &mut budget)?
                        {
                            return Ok(Some(path()));
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(None)
    }

    fn is_across_blobs(&self, file: &InodeView, budget: &mut Budget) -> Result<bool, FormatError> {
        budget.charge(file, self.chunk_size())?;
        let mut previous = None;
        for chunk in self.chunks_of(file)? {
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
