//! Evidence about an image as registries have it, unverified.

use bytes::Bytes;
use lazuli_image::{
    Digest,
    oci::{Descriptor, Manifest},
};

use crate::{error, media_type, payload::Payload};

/// Limit of signatures to read for one manifest. Each key that signs an image again adds one.
pub(crate) const SIGNATURES: usize = 32;

/// Signatures and statements, unverified.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// As cosign 2 and podman keep them.
    pub signatures: Vec<SimpleSignature>,
    /// As cosign 3 keeps them: bundles.
    pub bundles: Vec<Bytes>,
    /// Answers of verifier programs.
    pub(crate) consents: Vec<Consent>,
}

/// A payload, and a signature of it.
#[derive(Clone, Debug)]
pub struct SimpleSignature {
    /// The signed bytes.
    pub payload: Bytes,
    /// The signature.
    pub signature: Vec<u8>,
    /// The certificate of the signer, if no managed key made the signature.
    pub(crate) certified: Option<Certified>,
}

/// A certificate, and the log's word for it.
#[derive(Clone, Debug)]
pub(crate) struct Certified {
    pub(crate) certificate: String,
    pub(crate) chain: String,
    pub(crate) log_entry: String,
}

/// A verifier program's answer about an image.
#[derive(Clone, Debug)]
pub(crate) struct Consent {
    pub(crate) digest: Digest,
    pub(crate) answer: Result<(), String>,
}

/// A layer of a manifest that has cosign's signatures.
#[derive(Clone, Debug)]
pub(crate) struct SignatureLayer {
    pub(crate) payload: Descriptor,
    signature: Vec<u8>,
    certified: Option<Certified>,
}

impl SignatureLayer {
    /// The signatures in the manifest of a tag `sha256-HEX.sig`. The newest are last, and are those
    /// that count if there are very many.
    pub(crate) fn all(manifest: &[u8]) -> Vec<Self> {
        let layers = Manifest::parse(manifest).map(|manifest| manifest.layers).unwrap_or_default();
        let is_payload = |layer: &Descriptor| layer.media_type == media_type::SIMPLE_SIGNING;
        let layers = layers.into_iter().rev().filter(is_payload).take(SIGNATURES);
        layers.filter_map(Self::of).collect()
    }

    fn of(payload: Descriptor) -> Option<Self> {
        let note = |name: &str| payload.annotations.get(name).cloned();
        let signature = error::base64("signature", &note(media_type::SIGNATURE)?).ok()?;
        let certified = note(media_type::CERTIFICATE).map(|certificate| Certified {
            certificate,
            chain: note(media_type::CHAIN).unwrap_or_default(),
            log_entry: note(media_type::LOG_ENTRY).unwrap_or_default(),
        });
        Some(SignatureLayer { payload, signature, certified })
    }

    /// Reconstructs the payload without fetching it, if it is cosign's for one of `references`.
    pub(crate) fn guess(&self, references: &[String], digest: Digest) -> Option<Bytes> {
        let mut payloads = references
            .iter()
            .map(|reference| Payload { reference: reference.clone(), digest }.to_json());
        payloads.find(|json| self.payload.digest.matches(json)).map(Bytes::from)
    }

    pub(crate) fn with(self, payload: Bytes) -> SimpleSignature {
        let SignatureLayer { signature, certified, .. } = self;
        SimpleSignature { payload, signature, certified }
    }
}

impl Evidence {
    pub(crate) fn extend(&mut self, other: Evidence) {
        self.signatures.extend(other.signatures);
        self.bundles.extend(other.bundles);
        self.consents.extend(other.consents);
    }
}
