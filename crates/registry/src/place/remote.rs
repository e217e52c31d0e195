//! A repository in a registry.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::{
    Digest, Stored,
    oci::{Descriptor, Platform},
};

use crate::{
    blob::{BlobReader, Growing, Progress, Pushed},
    distribution::{
        pull, push,
        range::{self, Locations},
        referrers::{self, Referrer},
        small_blob, tags,
    },
    error::RegistryError,
    manifest::{Document, Manifest},
    name::{Reference, Selector},
    repository::{BlobContent, Pull, Push, PushBy, Referrers, RequestPolicy, SmallBlob},
    route::{
        hosts::Hosts,
        options::Options,
        server::{Capabilities, Server},
    },
    transport::{client::Client, health::Health},
};

/// A repository in a registry, opened at one tag or digest. Connections are kept and shared by all
/// requests; nothing is sent before the first one.
#[derive(Debug)]
pub struct Registry {
    reference: Reference,
    client: Arc<Client>,
    locations: Locations,
    policy: RequestPolicy,
}

impl Registry {
    /// Opens a client for the registry of `reference`, at the host in its name.
    ///
    /// # Errors
    /// If no HTTP client can be made.
    pub fn open(reference: Reference, options: &Options) -> Result<Self, RegistryError> {
        let server = Hosts::default().servers(&reference, options.plain_http)?.remove(0);
        Self::at(reference, server, options)
    }

    /// Opens a client for one of the servers of `reference`.
    pub(crate) fn at(
        reference: Reference,
        server: Server,
        options: &Options,
    ) -> Result<Self, RegistryError> {
        let client = Arc::new(Client::new(&reference, server, options)?);
        let policy = RequestPolicy::of(&client);
        Ok(Registry { reference, client, locations: Locations::default(), policy })
    }

    /// The server's capabilities.
    pub(crate) fn may(&self) -> Capabilities {
        self.client.server().may
    }

    /// The server's request policy.
    pub(crate) fn policy(&self) -> &RequestPolicy {
        &self.policy
    }

    /// Notes that a download of a blob begins, or of a part of it.
    fn begin(&self, digest: &Digest) {
        if let Some(peer) = &self.client.server().peer {
            peer.daemon.begin(digest);
        }
    }

    /// The server's health.
    pub(crate) fn server(&self) -> &Arc<Health> {
        self.client.health()
    }
}

#[async_trait]
impl Pull for Registry {
    async fn manifest(&self, platform: Option<&Platform>) -> Result<Manifest, RegistryError> {
        pull::manifest(&self.client, &self.reference.selector(), platform).await
    }

    async fn document(&self, digest: Option<&Digest>) -> Result<Document, RegistryError> {
        let selector = digest.map_or_else(|| self.reference.selector(), |d| Selector::Digest(*d));
        pull::document(&self.client, &selector).await
    }

    async fn digest(&self) -> Result<Digest, RegistryError> {
        match pull::head(&self.client, &self.reference.selector()).await? {
            Some(digest) => Ok(digest),
            None => Ok(self.document(None).await?.digest),
        }
    }

    async fn has_blob(&self, digest: &Digest) -> Result<bool, RegistryError> {
        pull::has_blob(&self.client, digest, &self.client.scope("pull")).await
    }

    async fn blob_size(&self, digest: &Digest) -> Result<u64, RegistryError> {
        range::size(&self.client, &self.locations, digest).await
    }

    async fn blob(&self, digest: &Digest, size: u64) -> Result<BlobReader, RegistryError> {
        self.begin(digest);
        pull::blob(&self.client, digest, size).await
    }

    async fn read(
        &self,
        digest: &Digest,
        _size: u64,
        range: Range<Stored>,
        arrived: Progress<'_>,
    ) -> Result<Bytes, RegistryError> {
        self.begin(digest);
        match range::read(&self.client, &self.locations, digest, range.clone(), arrived).await {
            Err(error) if error.is_transient() => {
                let asked = self.client.by_socket(digest, &range);
                let bytes = self.client.watch(&format!("blob {digest}"), asked).await?;
                let bytes = bytes.ok_or(error)?;
                arrived(bytes.len() as u64);
                Ok(bytes)
            }
            answer => answer,
        }
    }

    async fn tags(&self, limit: usize) -> Result<Vec<String>, RegistryError> {
        tags::list(&self.client, limit).await
    }

    async fn small_blob(&self, blob: &Descriptor) -> Result<SmallBlob, RegistryError> {
        let object = format!("blob {}", blob.digest);
        self.client.watch(&object, small_blob::read(self, blob)).await
    }

    fn request_policy(&self) -> RequestPolicy {
        self.policy.clone()
    }

    fn describe(&self) -> String {
        self.client.place.clone()
    }

    fn repository_name(&self) -> Option<String> {
        Some(self.reference.in_registry())
    }

    fn serves_anonymously(&self) -> bool {
        self.client.serves_anonymously()
    }

    fn places(self: Arc<Self>) -> Vec<Arc<dyn Pull>> {
        vec![self]
    }
}

#[async_trait]
impl Push for Registry {
    async fn push_blob(
        &self,
        digest: &Digest,
        size: u64,
        content: BlobContent,
        mount_from: Option<&str>,
        progress: Progress<'_>,
    ) -> Result<Pushed, RegistryError> {
        push::blob(&self.client, digest, size, content, mount_from, progress).await
    }

    async fn push_growing(
        &self,
        blob: Growing,
        progress: Progress<'_>,
    ) -> Result<Pushed, RegistryError> {
        push::growing(&self.client, blob, progress).await
    }

    async fn push_manifest(&self, raw: Bytes, media_type: &str) -> Result<Digest, RegistryError> {
        push::manifest(&self.client, &self.reference.selector(), raw, media_type).await
    }

    async fn push_document(
        &self,
        document: &Document,
        by: PushBy,
    ) -> Result<Pushed, RegistryError> {
        let selector = match by {
            PushBy::Tag => self.reference.selector(),
            PushBy::Digest => Selector::Digest(document.digest),
        };
        push::document(&self.client, &selector, document).await
    }
}

#[async_trait]
impl Referrers for Registry {
    async fn referrers(
        &self,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>, RegistryError> {
        referrers::list(&self.client, subject, artifact_type).await
    }

    async fn push_referrer(
        &self,
        subject: &Descriptor,
        artifact_type: &str,
        annotations: &BTreeMap<String, String>,
        replaces: Option<&Digest>,
    ) -> Result<Digest, RegistryError> {
        let referrer = Referrer::new(subject, artifact_type, annotations);
        referrers::push(&self.client, &referrer, replaces).await
    }

    async fn enlist_referrers(
        &self,
        subject: &Digest,
        entries: &[Descriptor],
    ) -> Result<(), RegistryError> {
        referrers::enlist(&self.client, subject, entries).await
    }

    async fn delete_referrers(
        &self,
        subject: &Digest,
        manifests: &[Digest],
    ) -> Result<(), RegistryError> {
        referrers::delete(&self.client, subject, manifests).await
    }
}
