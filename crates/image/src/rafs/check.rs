//! Checks a whole bootstrap.

use std::collections::{HashMap, VecDeque, hash_map::Entry};

use super::{
    Bootstrap,
    bootstrap::{Budget, kernel_agrees},
};
use crate::{
    ChunkRef, Decoded, FormatError,
    erofs::{FileType, InodeView, Nid, layout::INODE_SLOT},
};

/// The counts of a bootstrap's parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Names, the root counted as one.
    pub names: u64,
    /// Directories.
    pub directories: u64,
    /// Regular files, each once however many names it has.
    pub files: u64,
    /// Symbolic links, each once.
    pub symlinks: u64,
    /// Device nodes, pipes and sockets, each once.
    pub specials: u64,
    /// Bytes of all regular files.
    pub file_bytes: u64,
    /// References from files to chunks.
    pub chunk_refs: u64,
    /// Chunks in the chunk table.
    pub chunks: u64,
}

/// The number of names that lead to an inode, and the number that it claims, by nid.
type Links = HashMap<Nid, Link>;

struct Link {
    names: u32,
    claimed: u32,
    is_file: bool,
}

impl Link {
    fn of(inode: &InodeView) -> Self {
        let is_file = inode.file_type == FileType::Regular;
        Link { names: 1, claimed: inode.nlink, is_file }
    }
}

/// Walks everything: every inode is read, every directory is sorted and has one parent, every
/// entry's type is that of its inode, every chunk reference resolves to a chunk of the right size,
/// the kernel's view of a file is the same as that of its index, and link counts are right. Memory
/// and time are bounded by the size of the bootstrap.
pub fn check<B: AsRef<[u8]>>(bootstrap: &Bootstrap<B>) -> Result<Summary, FormatError> {
    let mut summary = Summary {
        names: 1,
        chunks: bootstrap.blobs().iter().map(|blob| blob.chunks.len() as u64).sum(),
        ..Summary::default()
    };
    let mut budget = Budget::new(bootstrap.bytes());
    let names = bootstrap.inode_count().min(bootstrap.bytes().len() as u64 / INODE_SLOT);
    let mut links = Links::with_capacity(names as usize);
    let mut chunks = Vec::new();
    let root = bootstrap.inode(bootstrap.root())?;
    if root.file_type != FileType::Directory {
        return Err(root.error("the root is not a directory"));
    }
    visit(bootstrap, &root, &mut budget, &mut chunks, &mut summary)?;
    links.insert(root.nid, Link::of(&root));
    let mut pending = VecDeque::from([(root.nid, root.nid)]);
    while let Some((nid, parent)) = pending.pop_front() {
        let directory = bootstrap.inode(nid)?;
        let mut previous: Option<&[u8]> = None;
        let mut subdirectories = 0_u32;
        let mut dots = 0;
        for entry in bootstrap.read_dir(nid, 0)? {
            let entry = entry?;
            let shown = entry.name.escape_ascii();
            if previous.is_some_and(|previous| previous >= entry.name) {
                return Err(directory.error(format!("`{shown}` is not in order")));
            }
            previous = Some(entry.name);
            let child = bootstrap.inode(entry.nid)?;
            if child.file_type != entry.file_type {
                return Err(child.error(format!("the entry `{shown}` says {:?}", entry.file_type)));
            }
            if entry.is_dot() {
                dots += 1;
                let expected = if entry.name == b"." { nid } else { parent };
                if entry.nid != expected {
                    return Err(directory.error(format!("`{shown}` leads to {}", entry.nid)));
                }
                continue;
            }
            summary.names += 1;
            if child.file_type == FileType::Directory {
                subdirectories += 1;
                if links.contains_key(&child.nid) {
                    return Err(child.error("a directory with more than one parent"));
                }
                pending.push_back((child.nid, nid));
            }
            match links.entry(child.nid) {
                Entry::Occupied(mut known) => known.get_mut().names += 1,
                Entry::Vacant(new) => {
                    visit(bootstrap, &child, &mut budget, &mut chunks, &mut summary)?;
                    new.insert(Link::of(&child));
                }
            }
        }
        if dots != 2 || directory.nlink != 2 + subdirectories {
            return Err(directory.error(format!(
                "{dots} of `.` and `..`, {} links, {subdirectories} subdirectories",
                directory.nlink
            )));
        }
    }
    let wrong = links.iter().filter(|(_, link)| link.is_file && link.names != link.claimed);
    if let Some((nid, Link { names, claimed, .. })) = wrong.min_by_key(|(nid, _)| **nid) {
        let inode = bootstrap.inode(*nid)?;
        return Err(inode.error(format!("{names} names, but a link count of {claimed}")));
    }
    if summary.names != bootstrap.inode_count() {
        let problem =
            format!("{} names, the image claims {}", summary.names, bootstrap.inode_count());
        return Err(FormatError::new("superblock", 1024, problem));
    }
    Ok(summary)
}

/// Reads all that belongs to one inode.
fn visit<B: AsRef<[u8]>>(
    bootstrap: &Bootstrap<B>,
    inode: &InodeView,
    budget: &mut Budget,
    chunks: &mut Vec<(ChunkRef, Decoded)>,
    summary: &mut Summary,
) -> Result<(), FormatError> {
    budget.charge(inode, bootstrap.chunk_size())?;
    bootstrap.view().xattrs(inode)?;
    match inode.file_type {
        FileType::Directory => summary.directories += 1,
        FileType::Symlink => {
            bootstrap.view().target(inode)?;
            summary.symlinks += 1;
        }
        FileType::Regular => {
            summary.files += 1;
            summary.file_bytes = summary.file_bytes.saturating_add(inode.size);
            summary.chunk_refs += file(bootstrap, inode, chunks)?;
        }
        _ => summary.specials += 1,
    }
    Ok(())
}

/// Checks the chunks of a file and counts them. They are put into `chunks`, which is reused.
fn file<B: AsRef<[u8]>>(
    bootstrap: &Bootstrap<B>,
    inode: &InodeView,
    chunks: &mut Vec<(ChunkRef, Decoded)>,
) -> Result<u64, FormatError> {
    let chunk_size = u64::from(bootstrap.chunk_size());
    chunks.clear();
    for chunk in bootstrap.chunks_of(inode)? {
        chunks.push(chunk?);
    }
    // What of the last chunk is still to come.
    let mut begun: Option<(ChunkRef, Decoded, u64)> = None;
    for (at, (chunk_ref, decoded)) in chunks.iter().enumerate() {
        let ChunkRef { blob, number } = *chunk_ref;
        let chunk = bootstrap.blobs()[usize::from(blob.0)].chunk(number).ok_or_else(|| {
            inode.error(format!("chunk {number} of blob {} is not in the chunk table", blob.0))
        })?;
        let size = chunk_size.min(inode.size - at as u64 * chunk_size);
        let (of, place, left) = match begun.take() {
            Some(begun) => begun,
            None => (*chunk_ref, chunk.decoded, chunk.decoded_size.into()),
        };
        let goes_on = left > chunk_size;
        if of != *chunk_ref || place != *decoded || left.min(chunk_size) != size {
            return Err(inode.error(format!(
                "needs {size} bytes at {decoded}, but chunk {number} of blob {} has {} at {}",
                blob.0, chunk.decoded_size, chunk.decoded
            )));
        }
        begun = goes_on.then(|| (of, Decoded(place.0 + chunk_size), left - chunk_size));
    }
    if let Some((ChunkRef { blob, number }, ..)) = begun {
        return Err(inode.error(format!("ends before chunk {number} of blob {}", blob.0)));
    }
    if !kernel_agrees(inode, bootstrap.chunk_size(), chunks) {
        return Err(inode.error("chunks that are not consecutive are declared as one"));
    }
    Ok(chunks.len() as u64)
}
