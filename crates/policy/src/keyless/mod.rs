//! Signatures by identities instead of keys: short-lived certificates, and the log that has them.

use std::{fmt, path::PathBuf};

use lazuli_image::Digest;
use serde::Deserialize;
use serde_json::{Value, json};
use sigstore_verify::{
    SubjectAltName, VerificationPolicy, Verifier,
    trust_root::TrustedRoot,
    types::{Bundle, Sha256Hash},
};

use crate::{
    error::{self, DocumentError},
    evidence::Certified,
};

/// Maximum size of a trusted root, in bytes. That of the public instance has 7 kB.
pub(crate) const LIMIT: usize = 1 << 20;

const DOCUMENT: &str = "Sigstore bundle";

/// The accepted identity, as the policy file has it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    issuer: String,
    subject: String,
    pub(crate) trusted_root: PathBuf,
}

/// An identity with its trusted root.
pub(crate) struct Keyless {
    issuer: String,
    subject: String,
    verifier: Verifier,
}

impl fmt::Debug for Keyless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keyless({self})")
    }
}

impl fmt::Display for Keyless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.subject, self.issuer)
    }
}

impl Keyless {
    /// Reads the accepted identity; `root` is the content of its trusted root file.
    pub(crate) fn new(table: Table, root: &[u8]) -> Result<Self, String> {
        let Table { issuer, subject, trusted_root } = table;
        if issuer.is_empty() || subject.trim_end_matches('*').is_empty() {
            return Err("keyless needs an issuer and a subject".to_owned());
        }
        let root = std::str::from_utf8(root).map_err(|error| error.to_string());
        let root =
            root.and_then(|json| TrustedRoot::from_json(json).map_err(|error| error.to_string()));
        let verifier =
            root.and_then(|root| Verifier::new(&root).map_err(|error| error.to_string()));
        let verifier = verifier.map_err(|problem| {
            format!("keyless.trusted_root has {}: {problem}", trusted_root.display())
        })?;
        Ok(Keyless { issuer, subject, verifier })
    }

    /// Checks that a bundle is this identity's signature of an object with the digest `signed`.
    pub(crate) fn verify(&self, bundle: &[u8], signed: &Digest) -> Result<(), String> {
        let json = std::str::from_utf8(bundle).map_err(|error| error.to_string())?;
        let bundle = Bundle::from_json(json).map_err(|error| error.to_string())?;
        let policy = VerificationPolicy::any_identity().require_issuer(&self.issuer);
        let artifact = Sha256Hash::try_from(&signed.hash[..]).map_err(|error| error.to_string())?;
        let result = self.verifier.verify(artifact, &bundle, &policy);
        let result = result.map_err(|error| error.to_string())?;
        let subject = result.identity().map(SubjectAltName::as_str).unwrap_or_default();
        if self.is(subject) { Ok(()) } else { Err(format!("it is signed by {subject:?}")) }
    }

    /// A `*` at the end stands for anything: the tag of a release, in the name of a workflow.
    fn is(&self, subject: &str) -> bool {
        match self.subject.strip_suffix('*') {
            Some(prefix) => subject.starts_with(prefix),
            None => subject == self.subject,
        }
    }
}

/// The transparency log's entry for a signature, in an annotation of cosign 2.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct LogEntry {
    signed_entry_timestamp: String,
    payload: LogPayload,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LogPayload {
    body: String,
    integrated_time: i64,
    log_index: i64,
    #[serde(rename = "logID")]
    log_id: String,
}

/// A signature of `payload` as cosign 2 keeps it, as the bundle that it became later: version 0.1,
/// which has the log's promise where later ones have a proof.
pub(crate) fn to_bundle(
    certified: &Certified,
    signature: &[u8],
    payload: &Digest,
) -> Result<Vec<u8>, DocumentError> {
    let fail = |problem: String| DocumentError::new(DOCUMENT, problem);
    let log: LogEntry = error::json(DOCUMENT, certified.log_entry.as_bytes(), LIMIT)?;
    let body = error::base64(DOCUMENT, &log.payload.body)?;
    let body: Value = error::json(DOCUMENT, &body, LIMIT)?;
    let word = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
    let key_id = from_hex(&log.payload.log_id)
        .ok_or_else(|| fail(format!("has a log entry with the log {:?}", log.payload.log_id)))?;
    let certificates = [&certified.certificate, &certified.chain];
    let certificates = certificates.into_iter().flat_map(|pem| certificates_in(pem));
    let certificates: Vec<_> =
        certificates.map(|der| json!({ "rawBytes": error::to_base64(&der) })).collect();
    let bundle = json!({
        "mediaType": "application/vnd.dev.sigstore.bundle+json;version=0.1",
        "verificationMaterial": {
            "x509CertificateChain": { "certificates": certificates },
            "tlogEntries": [{
                "logIndex": log.payload.log_index.to_string(),
                "logId": { "keyId": error::to_base64(&key_id) },
                "kindVersion": { "kind": word("kind"), "version": word("apiVersion") },
                "integratedTime": log.payload.integrated_time.to_string(),
                "inclusionPromise": { "signedEntryTimestamp": log.signed_entry_timestamp },
                "canonicalizedBody": log.payload.body,
            }],
        },
        "messageSignature": {
            "messageDigest": { "algorithm": "SHA2_256", "digest": error::to_base64(&payload.hash) },
            "signature": error::to_base64(signature),
        },
    });
    Ok(bundle.to_string().into_bytes())
}

fn certificates_in(pem: &str) -> Vec<Vec<u8>> {
    use rustls_pki_types::{CertificateDer, pem::PemObject as _};
    let certificates = CertificateDer::pem_slice_iter(pem.as_bytes());
    certificates.filter_map(|der| Some(der.ok()?.to_vec())).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    let pairs = digits.chunks(2).map(|pair| {
        let pair = std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2)?;
        u8::from_str_radix(pair, 16).ok()
    });
    pairs.collect()
}

#[cfg(test)]
mod tests;
