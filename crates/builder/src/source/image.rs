//! The tree of an image that is made already as a layer.

use std::collections::HashMap;

use lazuli_image::{BlobIndex, InodeId, Kind, Tree};

use crate::{
    entry::{Entry, EntryKind, EntryPath},
    error::SourceError,
    overlay::is_unlisted,
    whiteout,
};

/// Bytes of all paths of a tree. Names that lie deep are many times as long as paths as they are in
/// the image; the largest images have two million files with 200 MB of paths.
const MAX_PATHS: usize = 1 << 30;

/// The kind of image that a tree belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeOf {
    /// A whole image.
    Image,
    /// A single layer: some names are whiteouts, and directories that the layer did not
    /// list are in it.
    Layer,
}

/// Returns all entries, each directory before its children, with blobs renumbered by `place`. For a
/// layer, directories that it did not list are left out.
pub(crate) fn entries(
    tree: &Tree,
    of: TreeOf,
    place: impl Fn(BlobIndex) -> BlobIndex,
) -> Result<Vec<Entry>, SourceError> {
    let mut names = vec![0_u32; tree.len()];
    let directories = (0..tree.len() as u32).filter_map(|id| tree.children(InodeId(id)));
    directories.flat_map(|children| children.values()).for_each(|id| names[id.0 as usize] += 1);
    // First path of every file with several names.
    let mut links: HashMap<InodeId, EntryPath> = HashMap::new();
    let mut entries = Vec::new();
    let mut paths = 0_usize;
    let mut todo = vec![(EntryPath::default(), Tree::ROOT)];
    while let Some((path, id)) = todo.pop() {
        let inode = &tree[id];
        for (name, child) in tree.children(id).into_iter().flatten().rev() {
            let child_path = path.join(name.as_bytes()).map_err(|problem| SourceError::Path {
                path: format!("{path}/{name}"),
                problem: problem.to_string(),
            })?;
            paths += child_path.as_bytes().len();
            if paths > MAX_PATHS {
                return Err(SourceError::Paths { limit: MAX_PATHS });
            }
            todo.push((child_path, *child));
        }
        if of == TreeOf::Layer && (is_unlisted(inode) || whiteout::is_aufs_metadata(&path)) {
            continue;
        }
        let mut entry =
            Entry { path, offset: 0, metadata: inode.metadata.clone(), kind: EntryKind::Directory };
        if of == TreeOf::Layer
            && let Some(hidden) = whiteout::hidden(&entry.path)
        {
            let shown = entry.path.to_string();
            let hidden = hidden.map_err(|problem| SourceError::Path { path: shown, problem })?;
            (entry.path, entry.kind) = hidden;
        } else if let Some(first) = links.get(&id) {
            entry.kind = EntryKind::HardLink(first.clone());
        } else {
            if names[id.0 as usize] > 1 {
                links.insert(id, entry.path.clone());
            }
            entry.kind = kind(&inode.kind, &place);
        }
        entries.push(entry);
    }
    Ok(entries)
}

fn kind(kind: &Kind, place: impl Fn(BlobIndex) -> BlobIndex) -> EntryKind {
    match kind {
        Kind::Directory(_) => EntryKind::Directory,
        Kind::Regular { size, chunks } => {
            let mut chunks = chunks.clone();
            chunks.iter_mut().for_each(|chunk| chunk.blob = place(chunk.blob));
            EntryKind::Regular { size: *size, chunks }
        }
        Kind::Symlink(target) => EntryKind::Symlink(target.clone()),
        Kind::CharDevice(device) => EntryKind::CharDevice(*device),
        Kind::BlockDevice(device) => EntryKind::BlockDevice(*device),
        Kind::Fifo => EntryKind::Fifo,
        Kind::Socket => EntryKind::Socket,
    }
}
