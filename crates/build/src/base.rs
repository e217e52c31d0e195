//! An image as the lowest layer of another one: a layer that was read before, with all of its content stored.

use std::collections::HashMap;

use lazuli_image::{
    Algorithm, BlobIndex, ChunkRef, InodeId, Kind, Tree,
    rafs::{BlobRecord, Bootstrap},
};

use crate::{
    Dictionary, Layer, LayerRecord, LayerSource, Options,
    entry::{Entry, EntryKind, EntryPath},
    error::BuildError,
};

/// A blob of an image that another one is made on.
#[derive(Clone, Debug)]
pub struct BaseBlob {
    /// What the image's bootstrap says about it.
    pub record: BlobRecord,
    /// The content of its `.blob.meta` file.
    pub meta_file: Vec<u8>,
    /// Stored bytes at its beginning that a start reads, if that is known.
    pub hot_bytes: Option<u64>,
}

/// An image that layers are put on.
#[derive(Debug)]
pub struct Base {
    /// Its blobs.
    pub dictionary: Dictionary,
    /// Its files.
    pub layer: Layer,
}

impl Base {
    /// The image of this name. `options` become those that its blobs were made with, as far as it decides that.
    ///
    /// # Errors
    /// Its digests are not BLAKE3, or a path of it is longer than Linux can use.
    pub fn new<B: AsRef<[u8]>>(
        name: String,
        image: &Bootstrap<B>,
        blobs: Vec<BaseBlob>,
        options: &mut Options,
    ) -> Result<Self, BuildError> {
        if image.digest_algorithm() != Algorithm::Blake3 {
            return Err(BuildError::Base("has digests that are not BLAKE3"));
        }
        options.chunk_size = image.chunk_size();
        options.codec = blobs.first().map_or(options.codec, |blob| blob.record.blob.codec);
        let record = record(image)?;
        let source = LayerSource::Known(Box::new(record));
        let layer = Layer { name, stored_size: None, source };
        Ok(Base { dictionary: Dictionary::of_base(blobs, options.chunk_size), layer })
    }
}

/// All files of an image, and their chunks.
fn record<B: AsRef<[u8]>>(image: &Bootstrap<B>) -> Result<LayerRecord, BuildError> {
    let tree = image.tree()?;
    let mut walk = Walk { tree: &tree, names: HashMap::new(), entries: Vec::new() };
    walk.add(EntryPath::default(), Tree::ROOT);
    let mut todo = vec![(EntryPath::default(), Tree::ROOT)];
    while let Some((path, directory)) = todo.pop() {
        for (name, &id) in tree.children(directory).into_iter().flatten() {
            let path = path.join(name.as_bytes());
            let path = path.map_err(|_| BuildError::Base("has a path that is too long"))?;
            if tree.children(id).is_some() {
                todo.push((path.clone(), id));
            }
            walk.add(path, id);
        }
    }
    let mut entries = walk.entries;
    let mut chunks = Vec::new();
    for entry in &mut entries {
        let EntryKind::Regular { chunks: refs, .. } = &mut entry.kind else { continue };
        for chunk in refs {
            let blob = image.blobs().get(usize::from(chunk.blob.0));
            let found = blob.and_then(|blob| blob.chunk(chunk.number));
            let found = found.ok_or(BuildError::Base("has a chunk that no table lists"))?;
            *chunk = ChunkRef { blob: BlobIndex(0), number: chunks.len() as u32 };
            chunks.push((found.digest.hash, found.decoded_size));
        }
    }
    Ok(LayerRecord::new(image.chunk_size(), entries, chunks))
}

struct Walk<'a> {
    tree: &'a Tree,
    /// First path of every file.
    names: HashMap<InodeId, EntryPath>,
    entries: Vec<Entry>,
}

impl Walk<'_> {
    fn add(&mut self, path: EntryPath, id: InodeId) {
        let inode = &self.tree[id];
        let kind = match self.names.get(&id) {
            Some(first) => EntryKind::HardLink(first.clone()),
            None => entry_kind(&inode.kind),
        };
        self.names.entry(id).or_insert_with(|| path.clone());
        self.entries.push(Entry { path, offset: 0, metadata: inode.metadata.clone(), kind });
    }
}

fn entry_kind(kind: &Kind) -> EntryKind {
    match kind {
        Kind::Directory(_) => EntryKind::Directory,
        Kind::Regular { size, chunks } => {
            EntryKind::Regular { size: *size, chunks: chunks.clone() }
        }
        Kind::Symlink(target) => EntryKind::Symlink(target.clone()),
        Kind::CharDevice(device) => EntryKind::CharDevice(*device),
        Kind::BlockDevice(device) => EntryKind::BlockDevice(*device),
        Kind::Fifo => EntryKind::Fifo,
        Kind::Socket => EntryKind::Socket,
    }
}
