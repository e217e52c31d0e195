//! Images that a node was delivered with, beside their registry.
//!
//! A *bundle* is an OCI image layout in which entries have the full names of images. It answers
//! requests of the repositories that it names, each with what its own images consist of:
//!
//! ```text
//! by digest: manifests, blobs          the bundle, else the registry
//! what a tag means, referrers,         the registry; while it is away, the bundle
//! whether a client may have a blob
//! ```

use std::{
    collections::BTreeMap, fmt, future::Future, ops::Range, pin::pin, sync::Arc, time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::{
    Digest, Stored,
    oci::{Descriptor, Platform},
};
use tokio::time::{Instant, timeout};

use crate::{
    blob::{BlobReader, Growing, Progress, Pushed},
    error::RegistryError,
    manifest::{Document, Manifest},
    name::{Reference, Selector},
    place::layout::Layout,
    repository::{
        BlobContent, Pull, Push, PushBy, Referrers, Repository, RequestPolicy, SmallBlob,
    },
};

/// Silence of a registry after which the bundle answers. The node's mirror has to answer within two
/// seconds.
const SILENCE: Duration = Duration::from_millis(1500);

/// A repository of which some images are in a bundle.
pub(crate) struct Bundled {
    registry: Arc<dyn Repository>,
    layout: Arc<Layout>,
    /// Whether it was opened at a digest.
    is_pinned: bool,
}

impl fmt::Debug for Bundled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entry(&self.layout).entry(&self.registry).finish()
    }
}

impl Bundled {
    pub(crate) fn new(
        registry: Arc<dyn Repository>,
        layout: Layout,
        reference: &Reference,
    ) -> Self {
        let is_pinned = matches!(reference.selector(), Selector::Digest(_));
        Bundled { registry, layout: Arc::new(layout), is_pinned }
    }

    /// Content that a digest names: the bundle's, else the registry's.
    async fn content<'a, T, F>(
        &'a self,
        ask: impl Fn(&'a dyn Repository) -> F,
    ) -> Result<T, RegistryError>
    where
        F: Future<Output = Result<T, RegistryError>>,
    {
        match ask(&*self.layout).await {
            Ok(content) => Ok(content),
            Err(_) => ask(&*self.registry).await,
        }
    }

    /// The registry's answer; while it is away, that of the bundle, if it has one.
    async fn decided<'a, T, F>(
        &'a self,
        ask: impl Fn(&'a dyn Repository) -> F,
    ) -> Result<T, RegistryError>
    where
        F: Future<Output = Result<T, RegistryError>>,
    {
        let policy = self.registry.request_policy();
        let is_resting = policy.health().is_some_and(|health| !health.is_well());
        if is_resting && let Ok(answer) = ask(&*self.layout).await {
            return Ok(answer);
        }
        let started = Instant::now();
        let failed = |retry_after| {
            if let Some(health) = policy.health() {
                health.failed(started, retry_after);
            }
        };
        // Elsewhere only reads of blobs count as successes.
        let answered = |answer: Result<T, RegistryError>| {
            if let Some(health) = policy.health()
                && answer.as_ref().err().is_none_or(|error| !is_away(error))
            {
                health.worked();
            }
            answer
        };
        let mut asked = pin!(ask(&*self.registry));
        match timeout(SILENCE, asked.as_mut()).await {
            Ok(Err(error)) if is_away(&error) => {
                failed(error.retry_after());
                ask(&*self.layout).await.map_err(|_| error)
            }
            Ok(answer) => answered(answer),
            Err(_) => match ask(&*self.layout).await {
                Ok(answer) => {
                    failed(None);
                    Ok(answer)
                }
                Err(_) => answered(asked.await),
            },
        }
    }
}

/// Returns whether the registry gave no answer of its own.
fn is_away(error: &RegistryError) -> bool {
    match error {
        // The registry itself is asked last.
        RegistryError::Everywhere { failures } => failures.last().is_none_or(is_away),
        error => error.is_transient(),
    }
}

#[async_trait]
impl Pull for Bundled {
    async fn manifest(&self, platform: Option<&Platform>) -> Result<Manifest, RegistryError> {
        match self.is_pinned {
            true => self.content(|place| place.manifest(platform)).await,
            false => self.decided(|place| place.manifest(platform)).await,
        }
    }

    async fn digest(&self) -> Result<Digest, RegistryError> {
        self.decided(|place| place.digest()).await
    }

    async fn document(&self, digest: Option<&Digest>) -> Result<Document, RegistryError> {
        match digest.is_some() || self.is_pinned {
            true => self.content(|place| place.document(digest)).await,
            false => self.decided(|place| place.document(digest)).await,
        }
    }

    async fn has_blob(&self, digest: &Digest) -> Result<bool, RegistryError> {
        let asked = self.decided(|place| async move {
            match place.has_blob(digest).await? {
                true => Ok(()),
                false => {
                    let (place, object) = (place.describe(), format!("blob {digest}"));
                    Err(RegistryError::Missing { place, object })
                }
            }
        });
        match asked.await {
            Ok(()) => Ok(true),
            Err(error) if error.is_missing() => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn blob_size(&self, digest: &Digest) -> Result<u64, RegistryError> {
        self.content(|place| place.blob_size(digest)).await
    }

    async fn blob(&self, digest: &Digest, size: u64) -> Result<BlobReader, RegistryError> {
        self.content(|place| place.blob(digest, size)).await
    }

    async fn small_blob(&self, blob: &Descriptor) -> Result<SmallBlob, RegistryError> {
        self.content(|place| place.small_blob(blob)).await
    }

    async fn read(
        &self,
        digest: &Digest,
        size: u64,
        range: Range<Stored>,
        arrived: Progress<'_>,
    ) -> Result<Bytes, RegistryError> {
        let bytes = self.content(|place| place.read(digest, size, range.clone(), &|_| {})).await?;
        arrived(bytes.len() as u64);
        Ok(bytes)
    }

    /// Those of the registry: a bundle has some of a repository's tags.
    async fn tags(&self, limit: usize) -> Result<Vec<String>, RegistryError> {
        self.registry.tags(limit).await
    }

    fn request_policy(&self) -> RequestPolicy {
        self.registry.request_policy()
    }

    fn describe(&self) -> String {
        self.registry.describe()
    }

    fn repository_name(&self) -> Option<String> {
        self.registry.repository_name()
    }

    fn serves_anonymously(&self) -> bool {
        self.registry.serves_anonymously()
    }

    fn places(self: Arc<Self>) -> Vec<Arc<dyn Pull>> {
        let registry: Arc<dyn Pull> = self.registry.clone();
        [self.layout.clone() as Arc<dyn Pull>].into_iter().chain(registry.places()).collect()
    }
}

/// Pushes go to the registry.
#[async_trait]
impl Push for Bundled {
    async fn push_blob(
        &self,
        digest: &Digest,
        size: u64,
        content: BlobContent,
        mount_from: Option<&str>,
        progress: Progress<'_>,
    ) -> Result<Pushed, RegistryError> {
        self.registry.push_blob(digest, size, content, mount_from, progress).await
    }

    async fn push_growing(
        &self,
        blob: Growing,
        progress: Progress<'_>,
    ) -> Result<Pushed, RegistryError> {
        self.registry.push_growing(blob, progress).await
    }

    async fn push_manifest(&self, raw: Bytes, media_type: &str) -> Result<Digest, RegistryError> {
        self.registry.push_manifest(raw, media_type).await
    }

    async fn push_document(
        &self,
        document: &Document,
        by: PushBy,
    ) -> Result<Pushed, RegistryError> {
        self.registry.push_document(document, by).await
    }
}

#[async_trait]
impl Referrers for Bundled {
    async fn referrers(
        &self,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>, RegistryError> {
        self.decided(|place| place.referrers(subject, artifact_type)).await
    }

    async fn push_referrer(
        &self,
        subject: &Descriptor,
        artifact_type: &str,
        annotations: &BTreeMap<String, String>,
        replaces: Option<&Digest>,
    ) -> Result<Digest, RegistryError> {
        self.registry.push_referrer(subject, artifact_type, annotations, replaces).await
    }

    async fn enlist_referrers(
        &self,
        subject: &Digest,
        entries: &[Descriptor],
    ) -> Result<(), RegistryError> {
        self.registry.enlist_referrers(subject, entries).await
    }

    async fn delete_referrers(
        &self,
        subject: &Digest,
        manifests: &[Digest],
    ) -> Result<(), RegistryError> {
        self.registry.delete_referrers(subject, manifests).await
    }
}
