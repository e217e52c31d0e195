//! Images that a client brings as a bootstrap file, without a manifest: clients of nydusd unpack
//! the bootstrap layer themselves.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use lazuli_image::{
    Algorithm, Digest,
    oci::{BlobLayer, ImageConfig, LazyImage, Manifest, OciError, Platform},
    rafs::BlobRecord,
};
use lazuli_registry::Pull;
use lazuli_sys::path_error::At as _;
use rustix::fs::{Mode, OFlags};

use super::{
    ImageError, StoredImage,
    chunk_limit::Purpose,
    directory::{BOOTSTRAP, BOOTSTRAP_DIGEST, CONFIG, MANIFEST, Partial, write},
    fetch::{complete, unusable},
    fetched::Fetched,
    unpack::{self, BOOTSTRAP_LIMIT, UnpackError, blocking},
};

/// A bootstrap in a file.
#[derive(Debug)]
pub(crate) struct BootstrapFile {
    path: PathBuf,
    file: File,
    size: u64,
    /// Its SHA-256, by which it is admitted.
    pub(crate) digest: Digest,
}

impl BootstrapFile {
    /// Reads the file to its end. Blocks.
    pub(crate) fn open(path: &Path) -> Result<Self, ImageError> {
        // The open of a pipe would wait for its other end.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(io::Error::from);
        let file = File::from(file.at(path)?);
        let metadata = file.metadata().at(path)?;
        if !metadata.is_file() {
            return Err(damaged(path, "a bootstrap is a regular file"));
        }
        let size = metadata.len();
        if size > BOOTSTRAP_LIMIT {
            return Err(unusable(&path.display().to_string(), UnpackError::TooLarge(size)));
        }
        let digest = unpack::sha256(&file, size).at(path)?;
        Ok(BootstrapFile { path: path.to_owned(), file, size, digest })
    }

    /// Copies the bootstrap, which was admitted, to `images`, and reads its tables.
    pub(crate) async fn read(self, images: &Path) -> Result<ReadBootstrap, ImageError> {
        let BootstrapFile { path, file, size, digest } = self;
        let partial = Partial::create(images)?;
        let to = partial.0.join(BOOTSTRAP);
        let copied = blocking(move || unpack::copy(&file, (size, digest), &to)).await;
        let copied = copied.map_err(|error| unusable(&path.display().to_string(), error))?;
        let image = describe(&copied.records(), BlobLayer::new(digest, size));
        let image = image.map_err(|error| damaged(&path, &error.to_string()))?;
        Ok(ReadBootstrap { path, partial, copied, image })
    }
}

/// A bootstrap whose tables were read.
pub(crate) struct ReadBootstrap {
    path: PathBuf,
    partial: Partial,
    copied: unpack::Unpacked,
    image: LazyImage,
}

impl ReadBootstrap {
    /// The digest of the manifest that the image has here.
    pub(crate) fn manifest_digest(&self) -> Digest {
        self.image.digest
    }

    /// Makes the image in `images`, unless it is there. Its blobs are in `repository`.
    pub(crate) async fn store(
        self,
        repository: &Arc<dyn Pull>,
        images: &Path,
    ) -> Result<(StoredImage, Fetched), ImageError> {
        let ReadBootstrap { path, partial, copied, image } = self;
        let directory = images.join(image.digest.hex());
        let mut fetched = Fetched::default();
        if directory.exists() {
            match StoredImage::open_for(&directory, Purpose::Known) {
                Ok(image) => return Ok((image, fetched)),
                Err(error @ (ImageError::Damaged { .. } | ImageError::Io { .. })) => {
                    tracing::warn!(%error, "making the image's metadata again");
                    fs::remove_dir_all(&directory).at(&directory)?;
                }
                Err(error) => return Err(error),
            }
        }
        let manifest = Manifest::parse(&image.manifest);
        let manifest = manifest.map_err(|error| damaged(&path, &error.to_string()))?;
        let places = repository.clone().places();
        let completed = complete(&**repository, &places, &manifest, copied, &mut fetched).await?;
        write(&partial.0, MANIFEST, &image.manifest)?;
        write(&partial.0, CONFIG, &image.config)?;
        let checksum = Algorithm::Blake3.digest(completed.bootstrap.bytes());
        write(&partial.0, BOOTSTRAP_DIGEST, checksum.to_string().as_bytes())?;
        partial.commit(&directory)?;
        drop(completed);
        Ok((StoredImage::open_for(&directory, Purpose::New)?, fetched))
    }
}

/// The documents of the image; those in its registry are not known.
fn describe(records: &[BlobRecord], bootstrap: BlobLayer) -> Result<LazyImage, OciError> {
    let blob = |BlobRecord { blob, tail }: &BlobRecord| match tail.index {
        // What leads into an unconverted layer is a blob of its own.
        Some(index) => BlobLayer::new(index.digest, index.size),
        None => BlobLayer::new(blob.id, blob.stored_size),
    };
    let blobs: Vec<_> = records.iter().map(blob).collect();
    let (config, diff_id) = (ImageConfig::new(&Platform::host()), bootstrap.digest);
    LazyImage::new(&config, &blobs, bootstrap, diff_id, BTreeMap::new())
}

fn damaged(path: &Path, problem: &str) -> ImageError {
    ImageError::Damaged { path: path.to_owned(), problem: problem.to_owned() }
}
