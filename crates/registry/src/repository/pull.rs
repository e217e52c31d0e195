//! Reading manifests and blobs.

use std::{fmt::Debug, ops::Range, sync::Arc};

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::{
    Digest, Stored,
    oci::{Descriptor, Platform},
};

use crate::{
    blob::{BlobReader, Progress},
    error::RegistryError,
    manifest::{Document, Manifest},
    repository::request_policy::RequestPolicy,
};

/// Tags that one request lists. Most registries answer with at most this many.
pub const TAGS: usize = 1000;

/// A blob in memory, with the cost of fetching it.
#[derive(Clone, Debug)]
pub struct SmallBlob {
    /// The whole blob.
    pub content: Bytes,
    /// Requests that were sent for it.
    pub requests: u64,
}

/// Reads one image: its manifests, configuration, blobs and tags.
#[async_trait]
pub trait Pull: Send + Sync + Debug {
    /// The manifest that the repository was opened at; if that is an index, the entry for
    /// `platform` (Linux on this machine's processor by default).
    async fn manifest(&self, platform: Option<&Platform>) -> Result<Manifest, RegistryError>;

    /// Fetches the manifest or index `digest`, or the one that the repository was opened at.
    async fn document(&self, digest: Option<&Digest>) -> Result<Document, RegistryError>;

    /// The digest that the name means now. A registry is asked by HEAD, without the document.
    async fn digest(&self) -> Result<Digest, RegistryError> {
        Ok(self.document(None).await?.digest)
    }

    /// Returns whether the place has the whole blob.
    async fn has_blob(&self, digest: &Digest) -> Result<bool, RegistryError>;

    /// The blob's size in bytes, as the server reports it.
    async fn blob_size(&self, digest: &Digest) -> Result<u64, RegistryError>;

    /// The whole blob. Reading fails at its end if size or digest are wrong.
    async fn blob(&self, digest: &Digest, size: u64) -> Result<BlobReader, RegistryError>;

    /// Exactly these bytes of a blob of `size` bytes, unchecked. An empty range needs no blob.
    async fn read(
        &self,
        digest: &Digest,
        size: u64,
        range: Range<Stored>,
        arrived: Progress<'_>,
    ) -> Result<Bytes, RegistryError>;

    /// A blob of at most [`DOCUMENT_LIMIT`](crate::manifest::DOCUMENT_LIMIT) bytes, whole and
    /// checked: a configuration, a bootstrap. It is fetched in parallel parts from a server where
    /// that is faster.
    async fn small_blob(&self, blob: &Descriptor) -> Result<SmallBlob, RegistryError>;

    /// At most `limit` tags of the repository, unordered. Empty if the registry doesn't list tags.
    async fn tags(&self, limit: usize) -> Result<Vec<String>, RegistryError>;

    /// The present request policy of this place.
    fn request_policy(&self) -> RequestPolicy {
        RequestPolicy::default()
    }

    /// The image's name as a user spells it, for messages.
    fn describe(&self) -> String;

    /// The repository's name with its registry, without tag or digest; `None` without a registry.
    fn repository_name(&self) -> Option<String> {
        None
    }

    /// Returns whether the registry has served this repository without credentials, and nothing
    /// only with them. False until something has been read.
    fn serves_anonymously(&self) -> bool {
        false
    }

    /// Every place that delivers the image's blobs, each by itself, in the order in which to ask
    /// them.
    fn places(self: Arc<Self>) -> Vec<Arc<dyn Pull>>;
}

/// The image configuration, checked.
///
/// # Errors
/// Those of [`Pull::small_blob`].
pub async fn config(repository: &dyn Pull, manifest: &Manifest) -> Result<Bytes, RegistryError> {
    Ok(repository.small_blob(&manifest.parsed.config).await?.content)
}
