//! A signed statement as a referrer of the image that it is about.

use std::collections::BTreeMap;

use lazuli_image::{
    Algorithm, Digest,
    oci::{Descriptor, media_type as oci_type},
};
use serde::Serialize;

use super::{SigningError, SigningKey};
use crate::{
    Bundle, Envelope, Statement, error,
    media_type::{self, blob_hint},
};

/// The content of the empty configuration.
const EMPTY: &[u8] = b"{}";

/// The bundle of `statement`, signed with `key`.
///
/// # Errors
/// The key cannot sign.
pub fn sign_statement(key: &SigningKey, statement: &Statement) -> Result<Vec<u8>, SigningError> {
    let mut envelope = Envelope::new(media_type::IN_TOTO, statement.to_json());
    envelope.signatures.push(key.sign(&envelope.signed_bytes())?);
    // cosign's hint: SHA-256 of the public key, in base64.
    let hint = error::to_base64(&key.public().fingerprint().hash);
    Ok(Bundle::to_json(&envelope, &hint))
}

/// The manifest that makes a bundle a referrer of an image.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BundleReferrer {
    schema_version: u32,
    media_type: &'static str,
    artifact_type: &'static str,
    config: Descriptor,
    layers: [Descriptor; 1],
    subject: Descriptor,
    annotations: BTreeMap<String, String>,
}

impl BundleReferrer {
    /// A referrer of `subject` with `bundle`, whose statement's predicate has the type
    /// `predicate_type`.
    pub fn new(subject: &Descriptor, bundle: &[u8], predicate_type: &str) -> Self {
        let digest = |content| Algorithm::Sha256.digest(content);
        let blob: (Digest, u64) = (digest(bundle), bundle.len() as u64);
        let annotations = [
            (media_type::BUNDLE_CONTENT, media_type::DSSE_CONTENT.to_owned()),
            (media_type::BUNDLE_PREDICATE, predicate_type.to_owned()),
            (media_type::BUNDLE_BLOB, blob_hint(&blob.0, blob.1)),
        ];
        let annotations = annotations.map(|(name, value)| (name.to_owned(), value)).into();
        BundleReferrer {
            schema_version: 2,
            media_type: oci_type::MANIFEST,
            artifact_type: media_type::BUNDLE,
            config: Descriptor::plain(oci_type::EMPTY, digest(EMPTY), EMPTY.len() as u64),
            layers: [Descriptor::plain(media_type::BUNDLE, blob.0, blob.1)],
            subject: Descriptor::plain(&subject.media_type, subject.digest, subject.size),
            annotations,
        }
    }

    /// The blobs that it names, with their content.
    pub fn blobs(&self, bundle: Vec<u8>) -> [(Digest, Vec<u8>); 2] {
        [(self.config.digest, EMPTY.to_vec()), (self.layers[0].digest, bundle)]
    }

    /// The manifest.
    pub fn to_json(&self) -> Vec<u8> {
        // Cannot fail: all values are strings and numbers.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The manifest's entry in the list of the image's referrers.
    pub fn entry(&self) -> Descriptor {
        let raw = self.to_json();
        let digest = Algorithm::Sha256.digest(&raw);
        let plain = Descriptor::plain(self.media_type, digest, raw.len() as u64);
        let artifact_type = Some(self.artifact_type.to_owned());
        Descriptor { annotations: self.annotations.clone(), artifact_type, ..plain }
    }
}
