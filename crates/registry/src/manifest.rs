//! Manifests: raw bytes beside their meaning.
//!
//! The raw bytes are kept because their digest is the identity of the image; nothing here ever
//! serialises a manifest that it has parsed.

use std::{cmp::Reverse, collections::BTreeMap};

use bytes::Bytes;
use lazuli_image::{
    Algorithm, Digest,
    oci::{self, Descriptor, Platform, media_type},
};
use serde::Deserialize;

use crate::error::RegistryError;

/// Biggest manifest, index or configuration that is read, in bytes.
pub const DOCUMENT_LIMIT: u64 = oci::MAX_DOCUMENT as u64;

/// Media types that name a manifest of one image.
pub const IMAGE_TYPES: [&str; 2] = [media_type::MANIFEST, media_type::DOCKER_MANIFEST];

/// Media types that name a list of manifests, one for each platform.
pub const INDEX_TYPES: [&str; 2] = [media_type::INDEX, media_type::DOCKER_INDEX];

/// A manifest of one image as it was stored, and its meaning.
#[derive(Clone, Debug)]
pub struct Manifest {
    /// The bytes that [`Manifest::digest`] covers.
    pub raw: Bytes,
    /// The identity of the image.
    pub digest: Digest,
    /// One of [`IMAGE_TYPES`].
    pub media_type: String,
    /// The parsed bytes.
    pub parsed: oci::Manifest,
    /// The index that the name means, if it means one. It lists this manifest.
    pub index: Option<Descriptor>,
}

impl Manifest {
    /// The manifest's descriptor in other documents: the subject of a referrer.
    pub fn descriptor(&self) -> Descriptor {
        let size = self.raw.len() as u64;
        Descriptor::plain(&self.media_type, self.digest, size)
    }
}

/// A manifest or an index as stored, unparsed.
#[derive(Clone, Debug)]
pub struct Document {
    /// The bytes that [`Document::digest`] covers.
    pub raw: Bytes,
    /// Its identity.
    pub digest: Digest,
    /// One of [`IMAGE_TYPES`] or [`INDEX_TYPES`].
    pub media_type: String,
}

impl Document {
    /// A document to store.
    pub fn new(raw: Vec<u8>, media_type: &str) -> Self {
        let digest = Algorithm::Sha256.digest(&raw);
        Document { raw: raw.into(), digest, media_type: media_type.to_owned() }
    }

    /// Parses the document; `place` is for messages.
    ///
    /// # Errors
    /// It is malformed.
    pub fn parse(&self, place: &str) -> Result<Parsed, RegistryError> {
        parse(place, self.raw.clone(), Some(&self.media_type), Some(&self.digest))
    }

    /// The content that the document names; `place` is for messages.
    pub(crate) fn named(&self, place: &str) -> Result<Named, RegistryError> {
        serde_json::from_slice(&self.raw).map_err(|error| {
            let object = format!("manifest {}", self.digest);
            RegistryError::malformed(place, &object, error.to_string())
        })
    }
}

impl From<Manifest> for Document {
    fn from(Manifest { raw, digest, media_type, .. }: Manifest) -> Self {
        Document { raw, digest, media_type }
    }
}

/// The content that a manifest or index names.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Named {
    pub(crate) config: Option<Descriptor>,
    pub(crate) layers: Option<Vec<Descriptor>>,
    pub(crate) manifests: Option<Vec<Descriptor>>,
    pub(crate) subject: Option<Descriptor>,
    pub(crate) artifact_type: Option<String>,
    pub(crate) annotations: Option<BTreeMap<String, String>>,
}

/// Either kind of answer to the request for a manifest.
#[derive(Debug)]
pub enum Parsed {
    /// One image.
    Image(Box<Manifest>),
    /// A list of manifests, one for each platform: its own descriptor, and its entries.
    Index(Box<Descriptor>, Vec<Descriptor>),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Probe {
    schema_version: Option<u64>,
    media_type: Option<String>,
    manifests: Option<Vec<serde_json::Value>>,
}

/// Parses the answer of `place` to a request for `expected`, or for a tag. The media type in the
/// body wins over `content_type`, because the digest covers only the body.
pub(crate) fn parse(
    place: &str,
    raw: Bytes,
    content_type: Option<&str>,
    expected: Option<&Digest>,
) -> Result<Parsed, RegistryError> {
    let (Document { raw, digest, media_type }, entries) =
        probe(place, raw, content_type, expected)?;
    if IMAGE_TYPES.contains(&media_type.as_str()) {
        let parsed = oci::Manifest::parse(&raw)
            .map_err(|error| RegistryError::malformed(place, OBJECT, error.to_string()))?;
        return Ok(Parsed::Image(Box::new(Manifest {
            raw,
            digest,
            media_type,
            parsed,
            index: None,
        })));
    }
    // An entry that we could not use anyway (sha512, no media type) must not hide the others.
    let entries = entries.into_iter().filter_map(|entry| serde_json::from_value(entry).ok());
    let index = Box::new(Descriptor::plain(&media_type, digest, raw.len() as u64));
    Ok(Parsed::Index(index, entries.collect()))
}

/// [`parse`] without looking into the document.
pub(crate) fn document(
    place: &str,
    raw: Bytes,
    content_type: Option<&str>,
    expected: Option<&Digest>,
) -> Result<Document, RegistryError> {
    probe(place, raw, content_type, expected).map(|(document, _)| document)
}

/// The name of a manifest or an index in messages.
const OBJECT: &str = "the manifest";

/// Checks the digest and determines the type; for an index, also its entries.
fn probe(
    place: &str,
    raw: Bytes,
    content_type: Option<&str>,
    expected: Option<&Digest>,
) -> Result<(Document, Vec<serde_json::Value>), RegistryError> {
    let object = OBJECT;
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
        // Indexes that OCI tools write may leave mediaType out, in a layout there is no header
        // either.
        (None, Some(name)) if IMAGE_TYPES.contains(&name) || INDEX_TYPES.contains(&name) => {
            name.to_owned()
        }
        (None, _) if probe.manifests.is_some() => INDEX_TYPES[0].to_owned(),
        (None, _) => IMAGE_TYPES[0].to_owned(),
    };
    if !IMAGE_TYPES.into_iter().chain(INDEX_TYPES).any(|known| known == media_type) {
        let problem = format!("media type `{media_type}` is not that of an image or an index");
        return Err(RegistryError::malformed(place, object, problem));
    }
    Ok((Document { raw, digest, media_type }, probe.manifests.unwrap_or_default()))
}

/// Chooses the manifest for `wanted` (this machine by default) from an index: the first with
/// exactly this platform, else the first that runs on it; a lazy one if that is allowed.
///
/// # Errors
/// There is none.
pub fn choose<'a>(
    place: &str,
    entries: &'a [Descriptor],
    wanted: Option<&Platform>,
) -> Result<&'a Descriptor, RegistryError> {
    let host = Platform::host().lazy();
    let wanted = wanted.unwrap_or(&host);
    let images = || entries.iter().filter(|entry| IMAGE_TYPES.contains(&entry.media_type.as_str()));
    let fitting = images().filter_map(|entry| {
        let platform = entry.runs_on().filter(|platform| platform.satisfies(wanted))?;
        Some((platform.variant != wanted.variant, Reverse(platform.features.len()), entry))
    });
    let best = fitting.min_by_key(|(other, features, _)| (*other, *features));
    best.map(|(.., entry)| entry).ok_or_else(|| {
        // Attestations of BuildKit call their platform unknown/unknown.
        let known = |p: &Platform| p.os != "unknown";
        let available = images().filter_map(|entry| entry.platform.clone()).filter(known).collect();
        RegistryError::NoPlatform { place: place.to_owned(), wanted: wanted.clone(), available }
    })
}
