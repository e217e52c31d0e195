//! "Pushing Manifests with Subject".

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use lazuli_image::{
    Algorithm, Digest,
    oci::{Descriptor, media_type},
};
use reqwest::{Method, StatusCode, header::HeaderMap};
use serde::Serialize;

use super::{ReferrerIndex, listed, tag, tagged, tagged_as_stored};
use crate::{
    distribution::push,
    error::RegistryError,
    manifest::DOCUMENT_LIMIT,
    name::Selector,
    repository::BlobContent,
    transport::{
        client::{Call, Client},
        client_pool::ReferrersApi,
        health::vary,
    },
};

/// The content of the empty descriptor.
const EMPTY: &[u8] = b"{}";

/// Retries of a changed list that a concurrent push has overwritten.
const RACE_LIMIT: u32 = 4;

/// Time after a push at which the list is checked, varied by half: a client that had read the
/// earlier list has pushed its own by then, also over a slow link.
const RACE_PAUSE: Duration = Duration::from_millis(400);

/// A manifest without content that refers to another.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Referrer<'a> {
    schema_version: u32,
    media_type: &'static str,
    artifact_type: &'a str,
    config: Descriptor,
    layers: [Descriptor; 1],
    subject: Descriptor,
    annotations: &'a BTreeMap<String, String>,
}

impl<'a> Referrer<'a> {
    pub(crate) fn new(
        subject: &Descriptor,
        artifact_type: &'a str,
        annotations: &'a BTreeMap<String, String>,
    ) -> Self {
        let empty = || {
            let digest = Algorithm::Sha256.digest(EMPTY);
            Descriptor::plain(media_type::EMPTY, digest, EMPTY.len() as u64)
        };
        Referrer {
            schema_version: 2,
            media_type: media_type::MANIFEST,
            artifact_type,
            config: empty(),
            layers: [empty()],
            subject: Descriptor::plain(&subject.media_type, subject.digest, subject.size),
            annotations,
        }
    }

    /// The list entry of the manifest `raw`.
    fn entry(&self, raw: &[u8]) -> Descriptor {
        let digest = Algorithm::Sha256.digest(raw);
        Descriptor {
            annotations: self.annotations.clone(),
            artifact_type: Some(self.artifact_type.to_owned()),
            ..Descriptor::plain(self.media_type, digest, raw.len() as u64)
        }
    }
}

/// Pushes `referrer` and makes sure that it is listed, then removes the referrer that it
/// `replaces`.
pub(crate) async fn push(
    client: &Client,
    referrer: &Referrer<'_>,
    replaces: Option<&Digest>,
) -> Result<Digest, RegistryError> {
    let subject = &referrer.subject.digest;
    let object = format!("a referrer of {subject}");
    let raw = Bytes::from(bounded(client, &object, serde_json::to_vec(referrer))?);
    let (empty, content) = (&referrer.config, BlobContent::Bytes(Bytes::from_static(EMPTY)));
    push::blob(client, &empty.digest, empty.size, content, None, &|_| {}).await?;
    let entry = referrer.entry(&raw);
    let selector = Selector::Digest(entry.digest);
    let (digest, headers) = push::put(client, &selector, raw, media_type::MANIFEST).await?;
    let processed = headers.get("oci-subject").and_then(|value| value.to_str().ok());
    if processed.is_some_and(|processed| processed == subject.to_string()) {
        client.note_referrers_api(ReferrersApi::Present);
    } else {
        list(client, subject, std::slice::from_ref(&entry), replaces).await?;
    }
    if let Some(old) = replaces.filter(|old| **old != digest) {
        remove(client, old).await;
    }
    Ok(digest)
}

/// Makes sure that manifests that were pushed are listed: a registry with the referrers API has
/// seen to that.
pub(crate) async fn enlist(
    client: &Client,
    subject: &Digest,
    entries: &[Descriptor],
) -> Result<(), RegistryError> {
    if client.referrers_api() != Some(ReferrersApi::Missing)
        && listed(client, subject, None).await?.is_some()
    {
        return Ok(());
    }
    list(client, subject, entries, None).await
}

/// Adds `entries` to the list that the clients of a registry without referrers API keep.
async fn list(
    client: &Client,
    subject: &Digest,
    entries: &[Descriptor],
    replaces: Option<&Digest>,
) -> Result<(), RegistryError> {
    let tag = tag(subject);
    let object = format!("the list of referrers {tag}");
    let scope = client.scope("pull,push");
    for _ in 0..RACE_LIMIT {
        let mut index = tagged(client, subject, &scope).await?.unwrap_or_else(ReferrerIndex::empty);
        let mut changed = false;
        for entry in entries {
            changed |= index.update(entry, replaces).map_err(|error| {
                RegistryError::malformed(&client.place, &object, error.to_string())
            })?;
        }
        // Also after the second check: a client that had read the earlier list may have pushed
        // after us.
        if !changed {
            return Ok(());
        }
        let raw = bounded(client, &object, index.to_json())?;
        push::put(client, &Selector::Tag(tag.clone()), raw.into(), media_type::INDEX).await?;
        tokio::time::sleep(vary(RACE_PAUSE)).await;
    }
    let index = tagged(client, subject, &scope).await?;
    if index.is_some_and(|index| entries.iter().all(|entry| index.lists(&entry.digest))) {
        return Ok(());
    }
    let cause = "others kept pushing it without our entries".to_owned();
    Err(RegistryError::Interrupted { place: client.place.clone(), object, cause })
}

/// Removes `manifests` from the referrers of `subject`: from the list that clients keep, if there
/// is one, and then themselves.
pub(crate) async fn delete(
    client: &Client,
    subject: &Digest,
    manifests: &[Digest],
) -> Result<(), RegistryError> {
    unlist(client, subject, manifests).await?;
    for manifest in manifests {
        delete_manifest(client, manifest).await?;
    }
    Ok(())
}

/// Removes `manifests` from the list that clients keep, and a list that gets empty.
async fn unlist(
    client: &Client,
    subject: &Digest,
    manifests: &[Digest],
) -> Result<(), RegistryError> {
    let tag = tag(subject);
    let object = format!("the list of referrers {tag}");
    let scope = client.scope("delete,pull,push");
    for _ in 0..RACE_LIMIT {
        let stored = tagged_as_stored(client, subject, &scope).await?;
        let Some((mut index, digest)) = stored else { return Ok(()) };
        if !index.remove(manifests) {
            return Ok(());
        }
        if index.is_empty() {
            // By its digest: registries before OCI distribution 1.1 delete no tags.
            return delete_manifest(client, &digest).await;
        }
        let raw = bounded(client, &object, index.to_json())?;
        push::put(client, &Selector::Tag(tag.clone()), raw.into(), media_type::INDEX).await?;
        tokio::time::sleep(vary(RACE_PAUSE)).await;
    }
    Ok(())
}

/// Deletes the manifest that was replaced. Many registries do not allow that, and a left-over only
/// takes space.
async fn remove(client: &Client, manifest: &Digest) {
    if let Err(error) = delete_manifest(client, manifest).await {
        tracing::debug!(%error, "a referrer that was replaced stays");
    }
}

/// Deletes a manifest, which may be gone already.
async fn delete_manifest(client: &Client, manifest: &Digest) -> Result<(), RegistryError> {
    let object = format!("manifest {manifest}");
    let scope = client.scope("delete,pull,push");
    let url = client.url(&format!("manifests/{manifest}"))?;
    let (method, headers) = (Method::DELETE, HeaderMap::new());
    let call = Call { method, url, scope: &scope, headers, body: None, object: &object };
    let response = client.send(&call).await?;
    match response.status() {
        status if status.is_success() || status == StatusCode::NOT_FOUND => Ok(()),
        _ => Err(client.refuse(response, &object).await),
    }
}

/// A document of ours, if registries will take it.
fn bounded(
    client: &Client,
    object: &str,
    json: Result<Vec<u8>, serde_json::Error>,
) -> Result<Vec<u8>, RegistryError> {
    let (place, limit) = (client.place.clone(), DOCUMENT_LIMIT);
    let object = object.to_owned();
    match json {
        Ok(json) if json.len() as u64 > limit => {
            Err(RegistryError::TooLarge { place, object, limit })
        }
        Ok(json) => Ok(json),
        Err(error) => Err(RegistryError::malformed(&place, &object, error.to_string())),
    }
}
