//! Finds all inodes of a bootstrap and numbers them.

use super::layout::{FIRST_INO, ROOT_INO};
use crate::{
    FormatError,
    erofs::{FileType, Nid},
    rafs::{Bootstrap, Budget},
};

/// The inodes that names lead to, in the order of their numbers.
#[derive(Debug)]
pub(super) struct Inodes {
    /// The root, then all others in ascending order.
    nids: Vec<Nid>,
    /// Directories with their parents, in the order of directories; the root is its own parent.
    parents: Vec<(Nid, Nid)>,
    /// Directories in the order in which a walk comes to them.
    walk: Vec<Nid>,
}

impl Inodes {
    /// Walks the tree. Refused are names out of order or twice, entries with another type than
    /// their inode, directories with two names, and inodes that overlap.
    pub(super) fn find<B: AsRef<[u8]>>(bootstrap: &Bootstrap<B>) -> Result<Self, FormatError> {
        let root = bootstrap.inode(bootstrap.root())?;
        if root.file_type != FileType::Directory {
            return Err(root.error("the root is not a directory"));
        }
        let mut budget = Budget::new(bootstrap.bytes());
        let mut nids = Vec::new();
        let mut parents = vec![(root.nid, root.nid)];
        let mut pending = vec![root];
        let mut walk = Vec::new();
        // A directory is charged each time that it is found. So a circle ends, and the names are
        // not more than the bootstrap has room for.
        while let Some(directory) = pending.pop() {
            budget.charge(&directory, bootstrap.chunk_size())?;
            walk.push(directory.nid);
            let below = pending.len();
            let mut previous: Option<&[u8]> = None;
            for entry in bootstrap.read_dir(directory.nid, 0)? {
                let entry = entry?;
                let shown = entry.name.escape_ascii();
                if previous.is_some_and(|previous| previous >= entry.name) {
                    return Err(directory.error(format!("`{shown}` is not in order")));
                }
                previous = Some(entry.name);
                if entry.is_dot() {
                    continue;
                }
                let child = bootstrap.inode(entry.nid)?;
                if child.file_type != entry.file_type {
                    let problem = format!("the entry `{shown}` says {:?}", entry.file_type);
                    return Err(child.error(problem));
                }
                nids.push(child.nid);
                if child.file_type == FileType::Directory {
                    parents.push((child.nid, directory.nid));
                    pending.push(child);
                }
            }
            // The first one is taken next.
            if let Some(children) = pending.get_mut(below..) {
                children.reverse();
            }
        }
        parents.sort_unstable();
        let mut pairs = parents.iter().zip(parents.iter().skip(1));
        if let Some(((twice, _), _)) = pairs.find(|(a, b)| a.0 == b.0) {
            return Err(FormatError::new(*twice, 0, "a directory with more than one parent"));
        }
        nids.push(root.nid);
        nids.sort_unstable();
        nids.dedup();
        if let Ok(at) = nids.binary_search(&root.nid)
            && let Some(before) = nids.get_mut(..=at)
        {
            before.rotate_right(1);
        }
        nids.shrink_to_fit();
        for nid in &nids {
            let inode = bootstrap.inode(*nid)?;
            if inode.file_type != FileType::Directory {
                budget.charge(&inode, bootstrap.chunk_size())?;
            }
        }
        if u32::try_from(nids.len()).is_ok_and(|len| len < u32::MAX - FIRST_INO) {
            return Ok(Inodes { nids, parents, walk });
        }
        Err(root.error(format!("{} inodes", nids.len())))
    }

    /// How many there are; at least the root.
    pub(super) fn len(&self) -> usize {
        self.nids.len()
    }

    /// The one at `position`, with its number; 0 is the root.
    pub(super) fn get(&self, position: usize) -> Option<(Nid, u32)> {
        self.nids.get(position).map(|nid| (*nid, number_at(position)))
    }

    /// The numbers of all, in ascending order.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u32> {
        (0..self.nids.len()).map(number_at)
    }

    /// The last number that is taken; those below [`FIRST_INO`] are reserved.
    pub(super) fn last_number(&self) -> u32 {
        FIRST_INO - 1 + (self.nids.len() - 1) as u32
    }

    /// The number of an inode.
    pub(super) fn number(&self, nid: Nid) -> Option<u32> {
        self.position(nid).map(number_at)
    }

    fn position(&self, nid: Nid) -> Option<usize> {
        let (root, others) = self.nids.split_first()?;
        if nid == *root {
            return Some(0);
        }
        others.binary_search(&nid).ok().map(|at| at + 1)
    }

    /// The positions of all, in the order in which their content is placed. Directories come first,
    /// as a walk reads them: the kernel reads ahead what follows.
    pub(super) fn placement(&self) -> impl Iterator<Item = usize> + '_ {
        let directories = self.walk.iter().filter_map(|nid| self.position(*nid));
        let others = self.nids.iter().zip(0..).filter(|(nid, _)| self.parent(**nid).is_none());
        directories.chain(others.map(|(_, position)| position))
    }

    /// The parent of a directory.
    pub(super) fn parent(&self, directory: Nid) -> Option<Nid> {
        let at = self.parents.binary_search_by_key(&directory, |(directory, _)| *directory).ok()?;
        self.parents.get(at).map(|(_, parent)| *parent)
    }

    /// All directories.
    pub(super) fn directories(&self) -> impl Iterator<Item = Nid> + '_ {
        self.parents.iter().map(|(directory, _)| *directory)
    }
}

/// The number of the inode at `position`.
fn number_at(position: usize) -> u32 {
    match position {
        0 => ROOT_INO,
        others => FIRST_INO - 1 + others as u32,
    }
}
