//! The way back: an image as something plain.
//!
//! ```text
//! tree ─ plan ─┬─ tar         one archive
//!              ├─ layer       the same, as the one layer of an ordinary image
//!              └─ directory   files on this machine
//! ```
//!
//! The order of a plan is the same each time: what has no content, in order of path; files, in the order in which their
//! content lies in the blobs, so that it can be fetched in large ranges; further names of all of these.

mod directory;
mod layer;
mod tar;

use std::io;

use lazuli_image::{ChunkRef, InodeId, Kind, Name, Tree};

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
        /// What was found and what was expected.
        problem: String,
    },
    /// The output cannot be written.
    #[error("cannot write: {0}")]
    Output(#[from] io::Error),
}

/// What files contain: chunk after chunk, in the order of [`Plan::chunks`].
pub trait Content {
    /// Why there is no next chunk.
    type Error: From<UnpackError>;

    /// The next chunk, decoded and checked.
    ///
    /// # Errors
    /// It could not be fetched, or it is not what the image says.
    fn next(&mut self) -> Result<&[u8], Self::Error>;
}

/// One name in the tree.
#[derive(Clone, Copy, Debug)]
struct Place<'a> {
    /// The directory that holds it; the root holds itself.
    parent: usize,
    name: Option<&'a Name>,
    inode: InodeId,
}

/// What is written, and in which order.
#[derive(Debug)]
pub struct Plan<'a> {
    tree: &'a Tree,
    /// The root first, each directory before what is in it.
    places: Vec<Place<'a>>,
    /// Everything but files with content.
    bare: Vec<usize>,
    files: Vec<usize>,
    /// Further names, with the first one.
    links: Vec<(usize, usize)>,
}

impl<'a> Plan<'a> {
    /// Orders the entries of `tree`.
    pub fn new(tree: &'a Tree) -> Self {
        let root = Place { parent: 0, name: None, inode: Tree::ROOT };
        let mut plan =
            Plan { tree, places: Vec::new(), bare: vec![], files: vec![], links: vec![] };
        let mut first = vec![None; tree.len()];
        let mut pending = vec![root];
        while let Some(place) = pending.pop() {
            let at = plan.places.len();
            plan.places.push(place);
            let inode = place.inode;
            if let Some(known) = first[inode.0 as usize] {
                plan.links.push((at, known));
                continue;
            }
            first[inode.0 as usize] = Some(at);
            match &tree[inode].kind {
                Kind::Regular { chunks, .. } if !chunks.is_empty() => plan.files.push(at),
                Kind::Directory(children) => {
                    let child = |(name, inode): (&'a Name, &InodeId)| Place {
                        parent: at,
                        name: Some(name),
                        inode: *inode,
                    };
                    pending.extend(children.iter().rev().map(child));
                    plan.bare.push(at);
                }
                _ => plan.bare.push(at),
            }
        }
        let places = &plan.places;
        plan.files.sort_by_key(|at| match &tree[places[*at].inode].kind {
            Kind::Regular { chunks, .. } => chunks.first().copied(),
            _ => None,
        });
        plan
    }

    /// The chunks of all files, in the order in which they are wanted.
    pub fn chunks(&self) -> Vec<ChunkRef> {
        let chunks = |at: &usize| match &self.tree[self.places[*at].inode].kind {
            Kind::Regular { chunks, .. } => &chunks[..],
            _ => &[],
        };
        self.files.iter().flat_map(chunks).copied().collect()
    }

    /// Names in the tree; hard links count each.
    pub fn names(&self) -> usize {
        self.places.len()
    }

    /// Bytes of all files, each once however many names it has.
    pub fn bytes(&self) -> u64 {
        let size = |at: &usize| match self.tree[self.places[*at].inode].kind {
            Kind::Regular { size, .. } => size,
            _ => 0,
        };
        self.files.iter().map(size).sum()
    }

    /// The sockets, which have no place in a tar.
    pub fn sockets(&self) -> Vec<String> {
        (0..self.places.len()).filter(|at| self.is_socket(*at)).map(|at| self.shown(at)).collect()
    }

    fn is_socket(&self, at: usize) -> bool {
        matches!(self.tree[self.places[at].inode].kind, Kind::Socket)
    }

    /// The path from the root: `a/b`, and nothing for the root itself.
    fn path(&self, mut at: usize) -> Vec<u8> {
        let mut names = Vec::new();
        while let Place { parent, name: Some(name), .. } = self.places[at] {
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
