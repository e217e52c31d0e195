//! Helpers that several tests use.

use bytes::Bytes;
use lazuli_image::{Algorithm, Digest, Stored, oci::media_type};
use lazuli_registry::{BlobContent, Options, Pull, Pushed, Registry, RegistryError, Repository};
use lazuli_testkit::registry::FakeRegistry;
use serde_json::json;

/// Bytes without a pattern that a wrong offset could hide behind.
pub(crate) fn noise(length: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761).max(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as u8
    };
    (0..length).map(|_| next()).collect()
}

pub(crate) fn sha256(content: &[u8]) -> Digest {
    Algorithm::Sha256.digest(content)
}

/// Without the credentials of the user that runs the tests.
pub(crate) fn options() -> Options {
    Options { credential_files: Vec::new(), ..Options::default() }
}

pub(crate) fn open(server: &FakeRegistry, name: &str) -> Registry {
    let name = format!("{}/{name}", server.host());
    Registry::open(name.parse().unwrap(), &options()).unwrap()
}

pub(crate) async fn push(
    repository: &dyn Repository,
    content: &[u8],
) -> Result<Pushed, RegistryError> {
    let bytes = BlobContent::Bytes(Bytes::copy_from_slice(content));
    repository.push_blob(&sha256(content), content.len() as u64, bytes, None, &|_| {}).await
}

pub(crate) async fn read(
    repository: &dyn Pull,
    content: &[u8],
    range: std::ops::Range<u64>,
) -> Result<Bytes, RegistryError> {
    let (size, range) = (content.len() as u64, Stored(range.start)..Stored(range.end));
    repository.read(&sha256(content), size, range, &|_| {}).await
}

/// A manifest of an image with these blobs.
pub(crate) fn manifest(config: &[u8], layers: &[&[u8]]) -> Vec<u8> {
    let describe = |kind: &str, content: &[u8]| json!({"mediaType": kind, "digest": sha256(content), "size": content.len()});
    let layers: Vec<_> =
        layers.iter().map(|layer| describe(media_type::LAYER_GZIP, layer)).collect();
    json!({
        "schemaVersion": 2,
        "mediaType": media_type::MANIFEST,
        "config": describe(media_type::CONFIG, config),
        "layers": layers,
    })
    .to_string()
    .into_bytes()
}
