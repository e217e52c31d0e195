//! The Sigstore bundle, version 0.3, with a managed key: what cosign 3 puts beside an image.
//!
//! ```json
//! {"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
//!  "verificationMaterial": {"publicKey": {"hint": "…"}},
//!  "dsseEnvelope": {"payload": "…", "payloadType": "application/vnd.in-toto+json",
//!                   "signatures": […]}}
//! ```

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    dsse::{Encoded, Envelope},
    error::{self, DocumentError},
    media_type,
};

/// Maximum size of a bundle in bytes. A bundle with a certificate, log entries and timestamps has
/// 10 kB; a statement may list some hundred manifests.
pub const BUNDLE_LIMIT: usize = 1 << 20;

const DOCUMENT: &str = "Sigstore bundle";

/// A bundle, as far as a signature by a managed key needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bundle {
    /// Whether the bundle names a certificate instead of a managed key.
    pub has_certificate: bool,
    /// The signed payload with its signatures.
    pub envelope: Envelope,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    media_type: String,
    verification_material: Material,
    dsse_envelope: Option<Encoded>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Material {
    #[serde(skip_serializing_if = "Option::is_none")]
    public_key: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    certificate: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    x509_certificate_chain: Option<Value>,
}

impl Bundle {
    /// Parses a bundle of at most [`BUNDLE_LIMIT`] bytes.
    ///
    /// # Errors
    /// The bytes are not a bundle, or it holds no DSSE envelope.
    pub fn parse(raw: &[u8]) -> Result<Self, DocumentError> {
        let document: Document = error::json(DOCUMENT, raw, BUNDLE_LIMIT)?;
        if !document.media_type.starts_with("application/vnd.dev.sigstore.bundle") {
            let problem = format!(
                "has the media type {:?}, expected `{}`",
                document.media_type,
                media_type::BUNDLE
            );
            return Err(DocumentError::new(DOCUMENT, problem));
        }
        let encoded = document.dsse_envelope.ok_or_else(|| {
            DocumentError::new(DOCUMENT, "has no dsseEnvelope, expected a signed statement")
        })?;
        let material = document.verification_material;
        let has_certificate =
            material.certificate.is_some() || material.x509_certificate_chain.is_some();
        Ok(Bundle { has_certificate, envelope: Envelope::decode(&encoded)? })
    }

    /// The bundle of `envelope`, which a managed key signed that is known by `hint`.
    pub fn to_json(envelope: &Envelope, hint: &str) -> Vec<u8> {
        let document = Document {
            media_type: media_type::BUNDLE.to_owned(),
            verification_material: Material {
                public_key: Some(json!({ "hint": hint })),
                certificate: None,
                x509_certificate_chain: None,
            },
            dsse_envelope: Some(envelope.encode()),
        };
        // Cannot fail: all values are strings.
        serde_json::to_vec(&document).unwrap_or_default()
    }
}
