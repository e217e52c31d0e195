//! Which manifest is meant when a lazy image is wanted.
//!
//! Converters may leave an ordinary image as it is and put the lazy one beside it, as a referrer: a manifest whose `subject` is the ordinary
//! one (nydusify's `--with-referrer`). Permission to push to a repository is enough to put one there, also where tags cannot be changed, and
//! nothing compares its content with the subject's. So it counts only in repositories that the operator lists, or where a policy
//! has it verified.

use lazuli_image::oci::{Platform, media_type};

use crate::{
    error::RegistryError,
    manifest::{Document, IMAGE_TYPES, Manifest, Parsed, choose, parse},
    name::ImageName,
    repository::Repository,
    route::trusted::TrustedReferrers,
};

/// Referrers that are looked at: each is a request. Converters write one, and signatures and traces are told by their types.
const LOOKED_AT: usize = 8;

/// Types of artifacts that may be images. Registries take the type of the configuration where a manifest names none.
const MAY_BE_IMAGES: [&str; 4] = [
    media_type::CONFIG,
    media_type::DOCKER_CONFIG,
    media_type::LAZY_CONFIG,
    media_type::LAZY_MANIFEST,
];

/// The manifest that `repository`, opened at `name`, has; or if that is of an ordinary image and `may_replace` says so, the first of a lazy
/// image that refers to it. Not where the name has a digest: a referrer is not covered by it.
///
/// # Errors
/// The manifest cannot be had. What cannot be found out about referrers is not an error: the image is an ordinary one then.
pub async fn lazy_manifest(
    repository: &dyn Repository,
    name: &ImageName,
    platform: Option<&Platform>,
    may_replace: bool,
) -> Result<Manifest, RegistryError> {
    let manifest = repository.manifest(platform).await?;
    if name.is_pinned() || manifest.parsed.lazy_base().is_some() || !may_replace {
        return Ok(manifest);
    }
    Ok(referrer(repository, &manifest).await.unwrap_or(manifest))
}

/// The lazy form of what `name`, which is a tag, means: `document` itself, an entry of the index that it
/// is, or in a `trusted` repository an image that refers to it. None if there is none for this machine.
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
            if !is_lazy && !trusted.trust(name) {
                return Ok(None);
            }
            match repository.document(Some(&chosen.digest)).await?.parse(&place)? {
                Parsed::Image(manifest) => Manifest { index: Some(index), ..*manifest },
                Parsed::Index(..) => return Ok(None),
            }
        }
    };
    if manifest.parsed.lazy_base().is_some() {
        return Ok(Some(manifest));
    }
    if !trusted.trust(name) {
        return Ok(None);
    }
    Ok(referrer(repository, &manifest).await)
}

async fn referrer(repository: &dyn Repository, subject: &Manifest) -> Option<Manifest> {
    let unknown = |error: &RegistryError| {
        tracing::warn!(%error, "whether a lazy image refers to it is not known");
    };
    let found = repository.referrers(&subject.digest, None).await.inspect_err(unknown).ok()?;
    let images = found.into_iter().filter(|entry| {
        let kind = entry.artifact_type.as_deref();
        IMAGE_TYPES.contains(&entry.media_type.as_str())
            && kind.is_none_or(|kind| MAY_BE_IMAGES.contains(&kind))
    });
    for entry in images.take(LOOKED_AT) {
        let document = repository.document(Some(&entry.digest)).await;
        let Ok(document) = document.inspect_err(unknown) else { continue };
        let place = repository.describe();
        let parsed = parse(&place, document.raw, Some(&document.media_type), Some(&entry.digest));
        let Ok(Parsed::Image(manifest)) = parsed else { continue };
        let refers = manifest.parsed.subject.as_ref().map(|subject| subject.digest);
        if refers == Some(subject.digest) && manifest.parsed.bootstrap().is_some() {
            return Some(*manifest);
        }
    }
    None
}
