//! Manifests that refer to others: signatures, traces, indexes.

use std::{collections::BTreeMap, fmt::Debug};

use async_trait::async_trait;
use lazuli_image::{Digest, oci::Descriptor};

use crate::error::RegistryError;

/// Lists, adds and deletes referrers, as the OCI distribution specification 1.1 defines them.
#[async_trait]
pub trait Referrers: Send + Sync + Debug {
    /// The manifests of `artifact_type`, or of any, whose subject is the manifest `subject`, with
    /// their annotations; none is an empty list. One request, two to a registry without the
    /// referrers API that was not asked within the last hour: it has the list under the tag
    /// `sha256-HEX`.
    ///
    /// Any client that may push to the repository can write anything into that list. It is bounded
    /// by [`DOCUMENT_LIMIT`](crate::manifest::DOCUMENT_LIMIT) bytes of JSON; entries that can be no
    /// manifest are left out.
    async fn referrers(
        &self,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>, RegistryError>;

    /// Pushes a manifest without content that refers to `subject` and carries `annotations`, and
    /// removes the one that it `replaces` where the registry allows that. All information is in the
    /// annotations, because the list of referrers repeats them.
    ///
    /// In a registry without the referrers API the list is a tag: read, changed and pushed. Other
    /// entries stay.
    async fn push_referrer(
        &self,
        subject: &Descriptor,
        artifact_type: &str,
        annotations: &BTreeMap<String, String>,
        replaces: Option<&Digest>,
    ) -> Result<Digest, RegistryError>;

    /// Makes sure that manifests that refer to `subject`, and were pushed with
    /// [`Push::push_document`](crate::Push::push_document), are listed as `entries`.
    async fn enlist_referrers(
        &self,
        subject: &Digest,
        entries: &[Descriptor],
    ) -> Result<(), RegistryError>;

    /// Deletes `manifests`, which refer to `subject`, and removes them from the list of a registry
    /// without the referrers API. Those that are gone already are no error; a registry that deletes
    /// nothing is one. Nothing happens in a layout directory, whose operator can delete it.
    async fn delete_referrers(
        &self,
        _subject: &Digest,
        _manifests: &[Digest],
    ) -> Result<(), RegistryError> {
        Ok(())
    }
}
