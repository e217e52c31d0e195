//! Parsers of bytes from outside, as the fuzz targets call them.
#![allow(missing_docs)]

use bytes::Bytes;
use lazuli_image::oci::media_type;

use crate::{
    distribution::referrers,
    manifest::{self, Document, Parsed},
    name::Reference,
    route::hosts,
    transport::credentials,
};

/// A manifest or an index, and a list of referrers.
pub fn document(raw: &[u8]) {
    let parsed = manifest::parse("a place", Bytes::copy_from_slice(raw), None, None);
    if let Ok(Parsed::Image(image)) = parsed {
        for layer in &image.parsed.layers {
            let _ = (layer.index_of(), layer.index_tables(), layer.artifact_layer());
        }
        let _ = image.parsed.is_artifact();
        let _ = image.parsed.guess().map(|guess| guess.decode());
    }
    let _ = Document::new(raw.to_vec(), media_type::MANIFEST).named("a place");
    if let Ok(index) = referrers::ReferrerIndex::parse(raw) {
        let _ = index.of_type(None);
        let _ = index.to_json();
    }
}

/// containerd's hosts.toml.
pub fn hosts(text: &[u8]) {
    hosts::fuzz(text);
}

/// docker's config.json.
pub fn logins(text: &[u8]) {
    let reference: Result<Reference, _> = "registry.example/team/app".parse();
    if let Ok(reference) = reference {
        let _ = credentials::parse(text, &reference);
    }
}

/// A WWW-Authenticate header, and a Link header.
pub fn headers(text: &str) {
    let _ = http_auth::parse_challenges(text);
    let _ = referrers::next_link(text);
}
