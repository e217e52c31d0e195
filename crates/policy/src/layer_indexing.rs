//! Statements about indexes of single layers, in a repository that names them by layer digest.
//!
//! A layer's digest ties the statement to the layer's bytes, so it holds for every image with this
//! layer, under any name. Which keys count depends on the image: those under `statements` of the
//! policy's rule for it.

use std::collections::BTreeSet;

use bytes::Bytes;
use lazuli_image::Digest;
use lazuli_registry::{ImageName, Manifest, Options};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use crate::{
    Converter, DocumentError, Gate, GateError, Question, StatedLayer, Statement, Subject,
    gate::SEARCH_DEADLINE,
    name::Asked,
    rules::{Policy, Rule},
    search::Search,
    verify::Document,
};

/// The predicate of [`LayerIndexing`].
pub const LAYER_INDEXED: &str = "urn:lazuli:layer-index:v1";

/// The contents of a layer, and its index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LayerIndexing {
    /// The program that made the index.
    pub converter: Converter,
    /// The layer.
    #[serde(flatten)]
    pub layer: StatedLayer,
}

/// A layer, as manifest and configuration of an image name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerDigests {
    /// SHA-256 of the stored layer.
    pub layer: Digest,
    /// SHA-256 of its tar.
    pub diff_id: Digest,
}

/// An index of a layer that a key vouches for which the policy trusts.
#[derive(Clone, Debug)]
pub struct SignedLayer {
    /// The manifest that has the index.
    pub manifest: Manifest,
    /// The statement.
    pub stated: StatedLayer,
    /// The bundles with the statement.
    pub bundles: Vec<Bytes>,
}

impl Statement {
    /// States that the manifest with this digest, in the repository `name`, has the index of a
    /// layer.
    ///
    /// # Errors
    /// The statement cannot be encoded as JSON.
    pub fn indexed_layer(
        name: String,
        digest: Digest,
        indexing: &LayerIndexing,
    ) -> Result<Self, DocumentError> {
        let predicate = serde_json::to_value(indexing)
            .map_err(|error| DocumentError::new("statement", error.to_string()))?;
        let subjects = vec![Subject { name: Some(name), digest }];
        Ok(Statement { subjects, predicate_type: LAYER_INDEXED.to_owned(), predicate })
    }
}

impl Gate {
    /// Finds a statement about `layer` by keys that are trusted for the image `name`. `manifest`,
    /// found at `place`, has an index of the layer. `None` if there is no such statement.
    ///
    /// # Errors
    /// The policy cannot be used.
    pub async fn signed_layer(
        &self,
        name: &ImageName,
        place: &ImageName,
        manifest: Manifest,
        layer: LayerDigests,
        options: &Options,
    ) -> Result<Option<SignedLayer>, GateError> {
        let Some(policy) = self.policy()? else { return Ok(None) };
        if !policy.has_statement_keys(name) {
            return Ok(None);
        }
        let question = Question::resolved(place, manifest.descriptor(), options);
        let search = Search::new(&policy, &question).gather();
        let Ok(evidence) = timeout(SEARCH_DEADLINE, search).await else { return Ok(None) };
        let agreed =
            find_agreed_indexing(&policy, name, place, &manifest, layer, &evidence.bundles);
        Ok(agreed.map(|(stated, bundles)| SignedLayer { manifest, stated, bundles }))
    }

    /// Verifies `bundles`, found earlier, against the present policy. Returns their statement about
    /// the layer if it still counts. Makes no request.
    ///
    /// # Errors
    /// The policy cannot be used.
    pub fn recheck_layer(
        &self,
        name: &ImageName,
        place: &ImageName,
        manifest: &Manifest,
        layer: LayerDigests,
        bundles: &[Bytes],
    ) -> Result<Option<StatedLayer>, GateError> {
        let Some(policy) = self.policy()? else { return Ok(None) };
        let agreed = find_agreed_indexing(&policy, name, place, manifest, layer, bundles);
        Ok(agreed.map(|(stated, _)| stated))
    }
}

/// Finds a statement about the layer that as many trusted keys agree on as the policy requires.
/// Returns it with its bundles.
fn find_agreed_indexing(
    policy: &Policy,
    name: &ImageName,
    place: &ImageName,
    manifest: &Manifest,
    layer: LayerDigests,
    bundles: &[Bytes],
) -> Option<(StatedLayer, Vec<Bytes>)> {
    let (_, Rule::Require(requirement)) = policy.rule(&Asked::of(name)) else { return None };
    let index = manifest.parsed.layer_index(&layer.layer)?.digest;
    let states = |bundle: &Bytes| {
        let keys = &requirement.converters.keys;
        let (signers, statement) = Document::Bundle(bundle).statement(keys).ok()?;
        let stated = stated(place, &manifest.digest, &statement)?;
        let LayerDigests { layer, diff_id } = layer;
        let fits = stated == StatedLayer { layer, diff_id, index };
        fits.then(|| (signers, stated, bundle.clone()))
    };
    let all: Vec<_> = bundles.iter().filter_map(states).collect();
    all.iter().find_map(|(_, stated, _)| {
        let same = all.iter().filter(|(_, other, _)| other == stated);
        let signers: BTreeSet<_> = same.clone().flat_map(|(signers, ..)| signers).collect();
        let bundles = same.map(|(.., bundle)| bundle.clone()).collect();
        let is_enough = signers.len() >= requirement.converters.threshold;
        is_enough.then_some((*stated, bundles))
    })
}

/// Returns the layer of a statement, if its subject is this manifest at `place`.
fn stated(place: &ImageName, manifest: &Digest, statement: &Statement) -> Option<StatedLayer> {
    let place = Asked::of(place);
    let is_subject = |subject: &Subject| {
        let name = subject.name.as_deref().unwrap_or_default();
        subject.digest == *manifest && place.is_signed_as(name, &[])
    };
    if statement.predicate_type != LAYER_INDEXED || !statement.subjects.iter().any(is_subject) {
        return None;
    }
    let indexing: LayerIndexing = serde_json::from_value(statement.predicate.clone()).ok()?;
    Some(indexing.layer)
}

#[cfg(test)]
mod tests {
    use lazuli_image::Algorithm;

    use super::*;

    #[test]
    fn a_statement_is_about_one_manifest_in_one_repository() {
        let digest = |text: &str| Algorithm::Sha256.digest(text.as_bytes());
        let layer =
            StatedLayer { layer: digest("layer"), diff_id: digest("tar"), index: digest("index") };
        let converter = Converter { version: "0".to_owned(), program: None };
        let indexing = LayerIndexing { converter, layer };
        let place: ImageName = "r.example/indexes:tag".parse().unwrap();
        let of = |name: &str, manifest: &str| {
            Statement::indexed_layer(name.to_owned(), digest(manifest), &indexing).unwrap()
        };
        let good = of("r.example/indexes", "manifest");
        assert_eq!(stated(&place, &digest("manifest"), &good), Some(layer));
        let renamed = Statement { predicate_type: "urn:lazuli:index:v1".to_owned(), ..good };
        for other in [of("r.example/other", "manifest"), of("r.example/indexes", "it"), renamed] {
            assert_eq!(stated(&place, &digest("manifest"), &other), None);
        }
    }
}
