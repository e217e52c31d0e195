//! A small image to try drivers with.

use lazuli_image::{
    Algorithm, Blob, BlobIndex, Chunk, ChunkRef, Codec, Decoded, FormatError, Inode, Kind,
    Metadata, Name, Stored, Tree,
    rafs::{BlobRecord, BootstrapOptions, blob_tail, write_bootstrap},
};

/// Content of the image's file.
pub(super) const CONTENT: &[u8] = b"lazuli";

/// An image with one file, `file`, that consists of one chunk. Its blob begins with [`CONTENT`].
pub(super) struct TinyImage {
    pub(super) blob: Blob,
    pub(super) bootstrap: Vec<u8>,
}

impl TinyImage {
    pub(super) fn new() -> Result<Self, String> {
        Self::make().map_err(|error| error.to_string())
    }

    fn make() -> Result<Self, FormatError> {
        let chunk = Chunk {
            number: 0,
            digest: Algorithm::Blake3.digest(CONTENT),
            stored: Stored(0),
            stored_size: CONTENT.len() as u32,
            decoded: Decoded(0),
            decoded_size: CONTENT.len() as u32,
            part: None,
        };
        let mut hasher = Algorithm::Sha256.hasher();
        hasher.update(CONTENT);
        let tail = blob_tail(&[chunk], hasher, Codec::Zstd)?;
        let blob = Blob {
            id: tail.id,
            codec: Codec::Zstd,
            points: lazuli_image::Points::default(),
            stored_size: tail.stored_size,
            decoded_size: tail.decoded_size,
            chunks: vec![chunk].into(),
        };
        let mut tree = Tree::new(Metadata { permissions: 0o755, ..Metadata::default() });
        let chunks = vec![ChunkRef { blob: BlobIndex(0), number: 0 }];
        let kind = Kind::Regular { size: CONTENT.len() as u64, chunks };
        let file = tree.add(Inode { metadata: Metadata::default(), kind });
        if let (Some(root), Ok(name)) = (tree.children_mut(Tree::ROOT), Name::new(b"file")) {
            root.insert(name, file);
        }
        let records = [BlobRecord { blob: blob.clone(), tail: tail.info }];
        let bootstrap = write_bootstrap(&tree, &records, &BootstrapOptions::default())?;
        Ok(TinyImage { blob, bootstrap })
    }
}
