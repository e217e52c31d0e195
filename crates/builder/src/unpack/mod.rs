//! Unpacking: an image as a tar, a layer or a directory.
//!
//! ```text
//! tree ─ order ─┬─ tar         one archive
//!              ├─ layer       the same, as the one layer of an ordinary image
//!              └─ directory   files on this machine
//! ```
//!
//! The order is depth first: a program that extracts the tar then knows when a directory is
//! complete and its time can be set. What has been named before is a hard link.

mod directory;
mod layer;
mod tar;

use std::io;

use lazuli_image::{ChunkRef, Inode, InodeId, Kind, Name, Tree};

use crate::overlay::is_unlisted;

pub use directory::directory;
pub use layer::{FlatLayer, layer};
pub use tar::tar;

/// Why an image was not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// An entry cannot be made.
    #[error("{path}: {problem}")]
    Entry {
        /// Its path, bytes that are not printable ASCII escaped.
        path: String,
        /// The value found, and the one expected.
        problem: String,
    },
    /// The output cannot be written.
    #[error("cannot write: {0}")]
    Output(#[from] io::Error),
}

/// The content of files: chunk after chunk, in the order of [`EntryOrder::chunks`].
pub trait ChunkSource {
    /// Why there is no next chunk.
    type Error: From<UnpackError>;

    /// Returns the next chunk, decoded and checked.
    ///
    /// # Errors
    /// It could not be fetched, or it is not what the image says.
    fn next(&mut self) -> Result<&[u8], Self::Error>;
}

/// One name in the tree.
#[derive(Clone, Copy, Debug)]
struct NamedInode<'a> {
    /// The directory that holds it; the root holds itself.
    parent: usize,
    name: Option<&'a Name>,
    inode: InodeId,
    /// The first place with this inode.
    first: usize,
}

/// The entries to write, in order.
#[derive(Debug)]
pub struct EntryOrder<'a> {
    tree: &'a Tree,
    /// The root first, each directory before what is in it.
    places: Vec<NamedInode<'a>>,
    is_layer: bool,
}

impl<'a> EntryOrder<'a> {
    /// Orders the entries of `tree`.
    pub fn new(tree: &'a Tree) -> Self {
        let mut places = Vec::new();
        let mut known = vec![None; tree.len()];
        let mut pending = vec![(0, None, Tree::ROOT)];
        while let Some((parent, name, inode)) = pending.pop() {
            let at = places.len();
            let first = *known[inode.0 as usize].get_or_insert(at);
            places.push(NamedInode { parent, name, inode, first });
            let children = tree.children(inode).into_iter().flatten().rev();
            pending.extend(children.map(|(name, inode)| (at, Some(name), *inode)));
        }
        EntryOrder { tree, places, is_layer: false }
    }

    /// The same for the tree of a single layer, as [`crate::build_layer`] makes it: the tar of it,
    /// too, does not list directories that the layer did not.
    pub fn of_layer(tree: &'a Tree) -> Self {
        EntryOrder { is_layer: true, ..EntryOrder::new(tree) }
    }

    /// The chunks of all files, in the order in which they are wanted.
    pub fn chunks(&self) -> Vec<ChunkRef> {
        let chunks = |inode: &'a Inode| match &inode.kind {
            Kind::Regular { chunks, .. } => &chunks[..],
            _ => &[],
        };
        self.inodes().flat_map(|(_, inode)| chunks(inode)).copied().collect()
    }

    /// Every inode, at its first place.
    fn inodes(&self) -> impl DoubleEndedIterator<Item = (usize, &'a Inode)> {
        let firsts = (0..self.places.len()).filter(|at| self.places[*at].first == *at);
        firsts.map(|at| (at, self.inode(at)))
    }

    fn inode(&self, at: usize) -> &'a Inode {
        &self.tree[self.places[at].inode]
    }

    /// Names in the tree; hard links count each.
    pub fn names(&self) -> usize {
        self.places.len()
    }

    /// Bytes of all files, each once however many names it has.
    pub fn bytes(&self) -> u64 {
        let size = |(_, inode): (usize, &Inode)| match inode.kind {
            Kind::Regular { size, .. } => size,
            _ => 0,
        };
        self.inodes().map(size).sum()
    }

    /// The sockets, which have no place in a tar.
    pub fn sockets(&self) -> Vec<String> {
        (0..self.places.len()).filter(|at| self.is_socket(*at)).map(|at| self.shown(at)).collect()
    }

    /// Returns whether a tar has no member for the entry.
    fn is_left_out(&self, at: usize) -> bool {
        self.is_socket(at) || self.is_layer && is_unlisted(self.inode(at))
    }

    fn is_socket(&self, at: usize) -> bool {
        matches!(self.inode(at).kind, Kind::Socket)
    }

    /// The path from the root: `a/b`, and nothing for the root itself.
    fn path(&self, mut at: usize) -> Vec<u8> {
        let mut names = Vec::new();
        while let NamedInode { parent, name: Some(name), .. } = self.places[at] {
            names.push(name.as_bytes());
            at = parent;
        }
        names.reverse();
        names.join(&b'/')
    }

    fn shown(&self, at: usize) -> String {
        format!("/{}", self.path(at).escape_ascii())
    }

    fn error(&self, at: usize, problem: impl ToString) -> UnpackError {
        UnpackError::Entry { path: self.shown(at), problem: problem.to_string() }
    }
}
