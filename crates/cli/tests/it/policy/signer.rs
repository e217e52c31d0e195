//! Signatures by a second implementation: openssl, and documents written to the letter.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
};

use lazuli_image::{Algorithm, Digest};
use lazuli_testkit::registry::FakeRegistry;
use serde_json::{Value, json};

pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const BUNDLE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";

/// A private key, and the file of the public one.
pub(crate) struct Signer {
    directory: PathBuf,
    name: &'static str,
}

impl Signer {
    /// Makes a key `name` in `directory`.
    pub(crate) fn new(directory: &Path, name: &'static str) -> Self {
        let signer = Signer { directory: directory.to_owned(), name };
        let private = signer.path("key");
        let private = private.to_str().unwrap();
        let curve = ["-pkeyopt", "ec_paramgen_curve:P-256", "-out", private];
        openssl(&[&["genpkey", "-algorithm", "EC"], &curve[..]].concat(), &[]);
        let public = signer.public();
        openssl(&["pkey", "-in", private, "-pubout", "-out", public.to_str().unwrap()], &[]);
        signer
    }

    /// The file of the private key.
    pub(crate) fn private(&self) -> PathBuf {
        self.path("key")
    }

    pub(crate) fn public(&self) -> PathBuf {
        self.path("pub")
    }

    fn path(&self, extension: &str) -> PathBuf {
        self.directory.join(format!("{}.{extension}", self.name))
    }

    /// A signature of `message`, in base64.
    fn sign(&self, message: &[u8]) -> String {
        let private = self.path("key");
        let arguments = ["dgst", "-sha256", "-sign", private.to_str().unwrap()];
        base64(&openssl(&arguments, message))
    }

    /// Signs the image with `digest` as `reference`, in the way of cosign 2.
    pub(crate) fn tag(
        &self,
        registry: &FakeRegistry,
        repository: &str,
        digest: &Digest,
        reference: &str,
    ) {
        self.tag_payload(registry, repository, digest, payload(reference, digest).as_bytes());
    }

    /// The same with another payload.
    pub(crate) fn tag_payload(
        &self,
        registry: &FakeRegistry,
        repository: &str,
        digest: &Digest,
        payload: &[u8],
    ) {
        let annotations = json!({ "dev.cosignproject.cosign/signature": self.sign(payload) });
        put_tag(registry, repository, digest, payload, &annotations);
    }

    /// Signs the image with `digest`, in the way of cosign 3.
    pub(crate) fn refer(&self, registry: &FakeRegistry, repository: &str, digest: &Digest) {
        let predicate = (SIGNED, json!({}));
        self.state(registry, repository, (None, digest), predicate);
    }

    /// States that `subject` was made from `source`.
    pub(crate) fn convert(
        &self,
        registry: &FakeRegistry,
        repository: &str,
        subject: (&str, &Digest),
        source: (&str, &Digest),
    ) {
        let (name, digest) = source;
        let predicate = json!({
            "source": { "name": name, "digest": digest, "manifest": digest },
            "converter": { "version": "0" },
        });
        let subject = (Some(subject.0), subject.1);
        self.state(registry, repository, subject, ("urn:lazuli:conversion:v1", predicate));
    }

    /// Makes a signed statement a referrer of its subject.
    pub(crate) fn state(
        &self,
        registry: &FakeRegistry,
        repository: &str,
        (name, digest): (Option<&str>, &Digest),
        (kind, predicate): (&str, Value),
    ) {
        let payload = statement((name, digest), (kind, predicate));
        let signed = format!("DSSEv1 28 application/vnd.in-toto+json {} {payload}", payload.len());
        let bundle = json!({
            "mediaType": BUNDLE,
            "verificationMaterial": { "publicKey": { "hint": "a key" } },
            "dsseEnvelope": {
                "payload": base64(payload.as_bytes()),
                "payloadType": "application/vnd.in-toto+json",
                "signatures": [{ "sig": self.sign(signed.as_bytes()) }],
            },
        });
        put_bundle(registry, repository, digest, &bundle.to_string());
    }
}

/// The predicate of cosign 3's signatures.
pub(crate) const SIGNED: &str = "https://sigstore.dev/cosign/sign/v1";

/// What cosign 2 signs.
pub(crate) fn payload(reference: &str, digest: &Digest) -> String {
    format!(
        r#"{{"critical":{{"identity":{{"docker-reference":"{reference}"}},"image":{{"docker-manifest-digest":"{digest}"}},"type":"cosign container image signature"}},"optional":null}}"#
    )
}

/// An in-toto statement.
pub(crate) fn statement(
    (name, digest): (Option<&str>, &Digest),
    (kind, predicate): (&str, Value),
) -> String {
    let mut subject = json!({ "digest": { "sha256": digest.hex() } });
    if let Some(name) = name {
        subject["name"] = name.into();
    }
    let statement = json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [subject], "predicateType": kind, "predicate": predicate,
    });
    statement.to_string()
}

/// Stores a payload and its signature, which is in `annotations`, in the way of cosign 2.
pub(crate) fn put_tag(
    registry: &FakeRegistry,
    repository: &str,
    digest: &Digest,
    payload: &[u8],
    annotations: &Value,
) {
    let layer = registry.put_blob(repository, payload);
    let config = registry.put_blob(repository, b"{}");
    let manifest = json!({
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "digest": config, "size": 2 },
        "layers": [{
            "mediaType": "application/vnd.dev.cosign.simplesigning.v1+json",
            "digest": layer, "size": payload.len(), "annotations": annotations,
        }],
    });
    let tag = signature_tag(digest);
    registry.put_manifest(repository, &tag, MANIFEST, manifest.to_string().as_bytes());
}

/// Makes a bundle a referrer of the image with `digest`, in the way of cosign 3.
pub(crate) fn put_bundle(registry: &FakeRegistry, repository: &str, digest: &Digest, bundle: &str) {
    let layer = registry.put_blob(repository, bundle.as_bytes());
    let config = registry.put_blob(repository, b"{}");
    let manifest = json!({
        "schemaVersion": 2, "mediaType": MANIFEST, "artifactType": BUNDLE,
        "config": { "mediaType": "application/vnd.oci.empty.v1+json", "digest": config, "size": 2 },
        "layers": [{ "mediaType": BUNDLE, "digest": layer, "size": bundle.len() }],
        "subject": { "mediaType": MANIFEST, "digest": digest, "size": 1 },
    });
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let tag = format!("bundle-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    registry.put_manifest(repository, &tag, MANIFEST, manifest.to_string().as_bytes());
}

/// The tag under which cosign 2 stores signatures.
pub(crate) fn signature_tag(digest: &Digest) -> String {
    format!("sha256-{}.sig", digest.hex())
}

/// The digest of a manifest.
pub(crate) fn digest_of(registry: &FakeRegistry, repository: &str, tag: &str) -> Digest {
    Algorithm::Sha256.digest(&registry.manifest(repository, tag).unwrap())
}

fn base64(bytes: &[u8]) -> String {
    String::from_utf8(openssl(&["base64", "-A"], bytes)).unwrap()
}

fn openssl(arguments: &[&str], input: &[u8]) -> Vec<u8> {
    let mut command = Command::new("openssl");
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}
