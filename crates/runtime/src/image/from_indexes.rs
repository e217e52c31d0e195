//! Images that this node makes itself: the lower layers of an ordinary image, or all of them, by
//! indexes of these layers.

use std::path::Path;

use lazuli_builder::{
    BuildError,
    index::{KnownLayer, assemble},
};
use lazuli_image::{
    Algorithm, Blob, BlobIndex, Digest, FormatError, Points,
    oci::{BlobLayer, IndexImage, IndexedLayer},
    rafs::{self, Bootstrap, WrittenIndex},
};
use lazuli_registry::Manifest;
use lazuli_sys::path_error::At as _;

use super::{
    ImageError, StoredImage,
    chunk_limit::Purpose,
    directory::{BOOTSTRAP, BOOTSTRAP_DIGEST, CONFIG, MANIFEST, Partial, write},
    point_files,
};

/// Why layers cannot be shown by their indexes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PrefixError {
    /// The indexes do not go with each other.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// They lead to an image that breaks the format.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// It cannot be described.
    #[error(transparent)]
    Describe(#[from] lazuli_image::oci::OciError),
    /// It cannot be kept.
    #[error(transparent)]
    Image(#[from] ImageError),
}

/// The points at which decoders can begin in the layers.
type LayerPoints = Vec<(BlobIndex, Points)>;

/// The lower layers of an ordinary image, as an image.
#[derive(Debug)]
pub(crate) struct Prefix {
    /// The digest of its manifest.
    pub(crate) digest: Digest,
    manifest: Vec<u8>,
    bootstrap: Vec<u8>,
    points: LayerPoints,
}

impl Prefix {
    /// Makes the image of `layers`, the lowest of `image`.
    pub(crate) fn new(image: &Manifest, layers: Vec<KnownLayer>) -> Result<Self, PrefixError> {
        let made = assemble(layers)?;
        let indexed: Vec<_> = made.layers.iter().filter_map(describe).collect();
        let (digest, size) =
            (Algorithm::Sha256.digest(&made.bootstrap), made.bootstrap.len() as u64);
        let bootstrap = BlobLayer::new(digest, size);
        let (subject, config) = (image.descriptor(), &image.parsed.config);
        let document = IndexImage::new(subject, config, &indexed, &[], bootstrap)?;
        let (bootstrap, points) = place(made.bootstrap, &made.layers)?;
        // The kernel trusts the bootstrap.
        rafs::check(&open(&bootstrap, &points)?)?;
        let IndexImage { manifest, descriptor } = document;
        Ok(Prefix { digest: descriptor.digest, manifest, bootstrap, points })
    }

    /// Stores the image in `images` unless it exists, and opens it there. `config` is the image's.
    pub(crate) fn store(self, images: &Path, config: &[u8]) -> Result<StoredImage, PrefixError> {
        let directory = images.join(self.digest.hex());
        if let Ok(there) = StoredImage::open_for(&directory, Purpose::New) {
            return Ok(there);
        }
        if directory.exists() {
            std::fs::remove_dir_all(&directory).at(&directory).map_err(ImageError::from)?;
        }
        let partial = Partial::create(images)?;
        write(&partial.0, MANIFEST, &self.manifest)?;
        write(&partial.0, CONFIG, config)?;
        write(&partial.0, BOOTSTRAP, &self.bootstrap)?;
        let digest = Algorithm::Blake3.digest(&self.bootstrap);
        write(&partial.0, BOOTSTRAP_DIGEST, digest.to_string().as_bytes())?;
        let path = partial.0.join(BOOTSTRAP);
        point_files::write(&path, &self.points).at(&path).map_err(ImageError::from)?;
        partial.commit(&directory)?;
        Ok(StoredImage::open_for(&directory, Purpose::New)?)
    }
}

/// The blob of the cache with the content of `layer`; `None` if none of its files has content.
pub(crate) fn blob_of(layer: KnownLayer) -> Result<Option<Blob>, PrefixError> {
    let made = assemble(vec![layer])?;
    let (bootstrap, points) = place(made.bootstrap, &made.layers)?;
    Ok(open(&bootstrap, &points)?.blobs().first().cloned())
}

fn open<'a>(
    bootstrap: &'a [u8],
    points: &[(BlobIndex, Points)],
) -> Result<Bootstrap<&'a [u8]>, FormatError> {
    let mut bootstrap = Bootstrap::open(bootstrap)?;
    for (index, points) in points {
        bootstrap.set_points(*index, points.clone())?;
    }
    Ok(bootstrap)
}

/// The entry of a layer's index in a manifest.
pub(crate) fn describe(layer: &WrittenIndex) -> Option<IndexedLayer> {
    let index = layer.record.tail.index?;
    let (digest, size) = (index.digest, index.size);
    Some(IndexedLayer { layer: layer.record.blob.id, digest, size, tables: layer.tables })
}

/// Writes into a bootstrap where the chunks of `layers` are.
fn place(
    mut bootstrap: Vec<u8>,
    layers: &[WrittenIndex],
) -> Result<(Vec<u8>, LayerPoints), PrefixError> {
    let opened = Bootstrap::open(&bootstrap[..])?;
    let mut tables = Vec::new();
    for index in opened.unplaced() {
        let blob = &opened.blobs()[usize::from(index.0)];
        let layer = layers.iter().find(|layer| layer.record.blob.id == blob.id);
        if let Some(layer) = layer {
            tables.push((*index, rafs::ci_table_of(&layer.bytes, &layer.record.tail)?));
        }
    }
    drop(opened);
    if tables.is_empty() {
        return Ok((bootstrap, Vec::new()));
    }
    let rafs::Placed { at, table, points } = rafs::place_chunks(&bootstrap, &tables)?;
    let at = at as usize;
    bootstrap[at..at + table.len()].copy_from_slice(&table);
    Ok((bootstrap, points))
}
