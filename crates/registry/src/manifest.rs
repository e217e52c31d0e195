//! Manifests: raw bytes beside their meaning.
//!
//! The raw bytes are kept because their digest is the identity of the image; nothing here ever
//! serialises a manifest that it has parsed.

use std::{collections::BTreeMap, fmt, str::FromStr};

use bytes::Bytes;
use lazuli_image::{Algorithm, Digest};
use serde::{Deserialize, Serialize};

use crate::{error::RegistryError, name::NameError};

/// Biggest manifest that is read, in bytes. The distribution specification asks registries to accept
/// 4 MiB, and none accepts more.
pub const MANIFEST_LIMIT: u64 = 4 << 20;

/// Biggest image configuration that is read, in bytes; real ones have some ten KiB.
pub const CONFIG_LIMIT: u64 = 4 << 20;

/// Media types that name a manifest of one image.
pub const IMAGE_TYPES: [&str; 2] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];

/// Media types that name a list of manifests, one for each platform.
pub const INDEX_TYPES: [&str; 2] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];

/// An operating system and a processor, spelled `os/arch[/variant]` as Go does.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Platform {
    /// `linux`.
    pub os: String,
    /// `amd64`, `arm64`, …
    pub architecture: String,
    /// `v7`, `v8`, …; absent for most processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

impl Platform {
    /// Linux on the processor that this program was built for.
    pub fn host() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            "x86" => "386",
            "powerpc64" => "ppc64le",
            "loongarch64" => "loong64",
            other => other,
        };
        Platform { os: "linux".into(), architecture: architecture.into(), variant: None }
    }

    /// Whether an image for `self` is what somebody who asks for `wanted` means. A variant that was not
    /// asked for does not matter, and `arm64` is `arm64/v8`.
    pub fn satisfies(&self, wanted: &Platform) -> bool {
        let variant = |p: &Platform| match (p.architecture.as_str(), p.variant.as_deref()) {
            ("arm64", None) => Some("v8".to_owned()),
            (_, variant) => variant.map(str::to_owned),
        };
        self.os == wanted.os
            && self.architecture == wanted.architecture
            && (wanted.variant.is_none() || variant(self) == variant(wanted))
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        self.variant.as_ref().map_or(Ok(()), |variant| write!(f, "/{variant}"))
    }
}

impl FromStr for Platform {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let parts: Vec<&str> = text.split('/').collect();
        let wrong = |part: &&str| {
            part.is_empty()
                || !part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        };
        if !(2..=3).contains(&parts.len()) || parts.iter().any(wrong) {
            return Err(NameError::new(
                text,
                "a platform is os/arch[/variant], as in linux/arm64/v8",
            ));
        }
        Ok(Platform {
            os: parts[0].to_owned(),
            architecture: parts[1].to_owned(),
            variant: parts.get(2).map(|&part| part.to_owned()),
        })
    }
}

/// What a manifest says about one blob or one manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// How to read it.
    pub media_type: String,
    /// Its identity.
    pub digest: Digest,
    /// Its size in bytes.
    pub size: u64,
    /// What the packer noted about it.
    #[serde(default, deserialize_with = "or_empty", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Where a manifest of an index runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// What a manifest of an index is, when it is no ordinary image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
}

/// The manifest of one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageManifest {
    /// The image configuration.
    pub config: Descriptor,
    /// The layers, lowest first.
    pub layers: Vec<Descriptor>,
    /// What the packer noted about the image.
    #[serde(default, deserialize_with = "or_empty", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// Some writers spell an absent map as `null`.
fn or_empty<'de, D>(deserializer: D) -> Result<BTreeMap<String, String>, D::Error>
where
    D: serde::Deserializer<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// A manifest of one image as it was stored, and its meaning.
#[derive(Clone, Debug)]
pub struct Manifest {
    /// The bytes that [`Manifest::digest`] covers.
    pub raw: Bytes,
    /// The identity of the image.
    pub digest: Digest,
    /// One of [`IMAGE_TYPES`].
    pub media_type: String,
    /// What the bytes say.
    pub parsed: ImageManifest,
}

/// Either kind of answer to the request for a manifest.
#[derive(Debug)]
pub(crate) enum Parsed {
    Image(Manifest),
    Index(Vec<Descriptor>),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Probe {
    schema_version: Option<u64>,
    media_type: Option<String>,
    manifests: Option<Vec<serde_json::Value>>,
}

/// Parses what `place` answered when asked for `expected` (or for a tag). The media type in the body
/// wins over `content_type`, because only the body is covered by the digest.
pub(crate) fn parse(
    place: &str,
    raw: Bytes,
    content_type: Option<&str>,
    expected: Option<&Digest>,
) -> Result<Parsed, RegistryError> {
    let object = "the manifest";
    let algorithm = expected.map_or(Algorithm::Sha256, |digest| digest.algorithm);
    let digest = algorithm.digest(&raw);
    if let Some(&expected) = expected
        && digest != expected
    {
        let (place, object) = (place.to_owned(), object.to_owned());
        return Err(RegistryError::WrongDigest { place, object, expected, got: digest });
    }
    let json =
        |error: serde_json::Error| RegistryError::malformed(place, object, error.to_string());
    let probe: Probe = serde_json::from_slice(&raw).map_err(json)?;
    if probe.schema_version != Some(2) {
        let found = probe.schema_version.map_or("none".to_owned(), |version| version.to_string());
        let problem = format!("schemaVersion is {found}, expected 2");
        return Err(RegistryError::malformed(place, object, problem));
    }
    let media_type = match (probe.media_type, content_type) {
        (Some(name), _) => name,
        // Indexes that OCI tools write may leave mediaType out, in a layout there is no header either.
        (None, Some(name)) if IMAGE_TYPES.contains(&name) || INDEX_TYPES.contains(&name) => {
            name.to_owned()
        }
        (None, _) if probe.manifests.is_some() => INDEX_TYPES[0].to_owned(),
        (None, _) => IMAGE_TYPES[0].to_owned(),
    };
    if IMAGE_TYPES.contains(&media_type.as_str()) {
        let parsed = serde_json::from_slice(&raw).map_err(json)?;
        return Ok(Parsed::Image(Manifest { raw, digest, media_type, parsed }));
    }
    if !INDEX_TYPES.contains(&media_type.as_str()) {
        let problem = format!("media type `{media_type}` is not that of an image or an index");
        return Err(RegistryError::malformed(place, object, problem));
    }
    // An entry that we could not use anyway (sha512, no media type) must not hide the others.
    let entries = probe.manifests.unwrap_or_default();
    Ok(Parsed::Index(entries.into_iter().filter_map(|e| serde_json::from_value(e).ok()).collect()))
}

/// Chooses the manifest for `wanted` (this machine by default) from an index.
pub(crate) fn choose<'a>(
    place: &str,
    entries: &'a [Descriptor],
    wanted: Option<&Platform>,
) -> Result<&'a Descriptor, RegistryError> {
    let host = Platform::host();
    let wanted = wanted.unwrap_or(&host);
    let images = || entries.iter().filter(|entry| IMAGE_TYPES.contains(&entry.media_type.as_str()));
    let fits = |entry: &&Descriptor| entry.platform.as_ref().is_some_and(|p| p.satisfies(wanted));
    let exact = |entry: &&Descriptor| entry.platform.as_ref() == Some(wanted);
    images().find(exact).or_else(|| images().find(fits)).ok_or_else(|| {
        // Attestations of BuildKit call their platform unknown/unknown.
        let known = |p: &Platform| p.os != "unknown";
        let available = images().filter_map(|entry| entry.platform.clone()).filter(known).collect();
        RegistryError::NoPlatform { place: place.to_owned(), wanted: wanted.clone(), available }
    })
}
