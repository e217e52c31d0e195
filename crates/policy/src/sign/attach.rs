//! Attaches statements to their subjects.

use lazuli_image::oci::{Descriptor, Manifest};
use lazuli_registry::{BlobContent, Document, PushBy, RegistryError, Repository};

use super::{BundleReferrer, SigningError, SigningKey, sign_statement};
use crate::{Bundle, Statement, bundle::BUNDLE_LIMIT, media_type};

/// Maximum number of bundles beside an image that are checked for an existing signature.
const CHECKED_BUNDLES: usize = 64;

/// Why a statement was not attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The key cannot sign.
    #[error(transparent)]
    Sign(#[from] SigningError),
    /// The registry or layout refuses the bundle.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// Signs `statement` with `key`, and adds the bundle to `to` as a referrer of `subject`. Does
/// nothing if a bundle with the same statement by this key exists.
///
/// # Errors
/// The key cannot sign, or the place does not take the bundle.
pub async fn attach(
    to: &dyn Repository,
    subject: &Descriptor,
    statement: &Statement,
    key: &SigningKey,
) -> Result<(), AttachError> {
    if is_attached(to, subject, statement, key).await? {
        return Ok(());
    }
    let bundle = sign_statement(key, statement)?;
    let referrer = BundleReferrer::new(subject, &bundle, &statement.predicate_type);
    for (digest, content) in referrer.blobs(bundle) {
        let (size, content) = (content.len() as u64, BlobContent::Bytes(content.into()));
        to.push_blob(&digest, size, content, None, &|_| {}).await?;
    }
    let entry = referrer.entry();
    let (digest, media_type) = (entry.digest, entry.media_type.clone());
    let document = Document { raw: referrer.to_json().into(), digest, media_type };
    to.push_document(&document, PushBy::Digest).await?;
    Ok(to.enlist_referrers(&subject.digest, &[entry]).await?)
}

async fn is_attached(
    to: &dyn Repository,
    subject: &Descriptor,
    statement: &Statement,
    key: &SigningKey,
) -> Result<bool, AttachError> {
    let bundles = to.referrers(&subject.digest, Some(media_type::BUNDLE)).await?;
    let of_this_type = bundles.iter().filter(|entry| {
        entry.annotations.get(media_type::BUNDLE_PREDICATE) == Some(&statement.predicate_type)
    });
    let payload = statement.to_json();
    for entry in of_this_type.take(CHECKED_BUNDLES) {
        // Skip missing and damaged bundles: they are not ours.
        let Ok(document) = to.document(Some(&entry.digest)).await else { continue };
        let Ok(manifest) = Manifest::parse(&document.raw) else { continue };
        let [layer] = &manifest.layers[..] else { continue };
        if layer.size > BUNDLE_LIMIT as u64 {
            continue;
        }
        let Ok(blob) = to.small_blob(layer).await else { continue };
        let Ok(Bundle { envelope, .. }) = Bundle::parse(&blob.content) else { continue };
        let (signed, public) = (envelope.signed_bytes(), key.public());
        let is_by_key =
            || envelope.signatures.iter().any(|signature| public.verifies(&signed, signature));
        if envelope.payload == payload && is_by_key() {
            return Ok(true);
        }
    }
    Ok(false)
}
