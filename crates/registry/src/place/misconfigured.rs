//! A repository that cannot be reached because of how the machine is set up.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::{
    Digest, Stored,
    oci::{Descriptor, Platform},
};

use crate::{
    blob::{BlobReader, Progress, Pushed},
    error::{HostsError, RegistryError},
    manifest::{Document, Manifest},
    name::ImageName,
    repository::{BlobContent, Pull, Push, Referrers, SmallBlob},
};

/// Fails each request with the reason. Images that are in use must not break because of a file that
/// is half written at this moment, so opening one succeeds.
#[derive(Debug)]
pub(crate) struct Misconfigured {
    name: String,
    reason: HostsError,
}

impl Misconfigured {
    pub(crate) fn new(name: &ImageName, reason: HostsError) -> Self {
        Misconfigured { name: name.to_string(), reason }
    }

    fn refuse<T>(&self) -> Result<T, RegistryError> {
        Err(self.reason.clone().into())
    }
}

#[async_trait]
impl Pull for Misconfigured {
    async fn manifest(&self, _: Option<&Platform>) -> Result<Manifest, RegistryError> {
        self.refuse()
    }

    async fn document(&self, _: Option<&Digest>) -> Result<Document, RegistryError> {
        self.refuse()
    }

    async fn has_blob(&self, _: &Digest) -> Result<bool, RegistryError> {
        self.refuse()
    }

    async fn blob_size(&self, _: &Digest) -> Result<u64, RegistryError> {
        self.refuse()
    }

    async fn blob(&self, _: &Digest, _: u64) -> Result<BlobReader, RegistryError> {
        self.refuse()
    }

    async fn read(
        &self,
        _: &Digest,
        _: u64,
        _: Range<Stored>,
        _: Progress<'_>,
    ) -> Result<Bytes, RegistryError> {
        self.refuse()
    }

    async fn tags(&self) -> Result<Vec<String>, RegistryError> {
        self.refuse()
    }

    async fn small_blob(&self, _: &Descriptor) -> Result<SmallBlob, RegistryError> {
        self.refuse()
    }

    fn describe(&self) -> String {
        self.name.clone()
    }

    fn places(self: Arc<Self>) -> Vec<Arc<dyn Pull>> {
        vec![self]
    }
}

#[async_trait]
impl Push for Misconfigured {
    async fn push_blob(
        &self,
        _: &Digest,
        _: u64,
        _: BlobContent,
        _: Option<&str>,
        _: Progress<'_>,
    ) -> Result<Pushed, RegistryError> {
        self.refuse()
    }

    async fn push_manifest(&self, _: Bytes, _: &str) -> Result<Digest, RegistryError> {
        self.refuse()
    }

    async fn push_document(&self, _: &Document, _: bool) -> Result<Pushed, RegistryError> {
        self.refuse()
    }
}

#[async_trait]
impl Referrers for Misconfigured {
    async fn referrers(
        &self,
        _: &Digest,
        _: Option<&str>,
    ) -> Result<Vec<Descriptor>, RegistryError> {
        self.refuse()
    }

    async fn push_referrer(
        &self,
        _: &Descriptor,
        _: &str,
        _: &BTreeMap<String, String>,
        _: Option<&Digest>,
    ) -> Result<Digest, RegistryError> {
        self.refuse()
    }

    async fn enlist_referrers(&self, _: &Digest, _: &[Descriptor]) -> Result<(), RegistryError> {
        self.refuse()
    }
}
