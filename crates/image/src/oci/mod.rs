//! Lazy images in the terms of a registry: manifest, configuration, media types and annotations.
//!
//! ```text
//! manifest ─ config          the source image's own, with other `rootfs` and `history`
//!          ├ layers[0..n]    data blobs
//!          └ layers[n]       bootstrap: a tar with image/image.boot and image/<id>.blob.meta
//! ```
//! The bootstrap is the last layer, because that is the only one that readers test for its
//! annotation.

mod artifact;
mod config;
mod guess;
mod index_image;
mod platform;

pub use artifact::ArtifactLayer;
pub use config::ImageConfig;
pub use guess::NotedGuess;
use index_image::index_layer;
pub use index_image::{
    EMPTY_CONFIG, IndexImage, IndexedLayer, layer_index_manifest, layer_index_tag,
};
pub use platform::{InvalidPlatform, Platform};

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::{Algorithm, Digest};

/// Computes the chain ids of layers from their DiffIDs, lowest first. containerd names a layer on
/// top of those below it by its chain id. (OCI image specification, "Layer ChainID".)
pub fn chain_ids(diff_ids: impl IntoIterator<Item = Digest>) -> Vec<Digest> {
    let mut chain: Vec<Digest> = Vec::new();
    for diff_id in diff_ids {
        let id = chain.last().map_or(diff_id, |below| {
            Algorithm::Sha256.digest(format!("{below} {diff_id}").as_bytes())
        });
        chain.push(id);
    }
    chain
}

/// Maximum size of a manifest, an index or a configuration, in bytes. Registries accept 4 MiB and
/// no more.
pub const MAX_DOCUMENT: usize = 4 << 20;

/// Media types.
pub mod media_type {
    /// An OCI image manifest.
    pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
    /// An OCI image index.
    pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
    /// An OCI image configuration.
    pub const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
    /// Type of a lazy manifest that stands in an index beside an ordinary one, in the words of
    /// upstream's converter. It is the artifact type of the descriptor rather than a media type.
    pub const LAZY_MANIFEST: &str = "application/vnd.nydus.image.manifest.v1+json";
    /// A layer that is a gzipped tar.
    pub const LAYER_GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
    /// Docker's name for such a layer.
    pub const DOCKER_LAYER_GZIP: &str = "application/vnd.docker.image.rootfs.diff.tar.gzip";
    /// A layer that is a tar compressed with zstd.
    pub const LAYER_ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
    /// A data blob.
    pub const DATA_BLOB: &str = "application/vnd.oci.image.layer.nydus.blob.v1";
    /// A referrer that makes an ordinary image readable in places.
    pub const LAYER_INDEX: &str = "application/vnd.lazuli.index.v1";
    /// One layer of an image that is shown by its table of contents. No registry has such
    /// manifests.
    pub const SEEKABLE_LAYER: &str = "application/vnd.lazuli.seekable-layer.v1";
    /// Docker's image configuration.
    pub const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
    /// Configuration of a lazy image, from converters that mark it so that other runtimes don't try
    /// to run the image.
    pub const LAZY_CONFIG: &str = "application/vnd.nydus.image.config.v1+json";
    /// Bytes of any kind: how registries and clients of 2016 described image configurations.
    pub const UNTYPED: &str = "application/octet-stream";
    /// The empty object of two bytes, `{}`, for documents without content.
    pub const EMPTY: &str = "application/vnd.oci.empty.v1+json";
    /// Docker's image manifest.
    pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
    /// Docker's index.
    pub const DOCKER_INDEX: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
}

/// Annotations.
pub mod annotation {
    /// On a data blob: `true`.
    pub const DATA_BLOB: &str = "containerd.io/snapshot/nydus-blob";
    /// On the bootstrap layer: `true`.
    pub const BOOTSTRAP: &str = "containerd.io/snapshot/nydus-bootstrap";
    /// On the bootstrap layer: `6`, or `5`.
    pub const FS_VERSION: &str = "containerd.io/snapshot/nydus-fs-version";
    /// On a data blob: how many stored bytes at its beginning a container reads when it starts, in
    /// decimal.
    pub const HOT_BYTES: &str = "vnd.lazuli.hot-bytes";
    /// On the index of an unconverted layer: digest of that layer.
    pub const INDEX_OF: &str = "containerd.io/snapshot/nydus-ref";
    /// On the index of a layer: digest of its chunk tables as stored, which are a part of it.
    pub const INDEX_TABLES: &str = "vnd.lazuli.index-tables";
    /// On an eStargz layer, and a zstd:chunked one of stargz-snapshotter: digest of the unpacked
    /// table of contents.
    pub const STARGZ_TOC: &str = "containerd.io/snapshot/stargz/toc.digest";
    /// On a zstd:chunked layer of stargz-snapshotter: where the table of contents is,
    /// `offset:stored:unpacked:1`.
    pub const STARGZ_CHUNKED_POSITION: &str = "io.containers.zstd-chunked.manifest-position";
    /// The same on one of containers/storage.
    pub const CHUNKED_POSITION: &str = "io.github.containers.zstd-chunked.manifest-position";
    /// On such a layer: digest of the stored table of contents.
    pub const CHUNKED_DIGEST: &str = "io.github.containers.zstd-chunked.manifest-checksum";
    /// On a layer of an artifact: its file's path; in ModelPack, now and before it had that name.
    pub const MODEL_PATHS: [&str; 2] = ["org.cncf.model.filepath", "org.cnai.model.filepath"];
    /// The same, of ORAS.
    pub const TITLE: &str = "org.opencontainers.image.title";
    /// On a layer of an artifact of ORAS that is the tar of a directory: `true`.
    pub const UNPACK: &str = "io.deis.oras.content.unpack";
    /// On the manifest: the chunks that a start most likely reads, see
    /// [`NotedGuess`](super::NotedGuess).
    pub const GUESS: &str = "vnd.lazuli.guess";
    /// On the manifest: digest of the manifest that was converted.
    pub const SOURCE_DIGEST: &str = "containerd.io/snapshot/nydus-source-digest";
}

/// Why a document cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OciError {
    /// Bigger than [`MAX_DOCUMENT`].
    #[error("the {document} has {size} bytes, at most {MAX_DOCUMENT} are allowed")]
    TooBig {
        /// The document.
        document: &'static str,
        /// Its size in bytes.
        size: usize,
    },
    /// Not JSON, or JSON that violates the specification.
    #[error("the {document} cannot be read: {source}")]
    Json {
        /// The document.
        document: &'static str,
        /// The place and the problem.
        source: serde_json::Error,
    },
    /// Well-formed, but of no use.
    #[error("the {document} {problem}")]
    Invalid {
        /// The document.
        document: &'static str,
        /// The problem.
        problem: String,
    },
}

fn parse<'a, T: Deserialize<'a>>(document: &'static str, json: &'a [u8]) -> Result<T, OciError> {
    if json.len() > MAX_DOCUMENT {
        return Err(OciError::TooBig { document, size: json.len() });
    }
    serde_json::from_slice(json).map_err(|source| OciError::Json { document, source })
}

/// A reference from one document to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// How to read it.
    pub media_type: String,
    /// Its identity.
    pub digest: Digest,
    /// Its size in bytes.
    pub size: u64,
    /// Annotations by the packer.
    #[serde(default, deserialize_with = "or_empty", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The platform that a manifest of an index runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// Type of an artifact, for manifests that are not ordinary images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
}

impl Descriptor {
    /// Returns whether the blob is in registries: Docker's foreign layers and OCI's
    /// non-distributable ones are fetched from their owner, and are not to be copied.
    pub fn is_distributable(&self) -> bool {
        !["nondistributable", "foreign"].iter().any(|word| self.media_type.contains(word))
    }

    /// Type, digest and size in bytes, and nothing else.
    pub fn plain(media_type: &str, digest: Digest, size: u64) -> Self {
        Self::new(media_type, digest, size, &[])
    }

    fn new(media_type: &str, digest: Digest, size: u64, annotations: &[(&str, &str)]) -> Self {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        Descriptor {
            media_type: media_type.to_owned(),
            digest,
            size,
            annotations: annotations.iter().map(owned).collect(),
            platform: None,
            artifact_type: None,
        }
    }

    /// Returns whether this is a bootstrap layer of RAFS v6 or v5.
    pub fn is_bootstrap(&self) -> bool {
        let version = self.annotations.get(annotation::FS_VERSION);
        self.has(annotation::BOOTSTRAP)
            && version.is_none_or(|version| version == "6" || version == "5")
    }

    /// The platform that a manifest of an index runs on, with [`Platform::LAZY`] in whichever form
    /// it is marked.
    pub fn runs_on(&self) -> Option<Platform> {
        let lazy = self.artifact_type.as_deref() == Some(media_type::LAZY_MANIFEST);
        let platform = self.platform.clone()?;
        Some(if lazy { platform.lazy() } else { platform })
    }

    /// Stored bytes at the beginning of a data blob that a container reads when it starts, if its
    /// maker knew.
    pub fn hot_bytes(&self) -> Option<u64> {
        self.annotations.get(annotation::HOT_BYTES)?.parse().ok()
    }

    /// The layer that this is the index of.
    pub fn index_of(&self) -> Option<Digest> {
        self.annotations.get(annotation::INDEX_OF)?.parse().ok()
    }

    /// Digest of the stored chunk tables in the index of a layer, if the index was annotated with
    /// it.
    pub fn index_tables(&self) -> Option<Digest> {
        self.annotations.get(annotation::INDEX_TABLES)?.parse().ok()
    }

    fn has(&self, annotation: &str) -> bool {
        self.annotations.get(annotation).is_some_and(|value| value == "true")
    }
}

/// The manifest of one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Always 2.
    schema_version: u32,
    /// One of the two manifest types of [`media_type`]; optional in OCI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// Type of an artifact, if the manifest is not an ordinary image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// The image configuration.
    pub config: Descriptor,
    /// The layers, lowest first.
    pub layers: Vec<Descriptor>,
    /// The manifest that this one refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<Descriptor>,
    /// Annotations by the packer.
    #[serde(default, deserialize_with = "or_empty", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Manifest {
    /// Parses a manifest of at most [`MAX_DOCUMENT`] bytes.
    pub fn parse(json: &[u8]) -> Result<Self, OciError> {
        let document = "manifest";
        let manifest: Manifest = parse(document, json)?;
        let problem = match manifest.media_type.as_deref() {
            _ if manifest.schema_version != 2 => {
                format!("has schema version {}, not 2", manifest.schema_version)
            }
            None | Some(media_type::MANIFEST | media_type::DOCKER_MANIFEST) => return Ok(manifest),
            Some(other) => format!("has media type `{other}`"),
        };
        Err(OciError::Invalid { document, problem })
    }

    /// The layer with the bootstrap if this is a lazy image: always the last.
    pub fn bootstrap(&self) -> Option<&Descriptor> {
        self.layers.last().filter(|layer| layer.is_bootstrap())
    }

    /// Data layers and bootstrap of the lazy image below any layers that a container or a builder
    /// added on top. Without such layers, these are all layers.
    pub fn lazy_base(&self) -> Option<(&[Descriptor], &Descriptor)> {
        let at = self.layers.iter().position(Descriptor::is_bootstrap)?;
        Some((&self.layers[..at], &self.layers[at]))
    }
}

/// Some writers spell an absent map as `null`.
fn or_empty<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, String>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// A layer of a lazy image: a data blob or the packed bootstrap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlobLayer {
    /// SHA-256 of the layer as stored.
    pub digest: Digest,
    /// Its size in bytes.
    pub size: u64,
    /// Stored bytes at its beginning that a start reads, if that is known; of a data blob only.
    pub hot_bytes: Option<u64>,
}

impl BlobLayer {
    /// A layer of which it is not known what a start reads.
    pub fn new(digest: Digest, size: u64) -> Self {
        BlobLayer { digest, size, hot_bytes: None }
    }
}

/// The documents of a lazy image. The same input gives the same bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LazyImage {
    /// The image configuration.
    pub config: Vec<u8>,
    /// Digest of `config`.
    pub config_digest: Digest,
    /// The manifest.
    pub manifest: Vec<u8>,
    /// Digest of `manifest`: the identity of the image.
    pub digest: Digest,
}

impl LazyImage {
    /// Describes an image made of `blobs` and `bootstrap`. `diff_id` is the digest of the bootstrap
    /// layer's tar before compression; `annotations` go to the manifest.
    pub fn new(
        source: &ImageConfig,
        blobs: &[BlobLayer],
        bootstrap: BlobLayer,
        diff_id: Digest,
        annotations: BTreeMap<String, String>,
    ) -> Result<Self, OciError> {
        Self::with_indexes(source, &[], blobs, bootstrap, diff_id, annotations)
    }

    /// The same, where some of `blobs` are unconverted layers that `indexes` lead into.
    pub fn with_indexes(
        source: &ImageConfig,
        indexes: &[IndexedLayer],
        blobs: &[BlobLayer],
        bootstrap: BlobLayer,
        diff_id: Digest,
        annotations: BTreeMap<String, String>,
    ) -> Result<Self, OciError> {
        let mut layers: Vec<Descriptor> = indexes.iter().map(index_layer).collect();
        layers.extend(blobs.iter().map(data_layer));
        // A data blob is not compressed as a whole, so it is its own "uncompressed" form.
        let diff_ids = layers.iter().map(|layer| layer.digest).chain([diff_id]);
        let config = source.lazy(diff_ids.collect())?.to_json();
        layers.push(bootstrap_layer(&bootstrap));
        let (config_digest, manifest) = describe(&config, layers, annotations)?;
        let digest = Algorithm::Sha256.digest(&manifest);
        Ok(LazyImage { config, config_digest, manifest, digest })
    }
}

/// The descriptor of a data blob.
fn data_layer(blob: &BlobLayer) -> Descriptor {
    let hot = blob.hot_bytes.map(|bytes| bytes.to_string());
    let mut notes = vec![(annotation::DATA_BLOB, "true")];
    notes.extend(hot.as_deref().map(|bytes| (annotation::HOT_BYTES, bytes)));
    Descriptor::new(media_type::DATA_BLOB, blob.digest, blob.size, &notes)
}

/// The descriptor of the packed bootstrap.
fn bootstrap_layer(bootstrap: &BlobLayer) -> Descriptor {
    let notes = [(annotation::BOOTSTRAP, "true"), (annotation::FS_VERSION, "6")];
    Descriptor::new(media_type::LAYER_ZSTD, bootstrap.digest, bootstrap.size, &notes)
}

/// The documents of an ordinary image with one layer. The same input gives the same bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatImage {
    /// The image configuration.
    pub config: Vec<u8>,
    /// Digest of `config`.
    pub config_digest: Digest,
    /// The manifest.
    pub manifest: Vec<u8>,
}

impl FlatImage {
    /// Describes an image of one gzipped layer of `size` bytes, made from the lazy image with the
    /// configuration `source`. `diff_id` is the digest of its tar; `annotations` are those of the
    /// lazy image's manifest.
    pub fn new(
        source: &ImageConfig,
        layer: Digest,
        size: u64,
        diff_id: Digest,
        mut annotations: BTreeMap<String, String>,
    ) -> Result<Self, OciError> {
        // The annotation describes the source of the lazy image, not this image.
        annotations.remove(annotation::SOURCE_DIGEST);
        let config = source.flat(diff_id)?.to_json();
        let layers = vec![Descriptor::plain(media_type::LAYER_GZIP, layer, size)];
        let (config_digest, manifest) = describe(&config, layers, annotations)?;
        Ok(FlatImage { config, config_digest, manifest })
    }
}

/// An index with an ordinary image and the lazy one made from it, both for `platform`. The ordinary
/// image comes first, because readers that don't know platform features take the first match.
pub fn both(
    ordinary: Descriptor,
    lazy: Descriptor,
    platform: &Platform,
) -> Result<Vec<u8>, OciError> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Index {
        schema_version: u32,
        media_type: &'static str,
        manifests: [Descriptor; 2],
    }
    let source = [(annotation::SOURCE_DIGEST.to_owned(), ordinary.digest.to_string())];
    let plain = platform.clone().ordinary();
    let lazy = Descriptor {
        platform: Some(platform.clone().lazy()),
        artifact_type: Some(media_type::LAZY_MANIFEST.to_owned()),
        annotations: source.into(),
        ..lazy
    };
    let ordinary = Descriptor { platform: Some(plain), ..ordinary };
    let manifests = [ordinary, lazy];
    let index = Index { schema_version: 2, media_type: media_type::INDEX, manifests };
    let document = "index";
    serde_json::to_vec(&index).map_err(|source| OciError::Json { document, source })
}

/// The digest of `config`, and a manifest of an image that has it.
fn describe(
    config: &[u8],
    layers: Vec<Descriptor>,
    annotations: BTreeMap<String, String>,
) -> Result<(Digest, Vec<u8>), OciError> {
    let digest = Algorithm::Sha256.digest(config);
    let manifest = Manifest {
        schema_version: 2,
        media_type: Some(media_type::MANIFEST.to_owned()),
        artifact_type: None,
        config: Descriptor::plain(media_type::CONFIG, digest, config.len() as u64),
        layers,
        subject: None,
        annotations,
    };
    let document = "manifest";
    let manifest =
        serde_json::to_vec(&manifest).map_err(|source| OciError::Json { document, source })?;
    Ok((digest, manifest))
}

#[cfg(test)]
mod tests;
