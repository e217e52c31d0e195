//! Parsers of bytes from outside, as the fuzz targets call them.
#![allow(missing_docs)]

use std::path::Path;

use lazuli_registry::ImageName;

use crate::{
    Bundle, LayerIndexing, Payload, Policy, PublicKey, Statement,
    evidence::{Certified, SignatureLayer},
    keyless, media_type,
    name::Asked,
    sign::{SignatureManifest, SigningKey},
};

/// policy.toml, with itself as every file that it names.
pub fn policy(text: &[u8]) {
    let read = |_: &Path, _| Ok(text.to_vec());
    let Ok(policy) = Policy::parse(Path::new("/policy.toml"), text, &read) else { return };
    if let Ok(name) = "r.example/team/app:1".parse::<ImageName>() {
        let _ = policy.rule(&Asked::of(&name));
    }
}

/// Parses every document that carries signatures.
pub fn documents(raw: &[u8]) {
    let _ = Payload::parse(raw).map(|payload| payload.to_json());
    let _ = PublicKey::from_pem(raw);
    let _ = PublicKey::from_der(raw);
    let _ = SigningKey::from_pem(raw, None);
    let _ = SignatureManifest::parse(raw).map(|manifest| manifest.to_json());
    let _ = SignatureLayer::all(raw);
    if let Ok(bundle) = Bundle::parse(raw) {
        let _ = Statement::parse(&bundle.envelope.payload);
        let _ = Bundle::parse(&Bundle::to_json(&bundle.envelope, ""));
    }
    if let Ok(statement) = Statement::parse(raw) {
        let _ = statement.conversion();
        let _ = serde_json::from_value::<LayerIndexing>(statement.predicate.clone());
        let _ = Statement::parse(&statement.to_json());
    }
    if let Ok(text) = std::str::from_utf8(raw) {
        let _ = media_type::parse_blob_hint(text);
        let text = text.to_owned();
        let certified =
            Certified { certificate: text.clone(), chain: String::new(), log_entry: text };
        let _ = keyless::to_bundle(&certified, raw, &lazuli_image::Digest::sha256([0; 32]));
    }
}
