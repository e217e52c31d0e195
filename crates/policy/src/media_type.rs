//! Signatures in the terms of a registry: media types, annotations and names.

/// A Sigstore bundle, as a layer and as the type of the referrer that has it.
pub const BUNDLE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";

/// A layer that is a simple signing payload; its signature is in the annotation [`SIGNATURE`].
pub const SIMPLE_SIGNING: &str = "application/vnd.dev.cosign.simplesigning.v1+json";

/// The payload of a DSSE envelope that is an in-toto statement.
pub const IN_TOTO: &str = "application/vnd.in-toto+json";

/// On a layer with a payload: the signature of the payload, in base64.
pub const SIGNATURE: &str = "dev.cosignproject.cosign/signature";

/// On a layer with a payload, where no managed key made the signature: the certificate, as PEM.
pub const CERTIFICATE: &str = "dev.sigstore.cosign/certificate";

/// Beside [`CERTIFICATE`]: the certificates of its authorities, as PEM.
pub const CHAIN: &str = "dev.sigstore.cosign/chain";

/// Beside [`CERTIFICATE`]: the transparency log's entry for the signature, as JSON.
pub const LOG_ENTRY: &str = "dev.sigstore.cosign/bundle";

/// On a referrer that has a bundle: the content of the bundle. Lists of referrers repeat it.
pub const BUNDLE_CONTENT: &str = "dev.sigstore.bundle.content";

/// The value of [`BUNDLE_CONTENT`] for a DSSE envelope.
pub const DSSE_CONTENT: &str = "dsse-envelope";

/// On a referrer that has a bundle with a statement: the type of the statement's predicate.
pub const BUNDLE_PREDICATE: &str = "dev.sigstore.bundle.predicateType";

/// On a referrer that has a bundle: digest and size of the bundle's blob, see [`blob_hint`]. A list
/// of referrers repeats it, so that a node fetches the blob without the manifest: one round trip
/// less.
pub const BUNDLE_BLOB: &str = "vnd.lazuli.bundle-blob";

/// The value of [`BUNDLE_BLOB`]: `sha256:HEX SIZE`.
pub fn blob_hint(digest: &lazuli_image::Digest, size: u64) -> String {
    format!("{digest} {size}")
}

/// Digest and size of [`BUNDLE_BLOB`], if the annotation has such.
pub fn parse_blob_hint(value: &str) -> Option<(lazuli_image::Digest, u64)> {
    let (digest, size) = value.split_once(' ')?;
    Some((digest.parse().ok()?, size.parse().ok()?))
}

/// The tag under which cosign 2 keeps the signatures of the manifest or index `subject`.
pub fn signature_tag(subject: &lazuli_image::Digest) -> String {
    format!("{}-{}.sig", subject.algorithm.name(), subject.hex())
}
