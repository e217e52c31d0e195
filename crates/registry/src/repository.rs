//! The interface of a place where an image lives.

use std::{
    collections::BTreeMap, fmt::Debug, ops::Range, path::PathBuf, sync::Arc, time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::{
    Digest, Stored,
    oci::{Descriptor, Platform},
};

use crate::{
    blob::{BlobReader, Growing, Growth, Progress, Pushed},
    error::RegistryError,
    manifest::{Document, Manifest},
    transport::{health::Health, preconnect::Preconnect},
};

/// Tags that a registry is asked for: what most have on a page at most.
pub const TAGS: usize = 1000;

/// What is pushed as a blob.
#[derive(Clone, Debug)]
pub enum BlobContent {
    /// The whole content of a file, to which nobody writes any more: a layout on its file system
    /// makes it its own.
    File(PathBuf),
    /// Bytes in memory, for configurations and other small things.
    Bytes(Bytes),
    /// The blob as another place has it. It is read as it is pushed, and checked before the push
    /// ends.
    Stored(Arc<dyn Repository>),
}

/// A blob in memory, and what it took to get it.
#[derive(Clone, Debug)]
pub struct SmallBlob {
    /// All of it.
    pub content: Bytes,
    /// Requests to the place that it came from.
    pub requests: u64,
}

/// One place where one image lives, and the blobs beside it.
///
/// - A digest names the same bytes for ever; what a tag names can change between two calls.
/// - Everything that is read is bounded, and checked against the digest that it was asked by,
///   except by [`Repository::read`]: parts of a blob are checked by whoever knows its chunks.
/// - Dropping a future abandons the transfer. An abandoned push leaves nothing that can be seen.
/// - All methods may be called at the same time, from any task.
#[async_trait]
pub trait Repository: Send + Sync + Debug {
    /// The manifest that the repository was opened at; if that is an index, the entry for
    /// `platform` (Linux on this machine's processor by default).
    async fn manifest(&self, platform: Option<&Platform>) -> Result<Manifest, RegistryError>;

    /// The manifest or index `digest`, or the one that the repository was opened at.
    async fn document(&self, digest: Option<&Digest>) -> Result<Document, RegistryError>;

    /// Whether the blob is there, whole.
    async fn has_blob(&self, digest: &Digest) -> Result<bool, RegistryError>;

    /// How many bytes the blob has, by the word of whoever holds it.
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

    /// Makes sure that the blob is there, which has `digest` and `size` bytes. `mount_from` is
    /// another repository of the same registry that may have it.
    async fn push_blob(
        &self,
        digest: &Digest,
        size: u64,
        content: BlobContent,
        mount_from: Option<&str>,
        progress: Progress<'_>,
    ) -> Result<Pushed, RegistryError>;

    /// Makes sure that a blob is there of which only the beginning is known yet. A server is sent
    /// what there is of it, if that is more than one request carries; whether it has the blob can
    /// be asked only of one that is whole by then.
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

    /// Makes the repository's tag name this manifest. Its blobs have to be there.
    async fn push_manifest(&self, raw: Bytes, media_type: &str) -> Result<Digest, RegistryError>;

    /// Tags of the repository, in no order: those that its registry lists in one answer, of at most
    /// [`TAGS`] where one can say so. None if it keeps its tags to itself.
    async fn tags(&self) -> Result<Vec<String>, RegistryError>;

    /// Makes sure that the manifest or index is there, and if `named` that the repository's tag
    /// names it. What it names has to be there.
    async fn push_document(
        &self,
        document: &Document,
        named: bool,
    ) -> Result<Pushed, RegistryError>;

    /// The manifests of `artifact_type`, or of any, whose subject is the manifest `subject`, as the
    /// OCI distribution specification 1.1 lists referrers, with their annotations; none is an empty
    /// list. One request, two to a registry without the referrers API that was not asked within the
    /// last hour: it has the list under the tag `sha256-HEX`.
    ///
    /// Whoever may push to the repository can write anything into that list. It is bounded by
    /// [`DOCUMENT_LIMIT`](crate::manifest::DOCUMENT_LIMIT) bytes of JSON; what no manifest can be
    /// is left out.
    async fn referrers(
        &self,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>, RegistryError>;

    /// Pushes a manifest without content that refers to `subject` and carries `annotations`, and
    /// takes the one that it `replaces` away where the registry allows that. Everything is in the
    /// annotations, because the list of referrers repeats them.
    ///
    /// In a registry without the referrers API the list is a tag: read, changed and pushed. What
    /// others have in it stays.
    async fn push_referrer(
        &self,
        subject: &Descriptor,
        artifact_type: &str,
        annotations: &BTreeMap<String, String>,
        replaces: Option<&Digest>,
    ) -> Result<Digest, RegistryError>;

    /// Makes sure that manifests that refer to `subject`, and were pushed with
    /// [`Repository::push_document`], are listed as `entries`.
    async fn enlist_referrers(
        &self,
        subject: &Digest,
        entries: &[Descriptor],
    ) -> Result<(), RegistryError>;

    /// A blob of at most [`DOCUMENT_LIMIT`](crate::manifest::DOCUMENT_LIMIT) bytes, whole and
    /// checked: a configuration, a bootstrap. From a server it comes in parts at the same time, if
    /// that is faster.
    async fn small_blob(&self, blob: &Descriptor) -> Result<SmallBlob, RegistryError>;

    /// Many requests are about to come: begins to open connections for them to the server that is
    /// asked first, if there is one far away and this was not said of it within the last minute.
    /// Whatever becomes of that, they work. Call it on a runtime, before the first of them, and
    /// wait for what it returns before the others.
    fn prepare(&self) -> Preconnect {
        Preconnect::default()
    }

    /// All of a blob is going to be read from here, sooner or later: who fetches for several nodes
    /// may begin. Whatever becomes of that, reads work. Call it on a runtime.
    fn expect_whole(&self, _: &Digest) {}

    /// Whether it is somebody who fetches for several nodes: what nobody can check is not to be
    /// asked for there.
    fn is_for_all(&self) -> bool {
        false
    }

    /// Whether it is to be asked for blobs of so many bytes.
    fn is_worth(&self, _bytes: u64) -> bool {
        true
    }

    /// Whether a part of a blob of `size` bytes should be asked for here, by a reader who `waits`
    /// or ahead of him. Who fetches for several nodes fetches more than that when none of them has
    /// it.
    async fn is_shared(
        &self,
        _blob: &Digest,
        _size: u64,
        _range: &Range<Stored>,
        _waits: bool,
    ) -> bool {
        true
    }

    /// How long it may bring nothing before others are asked as well, if not as long as usual.
    fn hedge_after(&self) -> Option<Duration> {
        None
    }

    /// The image as a user would spell it, for messages.
    fn describe(&self) -> String;

    /// The repository's registry and name, without tag or digest; `None` where there is no
    /// registry.
    fn repository(&self) -> Option<String> {
        None
    }

    /// Whether its registry has given something of it to a client without any credentials, and
    /// nothing only with them. Not known before something was read from there, and then it is not.
    fn is_open(&self) -> bool {
        false
    }

    /// How the server behind it has done so far; `None` where nothing is asked over a network.
    fn health(&self) -> Option<&Arc<Health>> {
        None
    }

    /// Every place that holds the image, each by itself, in the order in which they are to be
    /// asked.
    fn places(self: Arc<Self>) -> Vec<Arc<dyn Repository>>;
}

/// The image configuration, checked.
///
/// # Errors
/// Those of [`Repository::small_blob`].
pub async fn config(
    repository: &dyn Repository,
    manifest: &Manifest,
) -> Result<Bytes, RegistryError> {
    Ok(repository.small_blob(&manifest.parsed.config).await?.content)
}
