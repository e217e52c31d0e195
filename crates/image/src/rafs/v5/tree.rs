//! Reads the file tree.

use std::collections::{HashMap, VecDeque};

use super::{blobs::Blobs, inode::Named, layout::inode_flags, tables::Tables};
use crate::{
    FormatError, Inode, InodeId, Kind, Name, Problem, Tree, erofs::FileType, tree::Device,
};

/// The tree of the bootstrap `bytes`, and the chunks that its files use. References to chunks hold
/// until [`Blobs::place`].
pub(super) fn read<'a>(
    bytes: &'a [u8],
    tables: &'a Tables<'a>,
) -> Result<(Tree, Blobs<'a>), FormatError> {
    let mut walk = Walk {
        bytes,
        tables,
        blobs: Blobs::new(tables),
        budget: bytes.len() as u64,
        known: HashMap::new(),
        pending: VecDeque::new(),
    };
    let root = Named::read(bytes, tables, 1)?;
    if root.file_type != FileType::Directory {
        return Err(root.error("the root is not a directory"));
    }
    let mut tree = Tree::new(root.metadata()?);
    walk.pending.push_back((Tree::ROOT, root));
    while let Some((id, directory)) = walk.pending.pop_front() {
        walk.fill(&mut tree, id, &directory)?;
    }
    Ok((tree, walk.blobs))
}

struct Walk<'a> {
    bytes: &'a [u8],
    tables: &'a Tables<'a>,
    blobs: Blobs<'a>,
    /// Bytes that inodes may still take. They do not overlap in a sound image; without a limit a
    /// few of them could stand for gigabytes, or for a directory in itself.
    budget: u64,
    /// Inodes other than directories, by number. A second name with the same number is a hard link.
    known: HashMap<u64, InodeId>,
    pending: VecDeque<(InodeId, Named<'a>)>,
}

impl<'a> Walk<'a> {
    /// Adds the children of `directory`.
    fn fill(
        &mut self,
        tree: &mut Tree,
        id: InodeId,
        directory: &Named<'_>,
    ) -> Result<(), FormatError> {
        let (first, count) = (directory.entry.first_child.get(), directory.entry.children.get());
        for at in 0..count {
            let row = first.checked_add(at);
            let row = row.ok_or_else(|| directory.error(format!("{count} children at {first}")))?;
            let named = Named::read(self.bytes, self.tables, row)?;
            self.budget = self
                .budget
                .checked_sub(named.size)
                .ok_or_else(|| named.error(Problem::Overlap("the image's inodes".into())))?;
            let name = Name::new(named.name).map_err(|invalid| named.error(invalid.to_string()))?;
            let shown = name.to_string();
            let child = self.child(tree, named)?;
            if let Some(children) = tree.children_mut(id)
                && children.insert(name, child).is_some()
            {
                return Err(directory.error(format!("the name `{shown}` twice")));
            }
        }
        Ok(())
    }

    fn child(&mut self, tree: &mut Tree, named: Named<'a>) -> Result<InodeId, FormatError> {
        let inode = Inode { metadata: named.metadata()?, kind: self.kind(&named)? };
        if named.file_type == FileType::Directory {
            let id = tree.add(inode);
            self.pending.push_back((id, named));
            return Ok(id);
        }
        let number = named.entry.number.get();
        match self.known.get(&number) {
            Some(&id) if tree[id] == inode => Ok(id),
            Some(_) => Err(named.error(format!("another name of file {number} is not the same"))),
            None => {
                let id = tree.add(inode);
                self.known.insert(number, id);
                Ok(id)
            }
        }
    }

    fn kind(&mut self, named: &Named<'_>) -> Result<Kind, FormatError> {
        let device = Device::decode(named.entry.device.get());
        Ok(match named.file_type {
            FileType::Directory => Kind::Directory(Default::default()),
            FileType::Regular => self.file(named)?,
            FileType::Symlink => Kind::Symlink(named.target.into()),
            FileType::CharDevice => Kind::CharDevice(device),
            FileType::BlockDevice => Kind::BlockDevice(device),
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => Kind::Socket,
        })
    }

    fn file(&mut self, named: &Named<'_>) -> Result<Kind, FormatError> {
        let (size, chunk_size) = (named.entry.size.get(), u64::from(self.tables.chunk_size));
        let count = named.chunks.len();
        if named.entry.flags.get() & inode_flags::HOLES != 0 {
            return Err(named.error(Problem::Unsupported("a file with holes".into())));
        }
        if size.div_ceil(chunk_size) != count as u64 {
            return Err(named.error(format!("{count} chunks for {size} bytes")));
        }
        let mut chunks = Vec::with_capacity(count);
        for (at, entry) in named.chunks.iter().enumerate() {
            let error = |problem: Problem| named.error(problem.of(format_args!("chunk {at}")));
            let start = at as u64 * chunk_size;
            let (found, bytes) = (entry.file_offset.get(), entry.decoded_size.get());
            let expected = chunk_size.min(size - start);
            if found != start || u64::from(bytes) != expected {
                let problem = format!("{bytes} bytes at {found}, expected {expected} at {start}");
                return Err(error(problem.into()));
            }
            chunks.push(self.blobs.add(entry).map_err(error)?);
        }
        Ok(Kind::Regular { size, chunks })
    }
}
