//! An image as the lowest layer of another one: a layer that was read before, with all of its
//! content stored.

use lazuli_image::{Algorithm, BlobIndex, ChunkRef, rafs::Bootstrap};

use crate::{
    Dictionary, KnownBlob, Layer, LayerContents, LayerSource, Options,
    entry::EntryKind,
    error::BuildError,
    source::image::{self, TreeOf},
};

/// An image that layers are put on.
#[derive(Debug)]
pub struct Base {
    /// Its blobs.
    pub dictionary: Dictionary,
    /// Its files.
    pub layer: Layer,
}

impl Base {
    /// Takes the image `name` as a base. Sets in `options` what the image's blobs determine.
    ///
    /// # Errors
    /// Its digests are not BLAKE3, or one of its paths is longer than Linux can use.
    pub fn new<B: AsRef<[u8]>>(
        name: String,
        image: &Bootstrap<B>,
        blobs: Vec<KnownBlob>,
        options: &mut Options,
    ) -> Result<Self, BuildError> {
        if image.digest_algorithm() != Algorithm::Blake3 {
            return Err(BuildError::Base("has digests that are not BLAKE3"));
        }
        options.chunk_size = image.chunk_size();
        options.codec = blobs.first().map_or(options.codec, |blob| blob.record.blob.codec);
        let record = record(&name, image)?;
        let source = LayerSource::Known(Box::new(record));
        let layer = Layer { name, stored_size: None, source };
        Ok(Base { dictionary: Dictionary::of_base(blobs, options.chunk_size), layer })
    }
}

/// All files of an image, and their chunks.
fn record<B: AsRef<[u8]>>(name: &str, image: &Bootstrap<B>) -> Result<LayerContents, BuildError> {
    let entries = image::entries(&image.tree()?, TreeOf::Image, |blob| blob);
    let mut entries =
        entries.map_err(|problem| BuildError::Layer { layer: name.to_owned(), problem })?;
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
    Ok(LayerContents::new(image.chunk_size(), entries, chunks))
}
