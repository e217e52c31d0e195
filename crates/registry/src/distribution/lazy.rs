//! Finding the lazy form of an image.
//!
//! Converters may leave an ordinary image as it is and put the lazy one beside it, as a referrer: a
//! manifest whose `subject` is the ordinary one (nydusify's `--with-referrer`). Indexes are
//! referrers always. Permission to push to a repository is enough to put one there, also where tags
//! cannot be changed, and nothing compares its content with the subject's. So they count only where
//! the operator says so, or where a policy has them verified.

use lazuli_image::{
    Digest,
    oci::{Descriptor, Platform, media_type},
};

use crate::{
    error::RegistryError,
    manifest::{Document, IMAGE_TYPES, Manifest, Parsed, choose, parse},
    name::ImageName,
    repository::Repository,
    route::trusted::{IndexTrust, Replacement, TrustedReferrers},
};

/// Referrers that are looked at: each is a request. Converters write one, and signatures and traces
/// are told by their types.
const LOOKED_AT: usize = 8;

/// Types of artifacts that may be images. Registries take the type of the configuration where a
/// manifest names none.
const MAY_BE_IMAGES: [&str; 4] = [
    media_type::CONFIG,
    media_type::DOCKER_CONFIG,
    media_type::LAZY_CONFIG,
    media_type::LAZY_MANIFEST,
];

/// A manifest, and what was learned on the way to it.
#[derive(Clone, Debug)]
pub struct Found {
    /// The manifest.
    pub manifest: Manifest,
    /// The referrers of it that may be images or indexes, if the registry was asked for all of
    /// them.
    pub referrers: Option<Vec<Descriptor>>,
}

/// Returns the manifest that `repository` was opened at, `name`; or, if that is an ordinary
/// image's, the manifest of a referrer:
///
/// - Where `replacement` is allowed, the first lazy image. Not where the name has a digest: a
///   referrer is not covered by it.
/// - An [index](lazuli_image::oci::IndexImage) of the image, whose data is the image's own, where
///   `indexes` trusts those.
///
/// # Errors
/// The manifest cannot be read. A failed search for referrers is not an error: the image counts as
/// an ordinary one then.
pub async fn lazy_manifest(
    repository: &dyn Repository,
    name: &ImageName,
    platform: Option<&Platform>,
    replacement: Replacement,
    indexes: IndexTrust,
) -> Result<Found, RegistryError> {
    let manifest = repository.manifest(platform).await?;
    let mut referrers = None;
    if manifest.parsed.lazy_base().is_some() {
        return Ok(Found { manifest, referrers });
    }
    if !name.is_pinned() && replacement == Replacement::Allowed {
        let listed = listed(repository, &manifest.digest, None).await;
        if let Some(lazy) = lazy_among(repository, &manifest, &listed).await {
            return Ok(Found { manifest: lazy, referrers });
        }
        referrers = Some(listed);
    }
    if indexes.trusts(name)
        && let Some(index) = index(repository, &manifest, referrers.as_deref()).await
    {
        return Ok(Found { manifest: index, referrers: None });
    }
    Ok(Found { manifest, referrers })
}

/// Returns the lazy form of the tag `name`: `document` itself, an entry if it is an index, or in a
/// `trusted` repository an image that refers to it. `None` if there is none for this machine.
///
/// # Errors
/// The index has no image for this machine, or its entry cannot be had.
pub async fn lazy_form(
    repository: &dyn Repository,
    name: &ImageName,
    document: &Document,
    trusted: &TrustedReferrers,
) -> Result<Option<Manifest>, RegistryError> {
    let place = repository.describe();
    let manifest = match document.parse(&place)? {
        Parsed::Image(manifest) => *manifest,
        Parsed::Index(index, entries) => {
            let chosen = choose(&place, &entries, None)?;
            let lazy = Platform::LAZY;
            let is_lazy = chosen.runs_on().is_some_and(|p| p.features.iter().any(|f| f == lazy));
            if !is_lazy && trusted.replacement(name) == Replacement::Refused {
                return Ok(None);
            }
            match repository.document(Some(&chosen.digest)).await?.parse(&place)? {
                Parsed::Image(manifest) => Manifest { index: Some(*index), ..*manifest },
                Parsed::Index(..) => return Ok(None),
            }
        }
    };
    if manifest.parsed.lazy_base().is_some() {
        return Ok(Some(manifest));
    }
    if trusted.replacement(name) == Replacement::Refused {
        return Ok(None);
    }
    let entries = listed(repository, &manifest.digest, None).await;
    Ok(lazy_among(repository, &manifest, &entries).await)
}

/// The first lazy image among the referrers of `subject`.
async fn lazy_among(
    repository: &dyn Repository,
    subject: &Manifest,
    entries: &[Descriptor],
) -> Option<Manifest> {
    let may_be = |entry: &&Descriptor| {
        let kind = entry.artifact_type.as_deref();
        kind.is_none_or(|kind| MAY_BE_IMAGES.contains(&kind))
    };
    let is_lazy = |found: &Manifest| {
        let refers = found.parsed.subject.as_ref().map(|subject| subject.digest);
        refers == Some(subject.digest) && found.parsed.bootstrap().is_some()
    };
    for entry in entries.iter().filter(may_be).take(LOOKED_AT) {
        if let Some(image) = fetch(repository, entry).await.filter(is_lazy) {
            return Some(image);
        }
    }
    None
}

/// The first index of `subject`.
async fn index(
    repository: &dyn Repository,
    subject: &Manifest,
    referrers: Option<&[Descriptor]>,
) -> Option<Manifest> {
    for entry in listed_indexes(repository, &subject.digest, referrers).await {
        if let Some(index) = fetch_index(repository, subject, &entry).await {
            return Some(index);
        }
    }
    None
}

/// Entries of the list of referrers that may be indexes of the image `subject`, trusted or not.
/// `referrers` is the list, if it is known.
pub async fn listed_indexes(
    repository: &dyn Repository,
    subject: &Digest,
    referrers: Option<&[Descriptor]>,
) -> Vec<Descriptor> {
    let is_index =
        |entry: &Descriptor| entry.artifact_type.as_deref() == Some(media_type::LAYER_INDEX);
    let mut entries = match referrers {
        Some(all) => all.iter().filter(|entry| is_index(entry)).cloned().collect(),
        None => listed(repository, subject, Some(media_type::LAYER_INDEX)).await,
    };
    entries.truncate(LOOKED_AT);
    entries
}

/// Fetches the manifest of a listed index; `None` if it is none of `subject`.
pub async fn fetch_index(
    repository: &dyn Repository,
    subject: &Manifest,
    entry: &Descriptor,
) -> Option<Manifest> {
    let index = fetch(repository, entry).await?;
    index.parsed.is_index_of(&subject.digest, &subject.parsed).then_some(index)
}

/// Entries of the list of referrers of `subject` that have the type of an image.
async fn listed(
    repository: &dyn Repository,
    subject: &Digest,
    artifact_type: Option<&str>,
) -> Vec<Descriptor> {
    let found = repository.referrers(subject, artifact_type).await;
    let mut entries = found.inspect_err(unknown).unwrap_or_default();
    entries.retain(|entry| IMAGE_TYPES.contains(&entry.media_type.as_str()));
    entries
}

/// Fetches a referrer's manifest.
async fn fetch(repository: &dyn Repository, entry: &Descriptor) -> Option<Manifest> {
    let document = repository.document(Some(&entry.digest)).await.inspect_err(unknown).ok()?;
    let place = repository.describe();
    let parsed = parse(&place, document.raw, Some(&document.media_type), Some(&entry.digest));
    let Ok(Parsed::Image(manifest)) = parsed else { return None };
    Some(*manifest)
}

fn unknown(error: &RegistryError) {
    tracing::warn!(%error, "whether a lazy image refers to it is not known");
}
