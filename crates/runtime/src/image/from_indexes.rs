//! Images that this node makes itself: the lower layers of an ordinary image, all of them, or one
//! alone, by indexes of these layers.

use std::path::Path;

use lazuli_builder::{
    BuildError,
    index::{ImageIndex, KnownLayer, assemble, assemble_one},
};
use lazuli_image::{
    Algorithm, Blob, Digest, FormatError,
    oci::{BlobLayer, IndexImage, IndexedLayer},
    rafs::{self, IndexedBootstrap},
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

/// The lower layers of an ordinary image, or one of its layers, as an image.
#[derive(Debug)]
pub(crate) struct Prefix {
    /// The digest of its manifest.
    pub(crate) digest: Digest,
    manifest: Vec<u8>,
    bootstrap: IndexedBootstrap,
}

impl Prefix {
    /// Makes the image of `layers`, the lowest of `image`.
    pub(crate) fn new(image: &Manifest, layers: Vec<KnownLayer>) -> Result<Self, PrefixError> {
        Self::made(image, assemble(layers)?)
    }

    /// Makes the image of one layer of `image`, which a client puts on others by overlayfs.
    pub(crate) fn one(image: &Manifest, layer: KnownLayer) -> Result<Self, PrefixError> {
        Self::made(image, assemble_one(layer)?)
    }

    fn made(image: &Manifest, made: ImageIndex) -> Result<Self, PrefixError> {
        let indexed: Vec<_> = made.layers.iter().filter_map(IndexedLayer::of).collect();
        let (digest, size) =
            (Algorithm::Sha256.digest(&made.bootstrap), made.bootstrap.len() as u64);
        let bootstrap = BlobLayer::new(digest, size);
        let (subject, config) = (image.descriptor(), &image.parsed.config);
        let document = IndexImage::new(subject, config, &indexed, &[], bootstrap, None)?;
        let bootstrap = IndexedBootstrap::new(made.bootstrap, &made.layers)?;
        // The kernel trusts the bootstrap.
        rafs::check(&bootstrap.open()?)?;
        let IndexImage { manifest, descriptor } = document;
        Ok(Prefix { digest: descriptor.digest, manifest, bootstrap })
    }

    /// Opens the image with this digest, which was stored in `images`.
    pub(crate) fn open(images: &Path, digest: &Digest) -> Result<StoredImage, PrefixError> {
        Ok(StoredImage::open_for(&images.join(digest.hex()), Purpose::New)?)
    }

    /// Stores the image in `images` unless it exists, and opens it there. `config` is the image's.
    pub(crate) fn store(self, images: &Path, config: &[u8]) -> Result<StoredImage, PrefixError> {
        if let Ok(there) = Self::open(images, &self.digest) {
            return Ok(there);
        }
        let directory = images.join(self.digest.hex());
        if directory.exists() {
            std::fs::remove_dir_all(&directory).at(&directory).map_err(ImageError::from)?;
        }
        let partial = Partial::create(images)?;
        write(&partial.0, MANIFEST, &self.manifest)?;
        write(&partial.0, CONFIG, config)?;
        let IndexedBootstrap { bytes, points } = self.bootstrap;
        write(&partial.0, BOOTSTRAP, &bytes)?;
        let digest = Algorithm::Blake3.digest(&bytes);
        write(&partial.0, BOOTSTRAP_DIGEST, digest.to_string().as_bytes())?;
        let path = partial.0.join(BOOTSTRAP);
        point_files::write(&path, &points).at(&path).map_err(ImageError::from)?;
        partial.commit(&directory)?;
        Self::open(images, &self.digest)
    }
}

/// The blob of the cache with the content of `layer`; `None` if none of its files has content.
pub(crate) fn blob_of(layer: KnownLayer) -> Result<Option<Blob>, PrefixError> {
    let made = assemble(vec![layer])?;
    let bootstrap = IndexedBootstrap::new(made.bootstrap, &made.layers)?;
    Ok(bootstrap.open()?.blobs().first().cloned())
}
