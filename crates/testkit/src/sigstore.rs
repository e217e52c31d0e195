//! A Sigstore instance: a certificate authority, a certificate log and a signature log, each with a
//! key of its own. Signatures are by identities, and everything about them is in files.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use lazuli_image::{Algorithm, Digest};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, CustomExtension, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, PublicKeyData as _, SanType,
    SigningKey as _, date_time_ymd,
};
use serde_json::{Value, json};

/// When everything is signed: noon of the only day on which certificates are valid. Checks have to
/// go by the log's time.
const SIGNED_AT: u64 = 1_735_732_800;

/// Extensions of certificates.
mod oid {
    /// The issuer of the identity, as plain text.
    pub(super) const ISSUER: &[u64] = &[1, 3, 6, 1, 4, 1, 57264, 1, 1];
    /// The same as a UTF-8 string in DER.
    pub(super) const ISSUER_V2: &[u64] = &[1, 3, 6, 1, 4, 1, 57264, 1, 8];
    /// What certificate logs promised.
    pub(super) const SCT_LIST: &[u64] = &[1, 3, 6, 1, 4, 1, 11129, 2, 4, 2];
}

/// Who signs: `subject` is a URI.
#[derive(Clone, Copy, Debug)]
pub struct Identity<'a> {
    /// The provider that vouches for the identity.
    pub issuer: &'a str,
    /// What it vouches for, such as a workflow.
    pub subject: &'a str,
}

/// An instance.
#[derive(Debug)]
pub struct Sigstore {
    authority: CertifiedIssuer<'static, KeyPair>,
    certificate_log: KeyPair,
    signature_log: KeyPair,
}

impl Default for Sigstore {
    fn default() -> Self {
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name.push(DnType::CommonName, "sigstore");
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let authority = CertifiedIssuer::self_signed(parameters, key()).expect("an authority");
        Sigstore { authority, certificate_log: key(), signature_log: key() }
    }
}

impl Sigstore {
    /// The trusted root, as clients have it in a file.
    pub fn trusted_root(&self) -> String {
        let valid = json!({ "start": "2020-01-01T00:00:00Z" });
        let log = |host: &str, key: &KeyPair| {
            json!({
                "baseUrl": format!("https://{host}"),
                "hashAlgorithm": "SHA2_256",
                "publicKey": {
                    "rawBytes": STANDARD.encode(key.subject_public_key_info()),
                    "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                    "validFor": valid,
                },
                "logId": { "keyId": STANDARD.encode(log_id(key)) },
            })
        };
        let authority = json!({
            "subject": { "organization": "sigstore", "commonName": "sigstore" },
            "uri": "https://fulcio.example",
            "certChain": {
                "certificates": [{ "rawBytes": STANDARD.encode(self.authority.der()) }],
            },
            "validFor": valid,
        });
        let root = json!({
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log("rekor.example", &self.signature_log)],
            "certificateAuthorities": [authority],
            "ctlogs": [log("ctfe.example", &self.certificate_log)],
            "timestampAuthorities": [],
        });
        root.to_string()
    }

    /// A statement of `identity` as cosign 3 keeps it: a bundle of version 0.3.
    pub fn bundle(&self, identity: Identity<'_>, statement: &str) -> String {
        let kind = "application/vnd.in-toto+json";
        let signed = format!("DSSEv1 {} {kind} {} {statement}", kind.len(), statement.len());
        let (certificate, key) = self.certificate(identity);
        let signature = STANDARD.encode(key.sign(signed.as_bytes()).expect("a signature"));
        let envelope = json!({
            "payload": STANDARD.encode(statement),
            "payloadType": kind,
            "signatures": [{ "sig": signature }],
        });
        let hash = |content: &str| json!({ "algorithm": "sha256", "value": sha256(content).hex() });
        let entry = json!({
            "apiVersion": "0.0.1",
            "kind": "dsse",
            "spec": {
                "envelopeHash": hash(&envelope.to_string()),
                "payloadHash": hash(statement),
                "signatures": [{
                    "signature": signature,
                    "verifier": STANDARD.encode(certificate.pem()),
                }],
            },
        });
        let logged = self.log(&entry);
        let bundle = json!({
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {
                "certificate": { "rawBytes": STANDARD.encode(certificate.der()) },
                "tlogEntries": [{
                    "logIndex": "0",
                    "logId": { "keyId": STANDARD.encode(log_id(&self.signature_log)) },
                    "kindVersion": { "kind": "dsse", "version": "0.0.1" },
                    "integratedTime": SIGNED_AT.to_string(),
                    "inclusionPromise": { "signedEntryTimestamp": logged.promise },
                    "inclusionProof": logged.proof,
                    "canonicalizedBody": logged.body,
                }],
            },
            "dsseEnvelope": envelope,
        });
        bundle.to_string()
    }

    /// The annotations of a layer with a simple signing `payload`, as cosign 2 keeps it.
    pub fn annotations(&self, identity: Identity<'_>, payload: &str) -> Value {
        let (certificate, key) = self.certificate(identity);
        let signature = STANDARD.encode(key.sign(payload.as_bytes()).expect("a signature"));
        let entry = json!({
            "apiVersion": "0.0.1",
            "kind": "hashedrekord",
            "spec": {
                "data": { "hash": { "algorithm": "sha256", "value": sha256(payload).hex() } },
                "signature": {
                    "content": signature,
                    "publicKey": { "content": STANDARD.encode(certificate.pem()) },
                },
            },
        });
        let logged = self.log(&entry);
        let entry = json!({
            "SignedEntryTimestamp": logged.promise,
            "Payload": {
                "body": logged.body,
                "integratedTime": SIGNED_AT,
                "logIndex": 0,
                "logID": sha256(self.signature_log.subject_public_key_info()).hex(),
            },
        });
        json!({
            "dev.cosignproject.cosign/signature": signature,
            "dev.sigstore.cosign/certificate": certificate.pem(),
            "dev.sigstore.cosign/chain": self.authority.pem(),
            "dev.sigstore.cosign/bundle": entry.to_string(),
        })
    }

    /// A certificate for `identity` with the certificate log's promise, and its key.
    fn certificate(&self, identity: Identity<'_>) -> (rcgen::Certificate, KeyPair) {
        let key = key();
        let mut parameters = CertificateParams::default();
        parameters.not_before = date_time_ymd(2025, 1, 1);
        parameters.not_after = date_time_ymd(2025, 1, 2);
        parameters.use_authority_key_identifier_extension = true;
        let subject = identity.subject.try_into().expect("a URI");
        parameters.subject_alt_names = vec![SanType::URI(subject)];
        parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::CodeSigning];
        let issuer = identity.issuer.as_bytes();
        parameters.custom_extensions = vec![
            CustomExtension::from_oid_content(oid::ISSUER, issuer.to_vec()),
            CustomExtension::from_oid_content(oid::ISSUER_V2, der(UTF8_STRING, issuer)),
        ];
        let sign = |parameters: &CertificateParams| {
            parameters.signed_by(&key, &self.authority).expect("a certificate")
        };
        let promise = self.promise(to_be_signed(sign(&parameters).der()));
        parameters
            .custom_extensions
            .push(CustomExtension::from_oid_content(oid::SCT_LIST, der(OCTET_STRING, &promise)));
        (sign(&parameters), key)
    }

    /// The certificate log's promise about a certificate without such promises, see RFC 6962: a
    /// list of one signed certificate timestamp.
    fn promise(&self, certificate: &[u8]) -> Vec<u8> {
        let time = (SIGNED_AT * 1000).to_be_bytes();
        let issuer = sha256(self.authority.key().subject_public_key_info());
        let length = u32::try_from(certificate.len()).expect("a short certificate").to_be_bytes();
        // Version 1, a timestamp; an entry of the second kind, for precertificates; no extensions.
        let signed =
            [&[0, 0], &time[..], &[0, 1], &issuer.hash[..], &length[1..], certificate, &[0, 0]];
        let signature = self.certificate_log.sign(&signed.concat()).expect("a signature");
        // ECDSA (3) over SHA-256 (4).
        let timestamp =
            [&[0], &log_id(&self.certificate_log)[..], &time, &[0, 0, 4, 3], &sized(&signature)];
        sized(&sized(&timestamp.concat()))
    }

    /// Logs an entry; it is the only one.
    fn log(&self, entry: &Value) -> Logged {
        // Maps of `json!` are sorted, as canonical JSON is.
        let entry = entry.to_string();
        let body = STANDARD.encode(&entry);
        let sign =
            |message: &str| self.signature_log.sign(message.as_bytes()).expect("a signature");
        let id = log_id(&self.signature_log);
        let promised = json!({
            "body": body,
            "integratedTime": SIGNED_AT,
            "logID": sha256(self.signature_log.subject_public_key_info()).hex(),
            "logIndex": 0,
        });
        let root = STANDARD.encode(sha256([&[0], entry.as_bytes()].concat()).hash);
        let note = format!("rekor.example - 1\n1\n{root}\n");
        let signature = STANDARD.encode([&id[..4], &sign(&note)].concat());
        let proof = json!({
            "logIndex": "0",
            "rootHash": root,
            "treeSize": "1",
            "hashes": [],
            "checkpoint": { "envelope": format!("{note}\n— rekor.example {signature}\n") },
        });
        Logged { promise: STANDARD.encode(sign(&promised.to_string())), body, proof }
    }
}

/// The signature log's answer to an entry.
struct Logged {
    /// The entry, in base64.
    body: String,
    /// A signature over the entry, when it was logged, and where.
    promise: String,
    /// That the entry is in the log.
    proof: Value,
}

fn key() -> KeyPair {
    KeyPair::generate().expect("randomness")
}

fn sha256(content: impl AsRef<[u8]>) -> Digest {
    Algorithm::Sha256.digest(content.as_ref())
}

fn log_id(key: &KeyPair) -> [u8; 32] {
    sha256(key.subject_public_key_info()).hash
}

const OCTET_STRING: u8 = 4;
const UTF8_STRING: u8 = 12;

/// A DER value of less than 64 KiB.
fn der(tag: u8, content: &[u8]) -> Vec<u8> {
    let [high, low] = u16::try_from(content.len()).expect("a short value").to_be_bytes();
    let length = match (high, low) {
        (0, ..128) => vec![low],
        (0, _) => vec![0x81, low],
        _ => vec![0x82, high, low],
    };
    [&[tag], &length[..], content].concat()
}

/// The first element of a DER sequence: of a certificate, the part that is signed.
fn to_be_signed(certificate: &[u8]) -> &[u8] {
    let content = &certificate[header(certificate).0..];
    let (start, length) = header(content);
    &content[..start + length]
}

/// Where the content of a DER value begins, and its length.
fn header(value: &[u8]) -> (usize, usize) {
    match value[1] {
        length @ ..128 => (2, usize::from(length)),
        more => {
            let digits = &value[2..2 + usize::from(more & 0x7f)];
            let length = digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit));
            (2 + digits.len(), length)
        }
    }
}

/// With a length of two bytes before it, as TLS has it.
fn sized(content: &[u8]) -> Vec<u8> {
    let length = u16::try_from(content.len()).expect("short content").to_be_bytes();
    [&length[..], content].concat()
}
