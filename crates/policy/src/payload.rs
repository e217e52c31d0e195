//! The simple signing payload: what cosign 2 and `podman push --sign-by-sigstore` sign.
//!
//! ```json
//! {"critical":{"identity":{"docker-reference":"r.example/app"},
//!              "image":{"docker-manifest-digest":"sha256:…"},
//!              "type":"cosign container image signature"},
//!  "optional":null}
//! ```

use lazuli_image::Digest;
use serde::{Deserialize, Serialize};

use crate::error::{self, DocumentError};

/// Maximum size of a payload in bytes. cosign's have 250, and annotations by users are short.
pub const PAYLOAD_LIMIT: usize = 64 << 10;

const DOCUMENT: &str = "simple signing payload";

/// The type that cosign and podman write.
const TYPE: &str = "cosign container image signature";

/// A signed statement about an image: its name and digest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    /// The name that was signed, as its maker spells it: `r.example/app`, perhaps with a tag.
    pub reference: String,
    /// Digest of the manifest or index.
    pub digest: Digest,
}

#[derive(Deserialize, Serialize)]
struct Document {
    critical: Critical,
    #[serde(default)]
    optional: serde_json::Value,
}

/// Unknown fields are errors, because a verifier must understand all of the critical part.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Critical {
    identity: Identity,
    image: Image,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Identity {
    #[serde(rename = "docker-reference")]
    reference: String,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Image {
    #[serde(rename = "docker-manifest-digest")]
    digest: Digest,
}

impl Payload {
    /// Parses a payload of at most [`PAYLOAD_LIMIT`] bytes.
    ///
    /// # Errors
    /// The bytes are not a payload, or one of an unknown type.
    pub fn parse(raw: &[u8]) -> Result<Self, DocumentError> {
        let Document { critical, .. } = error::json(DOCUMENT, raw, PAYLOAD_LIMIT)?;
        if critical.kind != TYPE {
            let problem = format!("has the type {:?}, expected `{TYPE}`", critical.kind);
            return Err(DocumentError::new(DOCUMENT, problem));
        }
        Ok(Payload { reference: critical.identity.reference, digest: critical.image.digest })
    }

    /// Writes the payload exactly as cosign does. A node can thus reconstruct a payload instead of
    /// fetching it: the signature's manifest has its digest.
    pub fn to_json(&self) -> Vec<u8> {
        let document = Document {
            critical: Critical {
                identity: Identity { reference: self.reference.clone() },
                image: Image { digest: self.digest },
                kind: TYPE.to_owned(),
            },
            optional: serde_json::Value::Null,
        };
        // Cannot fail: all values are strings.
        serde_json::to_vec(&document).unwrap_or_default()
    }
}
