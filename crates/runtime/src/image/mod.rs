//! Images on this node: their manifests, and their bootstraps on disk.
//!
//! ```text
//! images/<manifest digest>/
//!   manifest.json   as the registry holds it; its digest is the directory's name
//!   config.json     as the registry holds it; its digest is in the manifest
//!   bootstrap       unpacked from the layer whose digest is in the manifest, made from the
//!                   layers' tables of contents, or copied from a client's file, for which this
//!                   node writes manifest and config; always RAFS v6
//!   bootstrap.digest
//!   bootstrap.points-N  where decoders can begin in blob N, an unconverted gzip layer
//!   removed         there if containerd has removed the image and the rest may go
//!   layer.diff-id   digest of the tar in that layer; missing if an earlier version fetched it
//! ```
//!
//! A directory appears whole (it is filled under another name and renamed) and is never changed.
//! Nothing is synced, since a start waits for it: what a power cut damages is found by the digests
//! when it is opened, and fetched again.

pub mod chain;
mod chunk_limit;
mod directory;
mod error;
mod fetch;
mod fetched;
mod files;
mod from_bootstrap;
pub(crate) mod from_indexes;
mod point_files;
pub(crate) mod removed;
mod seekable;
mod tables;
mod unpack;
mod walk;
#[cfg(fuzzing)]
pub(crate) use unpack::fuzz;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    pin::pin,
    sync::Arc,
};

use lazuli_image::{
    Algorithm, Blob, Digest,
    oci::{Descriptor, Manifest, NotedGuess, media_type},
    rafs::{
        self, Bootstrap,
        layout::{MAX_ROWS, Origin},
    },
    seekable::SeekableLayer,
};
use lazuli_registry::{self as registry, Pull, SeekableLayers};
use lazuli_sys::{
    mmap::{FinishedFile, Map},
    path_error::At as _,
};

pub(crate) use self::directory::{directories, sweep, sync};
use self::{
    chunk_limit::Purpose,
    directory::{BOOTSTRAP, BOOTSTRAP_DIGEST, CONFIG, MANIFEST, Partial, read},
    fetch::{FetchedMetadata, Form, fill},
    point_files::Unusable,
};
pub use self::{
    directory::bootstrap_path, error::ImageError, fetched::Fetched, unpack::UnpackError,
};
pub(crate) use self::{
    files::files_with, from_bootstrap::BootstrapFile, seekable::lone_layer, walk::walk,
};

/// An image whose metadata is on this node.
#[derive(Debug)]
pub struct StoredImage {
    /// Its directory.
    pub directory: PathBuf,
    /// Digest of its manifest.
    pub manifest_digest: Digest,
    /// The descriptor of its manifest in other documents.
    pub descriptor: Descriptor,
    /// Stored bytes at the beginning of each blob of the bootstrap that its maker calls hot.
    pub hot: Vec<u64>,
    /// What its maker guesses to be read by a start.
    pub guess: Option<NotedGuess>,
    /// Its config, as the registry holds it.
    pub config: serde_json::Value,
    /// Its file tree and chunk tables.
    pub bootstrap: Arc<Bootstrap<Map>>,
    /// Bytes of all its lazy layers as stored: the size of a full pull.
    pub bytes_total: u64,
    /// Whether the image has no other layers. Otherwise ordinary layers are on top, which
    /// containerd unpacks.
    pub whole: bool,
}

impl StoredImage {
    /// Refuses an image, named `image`, that has ordinary layers on top. They would be missing
    /// where the client does not mount them itself.
    pub fn must_be_whole(&self, image: String) -> Result<(), ImageError> {
        if self.whole { Ok(()) } else { Err(ImageError::LayersOnTop { image }) }
    }

    /// Returns whether the manifest leads to an image's metadata, where `seekable` layers count.
    pub(crate) fn has_metadata(manifest: &Manifest, seekable: SeekableLayers) -> bool {
        Form::of(manifest, seekable).is_some()
    }

    /// Fetches the metadata of the image with this manifest that `images` lacks. Upper layers may
    /// be ordinary.
    pub async fn fetch(
        repository: Arc<dyn Pull>,
        manifest: &registry::Manifest,
        images: &Path,
        seekable: SeekableLayers,
    ) -> Result<(Self, Fetched), ImageError> {
        let admission = std::future::ready(Ok::<_, ImageError>(()));
        let (image, fetched, ()) =
            Self::fetch_admitted(repository, manifest, images, seekable, admission).await?;
        Ok((image, fetched))
    }

    /// Like `fetch`, for an image that has to be admitted. Its layers are requested meanwhile, but
    /// neither read nor kept before the admission.
    pub async fn fetch_admitted<T, E: From<ImageError>>(
        repository: Arc<dyn Pull>,
        manifest: &registry::Manifest,
        images: &Path,
        seekable: SeekableLayers,
        admission: impl Future<Output = Result<T, E>>,
    ) -> Result<(Self, Fetched, T), E> {
        let form = Form::of(&manifest.parsed, seekable);
        let form = form.ok_or_else(|| ImageError::NotLazy { image: repository.describe() })?;
        Self::fetch_form(repository, manifest, form, images, admission).await
    }

    /// One layer of an image that was admitted, by its table of contents, as an image of its own:
    /// [`seekable::lone_layer`].
    pub(crate) async fn fetch_layer(
        repository: Arc<dyn Pull>,
        layer: &registry::Manifest,
        images: &Path,
    ) -> Result<Self, ImageError> {
        let own = layer.parsed.layers.first().and_then(SeekableLayer::of);
        let own = own.ok_or_else(|| ImageError::NotLazy { image: repository.describe() })?;
        let admission = std::future::ready(Ok::<_, ImageError>(()));
        let form = Form::SeekableLayer(own);
        let (image, ..) = Self::fetch_form(repository, layer, form, images, admission).await?;
        Ok(image)
    }

    async fn fetch_form<T, E: From<ImageError>>(
        repository: Arc<dyn Pull>,
        manifest: &registry::Manifest,
        form: Form<'_>,
        images: &Path,
        admission: impl Future<Output = Result<T, E>>,
    ) -> Result<(Self, Fetched, T), E> {
        let mut fetched = Fetched { bytes: manifest.raw.len() as u64, requests: 1 };
        let directory = images.join(manifest.digest.hex());
        let mut admission = pin!(admission);
        let mut early = None;
        if directory.exists() {
            let admitted = admission.as_mut().await?;
            match Self::open_for(&directory, Purpose::New) {
                Ok(image) => return Ok((image, fetched, admitted)),
                Err(error @ (ImageError::Damaged { .. } | ImageError::Io { .. })) => {
                    tracing::warn!(%error, "fetching the image's metadata again");
                    fs::remove_dir_all(&directory).at(&directory).map_err(ImageError::from)?;
                }
                Err(error) => return Err(error.into()),
            }
            early = Some(admitted);
        }
        let admission = async {
            match early {
                Some(admitted) => Ok(admitted),
                None => admission.await,
            }
        };
        let partial = Partial::create(images)?;
        let filled = fill(&repository, manifest, form, &partial.0, &mut fetched, admission).await?;
        let (content, admitted) = filled;
        partial.commit(&directory)?;
        Ok((Self::of(directory, manifest.digest, content)?, fetched, admitted))
    }

    /// Returns whether `images` has a directory for the image.
    pub fn is_in(images: &Path, manifest: &Digest) -> bool {
        images.join(manifest.hex()).exists()
    }

    /// Opens an image that [`StoredImage::fetch`] put there.
    pub fn open(directory: &Path) -> Result<Self, ImageError> {
        Self::open_for(directory, Purpose::Known)
    }

    fn open_for(directory: &Path, purpose: Purpose) -> Result<Self, ImageError> {
        let damaged = |name: &str, problem: &str| ImageError::Damaged {
            path: directory.join(name),
            problem: problem.to_owned(),
        };
        let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let manifest_digest = Digest::from_hex(Algorithm::Sha256, name)
            .ok_or_else(|| damaged("", "the directory's name is not a digest"))?;
        let raw = read(directory, MANIFEST)?;
        if !manifest_digest.matches(&raw) {
            return Err(damaged(MANIFEST, "its digest is not the directory's name"));
        }
        let config = read(directory, CONFIG)?;
        let path = directory.join(BOOTSTRAP);
        let map = FinishedFile::open(&path).and_then(Map::of).at(&path)?;
        let digest = read(directory, BOOTSTRAP_DIGEST)?;
        if Algorithm::Blake3.digest(map.as_ref()).to_string().as_bytes() != digest {
            return Err(damaged(BOOTSTRAP, "its content is not what was unpacked"));
        }
        let format = |source| ImageError::Format { image: manifest_digest.to_string(), source };
        let (bootstrap, reservation) = match chunk_limit::find(&manifest_digest, map.as_ref()) {
            Some(bootstrap) => (bootstrap, None),
            None => {
                let count = rafs::chunk_rows(map.as_ref()).map_err(format)?;
                let reservation =
                    chunk_limit::reserve(count.min(MAX_ROWS), purpose).map_err(|left| {
                        let source = UnpackError::TooManyChunks { count, left };
                        ImageError::Unpack { image: manifest_digest.to_string(), source }
                    })?;
                let mut bootstrap = Bootstrap::open(map).map_err(format)?;
                point_files::attach(&path, &mut bootstrap).map_err(|unusable| {
                    let Unusable { path, problem } = unusable;
                    ImageError::Damaged { path, problem: problem.to_string() }
                })?;
                (Arc::new(bootstrap), Some(reservation))
            }
        };
        let content = FetchedMetadata { manifest: raw, config, bootstrap, reservation };
        Self::of(directory.to_owned(), manifest_digest, content)
    }

    /// The image with this content, which has the digest `manifest_digest`, is in `directory`.
    fn of(
        directory: PathBuf,
        manifest_digest: Digest,
        content: FetchedMetadata,
    ) -> Result<Self, ImageError> {
        let damaged = |name: &str, problem: &str| ImageError::Damaged {
            path: directory.join(name),
            problem: problem.to_owned(),
        };
        let FetchedMetadata { manifest: raw, config, bootstrap, reservation } = content;
        chunk_limit::share(&manifest_digest, &bootstrap);
        drop(reservation);
        let manifest =
            Manifest::parse(&raw).map_err(|error| damaged(MANIFEST, &error.to_string()))?;
        if !manifest.config.digest.matches(&config) {
            return Err(damaged(CONFIG, "its digest is not the one in the manifest"));
        }
        let config =
            serde_json::from_slice(&config).map_err(|error| damaged(CONFIG, &error.to_string()))?;
        let listed = |blob: &Digest| manifest.layers.iter().any(|layer| layer.digest == *blob);
        let records = bootstrap.blobs().iter().zip(bootstrap.tails());
        // For an unconverted layer the manifest has the index.
        let needed = records.map(|(blob, tail)| tail.index.map_or(blob.id, |index| index.digest));
        if let Some(blob) = needed.into_iter().find(|blob| !listed(blob)) {
            let image = manifest_digest.to_string();
            return Err(ImageError::UnlistedBlob { image, blob });
        }
        let records = bootstrap.blobs().iter().zip(bootstrap.tails());
        // The image that was made of an artifact lists the layers beside their indexes.
        let is_beside = |blob: &Digest| !listed(blob);
        let indexed = records.filter(|(blob, tail)| tail.index.is_some() && is_beside(&blob.id));
        let indexed_bytes: u64 = indexed.map(|(blob, _)| blob.stored_size).sum();
        let is_seekable = bootstrap.origin() == Origin::Seekable;
        let lazy = match manifest.lazy_base() {
            Some((data, _)) => data.len() + 1,
            None if is_seekable => manifest.layers.len(),
            None => 0,
        };
        let lazy = &manifest.layers[..lazy];
        // What an index says of its layer is noted at the index.
        let is_of = |layer: &&Descriptor, blob: Digest| {
            layer.digest == blob || layer.index_of() == Some(blob)
        };
        let layer_of = |blob: &Blob| manifest.layers.iter().find(|layer| is_of(layer, blob.id));
        let hot_of =
            |blob: &Blob| layer_of(blob).and_then(Descriptor::hot_bytes).unwrap_or_default();
        let hot = match is_seekable {
            true => seekable::hot(&bootstrap),
            false => bootstrap.blobs().iter().map(hot_of).collect(),
        };
        let media_type = manifest.media_type.clone();
        Ok(StoredImage {
            manifest_digest,
            descriptor: Descriptor {
                media_type: media_type.unwrap_or_else(|| media_type::MANIFEST.to_owned()),
                digest: manifest_digest,
                size: raw.len() as u64,
                annotations: BTreeMap::new(),
                platform: None,
                artifact_type: None,
            },
            hot,
            guess: manifest.guess(),
            config,
            bootstrap,
            bytes_total: lazy.iter().map(|layer| layer.size).sum::<u64>() + indexed_bytes,
            whole: lazy.len() == manifest.layers.len(),
            directory,
        })
    }

    /// The bootstrap's file, for the kernel to mount.
    pub fn bootstrap_path(&self) -> PathBuf {
        bootstrap_path(&self.directory)
    }
}
