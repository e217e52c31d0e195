//! The manifest under an image's `.sig` tag: one layer for each signature.

use lazuli_image::{
    Algorithm, Digest,
    oci::{Descriptor, media_type as oci_type},
};
use serde_json::{Map, Value, json};

use super::{SigningError, SigningKey};
use crate::{
    Payload,
    error::{self, DocumentError},
    key::PublicKey,
    media_type,
};

const DOCUMENT: &str = "manifest of signatures";

/// Maximum size of such a manifest, in bytes: what registries accept.
const LIMIT: usize = lazuli_image::oci::MAX_DOCUMENT;

/// A simple signing payload and its signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedPayload {
    /// The payload, which is a blob.
    pub payload: Vec<u8>,
    signature: String,
}

impl SignedPayload {
    /// Signs a payload.
    ///
    /// # Errors
    /// The key cannot sign.
    pub fn new(key: &SigningKey, payload: &Payload) -> Result<Self, SigningError> {
        let payload = payload.to_json();
        let signature = error::to_base64(&key.sign(&payload)?);
        Ok(SignedPayload { payload, signature })
    }

    fn layer(&self) -> Descriptor {
        let digest = Algorithm::Sha256.digest(&self.payload);
        let layer =
            Descriptor::plain(media_type::SIMPLE_SIGNING, digest, self.payload.len() as u64);
        let annotations = [(media_type::SIGNATURE.to_owned(), self.signature.clone())].into();
        Descriptor { annotations, ..layer }
    }
}

/// A manifest of signatures. Fields by other signers are kept.
#[derive(Clone, Debug, PartialEq)]
pub struct SignatureManifest {
    fields: Map<String, Value>,
    layers: Vec<Value>,
}

impl Default for SignatureManifest {
    fn default() -> Self {
        let fields = [("schemaVersion", json!(2)), ("mediaType", json!(oci_type::MANIFEST))];
        let fields = fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        SignatureManifest { fields, layers: Vec::new() }
    }
}

impl SignatureManifest {
    /// Parses the manifest under a `.sig` tag.
    ///
    /// # Errors
    /// The bytes are not a manifest of signatures.
    pub fn parse(raw: &[u8]) -> Result<Self, DocumentError> {
        let mut fields: Map<String, Value> = error::json(DOCUMENT, raw, LIMIT)?;
        let layers = fields.remove("layers");
        let Some(Value::Array(layers)) = layers else {
            return Err(DocumentError::new(
                DOCUMENT,
                "has no list of layers, expected one for each signature",
            ));
        };
        Ok(SignatureManifest { fields, layers })
    }

    /// Returns whether a signature of `payload` exists that `key` verifies.
    pub fn has(&self, payload: &[u8], key: &PublicKey) -> bool {
        let digest = Algorithm::Sha256.digest(payload);
        let mut layers = self
            .layers
            .iter()
            .filter_map(|layer| serde_json::from_value::<Descriptor>(layer.clone()).ok());
        layers.any(|layer| {
            let signature = layer.annotations.get(media_type::SIGNATURE);
            let signature = signature.and_then(|text| error::base64(DOCUMENT, text).ok());
            layer.digest == digest && signature.is_some_and(|it| key.verifies(payload, &it))
        })
    }

    /// Adds a signature.
    pub fn add(&mut self, signed: &SignedPayload) {
        // Cannot fail: all values are strings and numbers.
        self.layers.extend(serde_json::to_value(signed.layer()));
    }

    /// The configuration that readers of images expect, with one "layer" for each signature.
    pub fn config(&self) -> Vec<u8> {
        let diff_ids: Vec<&Value> = self.layers.iter().map(|layer| &layer["digest"]).collect();
        let epoch = "0001-01-01T00:00:00Z";
        json!({
            "architecture": "", "created": epoch, "history": [{ "created": epoch }], "os": "",
            "rootfs": { "type": "layers", "diff_ids": diff_ids }, "config": {},
        })
        .to_string()
        .into_bytes()
    }

    /// The manifest, which names [`SignatureManifest::config`].
    pub fn to_json(&self) -> Vec<u8> {
        let config = self.config();
        let digest: Digest = Algorithm::Sha256.digest(&config);
        let config = Descriptor::plain(oci_type::CONFIG, digest, config.len() as u64);
        let mut fields = self.fields.clone();
        fields.insert("config".to_owned(), json!(config));
        fields.insert("layers".to_owned(), json!(self.layers));
        Value::Object(fields).to_string().into_bytes()
    }
}
