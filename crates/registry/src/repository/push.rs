//! Storing manifests and blobs.

use std::{fmt::Debug, path::PathBuf, sync::Arc};

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::Digest;

use crate::{
    blob::{Growing, Growth, Progress, Pushed},
    error::RegistryError,
    manifest::Document,
    repository::pull::Pull,
};

/// The bytes of a blob that is pushed.
#[derive(Clone, Debug)]
pub enum BlobContent {
    /// The content of a finished file. A layout on the same file system links it into place.
    File(PathBuf),
    /// Bytes in memory, for configurations and other small blobs.
    Bytes(Bytes),
    /// The same blob in another place. The push reads it while it sends, and checks it before it
    /// ends.
    Stored(Arc<dyn Pull>),
}

/// How a pushed manifest or index can be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushBy {
    /// By its digest alone.
    Digest,
    /// Also by the tag that the repository was opened at, which is moved to it.
    Tag,
}

/// Stores an image: blobs first, then the manifests that name them.
#[async_trait]
pub trait Push: Send + Sync + Debug {
    /// Makes sure that the place has the blob of `digest` and `size` bytes. `mount_from` is another
    /// repository of the same registry that may have it.
    async fn push_blob(
        &self,
        digest: &Digest,
        size: u64,
        content: BlobContent,
        mount_from: Option<&str>,
        progress: Progress<'_>,
    ) -> Result<Pushed, RegistryError>;

    /// Makes sure that the place has a blob that is still being written. Data beyond one request's
    /// worth is sent as it is written. Whether the server already has the blob is asked only if the
    /// blob is complete by then.
    async fn push_growing(
        &self,
        blob: Growing,
        progress: Progress<'_>,
    ) -> Result<Pushed, RegistryError> {
        let Growth::Whole(digest, size) = blob.beyond(u64::MAX).await? else {
            return Ok(Pushed::Existed);
        };
        self.push_blob(&digest, size, BlobContent::File(blob.file), None, progress).await
    }

    /// Makes the repository's tag name this manifest. Its blobs must have been pushed.
    async fn push_manifest(&self, raw: Bytes, media_type: &str) -> Result<Digest, RegistryError>;

    /// Makes sure that the place has the manifest or index, under the name or digest in `by`.
    /// Everything that it names must have been pushed.
    async fn push_document(&self, document: &Document, by: PushBy)
    -> Result<Pushed, RegistryError>;
}
