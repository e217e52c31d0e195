//! Statements about indexes: that an image that stays as it is has these layers, and how they can
//! be read in places.
//!
//! Nothing proves what an index says about a layer before all of the layer was seen, and nothing
//! ties a layer's digest to that of its tar, by which containerd shares layers between images. So
//! an index counts by the word of a key that the policy trusts for the image's name: the rule's
//! `statements`.

use std::collections::BTreeSet;

use bytes::Bytes;
use lazuli_image::{Digest, oci::media_type::LAYER_INDEX};
use lazuli_registry::{ImageName, Manifest, Options, Repository, indexes_of};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use crate::{
    Converter, DocumentError, Gate, GateError, Question, Source, Statement, Subject,
    gate::SEARCH_DEADLINE,
    name::Asked,
    rules::{Policy, Rule},
    search::Search,
    verify::Document,
};

/// The predicate of [`Indexing`].
pub const INDEXED: &str = "urn:lazuli:index:v1";

/// That an index is one of an image, and what is in the image's layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Indexing {
    /// The image.
    pub source: Source,
    /// What made the index.
    pub converter: Converter,
    /// The image's layers, lowest first.
    pub layers: Vec<StatedLayer>,
}

/// A layer as a statement describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StatedLayer {
    /// SHA-256 of it as stored.
    pub layer: Digest,
    /// SHA-256 of its tar.
    pub diff_id: Digest,
    /// SHA-256 of its index.
    pub index: Digest,
}

/// An index that a key vouches for which the policy trusts.
#[derive(Clone, Debug)]
pub struct SignedIndex {
    /// Its manifest.
    pub manifest: Manifest,
    /// What is stated of it.
    pub indexing: Indexing,
    /// The bundles that state it.
    pub bundles: Vec<Bytes>,
}

impl Statement {
    /// That the index with this digest, beside the image `name`, is one of its layers.
    ///
    /// # Errors
    /// JSON cannot have it.
    pub fn indexed(
        name: String,
        digest: Digest,
        indexing: &Indexing,
    ) -> Result<Self, DocumentError> {
        let predicate = serde_json::to_value(indexing)
            .map_err(|error| DocumentError::new("statement", error.to_string()))?;
        let subjects = vec![Subject { name: Some(name), digest }];
        Ok(Statement { subjects, predicate_type: INDEXED.to_owned(), predicate })
    }

    /// The index that it states, if it states one.
    fn indexing(&self) -> Option<Indexing> {
        let is_one = self.predicate_type == INDEXED;
        is_one.then(|| serde_json::from_value(self.predicate.clone()).ok())?
    }
}

impl Gate {
    /// The first index of `image`, which is opened as `repository` at `name`, that a trusted key
    /// vouches for. `None` if there is none, or no key that is trusted for the name.
    ///
    /// # Errors
    /// The policy cannot be used.
    pub async fn signed_index(
        &self,
        name: &ImageName,
        image: &Manifest,
        repository: &dyn Repository,
        options: &Options,
    ) -> Result<Option<SignedIndex>, GateError> {
        let Some(policy) = self.policy()? else { return Ok(None) };
        if !policy.has_statement_keys(name) {
            return Ok(None);
        }
        for manifest in indexes_of(repository, image).await {
            let question = Question::resolved(name, manifest.descriptor(), options);
            let search = Search::new(&policy, &question).gather();
            let Ok(evidence) = timeout(SEARCH_DEADLINE, search).await else { continue };
            if let Some((indexing, bundles)) =
                agreed(&policy, name, image, &manifest, &evidence.bundles)
            {
                return Ok(Some(SignedIndex { manifest, indexing, bundles }));
            }
        }
        Ok(None)
    }

    /// What `bundles`, which were found earlier, state of `index`, an index of `image`, if that still
    /// counts. Asks no registry.
    ///
    /// # Errors
    /// The policy cannot be used.
    pub fn recheck(
        &self,
        name: &ImageName,
        image: &Manifest,
        index: &Manifest,
        bundles: &[Bytes],
    ) -> Result<Option<Indexing>, GateError> {
        let policy = self.policy()?;
        let agreed = |policy: std::sync::Arc<Policy>| agreed(&policy, name, image, index, bundles);
        Ok(policy.and_then(agreed).map(|(indexing, _)| indexing))
    }
}

/// What as many trusted keys state of `index` as the policy wants, and the bundles that do so.
fn agreed(
    policy: &Policy,
    name: &ImageName,
    image: &Manifest,
    index: &Manifest,
    bundles: &[Bytes],
) -> Option<(Indexing, Vec<Bytes>)> {
    let (_, Rule::Require(requirement)) = policy.rule(&Asked::of(name)) else { return None };
    let states = |bundle: &Bytes| {
        let (signers, indexing) = stated(policy, name, image, index, bundle)?;
        Some((signers, indexing, bundle.clone()))
    };
    let all: Vec<_> = bundles.iter().filter_map(states).collect();
    all.iter().find_map(|(_, indexing, _)| {
        // Others may be of another version.
        let same = all.iter().filter(|(_, other, _)| other.layers == indexing.layers);
        let signers: BTreeSet<_> = same.clone().flat_map(|(signers, ..)| signers).collect();
        let bundles = same.map(|(.., bundle)| bundle.clone()).collect();
        let is_enough = signers.len() >= requirement.converters.threshold;
        is_enough.then(|| (indexing.clone(), bundles))
    })
}

/// What `bundle` states of `index`, by trusted keys and of that very image; and which keys.
fn stated(
    policy: &Policy,
    name: &ImageName,
    image: &Manifest,
    index: &Manifest,
    bundle: &[u8],
) -> Option<(Vec<usize>, Indexing)> {
    let asked = Asked::of(name);
    let (_, Rule::Require(requirement)) = policy.rule(&asked) else { return None };
    let keys = &requirement.converters.keys;
    let (signers, statement) = Document::Bundle(bundle).statement(keys).ok()?;
    let indexing = statement.indexing()?;
    let is_subject = |subject: &Subject| {
        let name = subject.name.as_deref().unwrap_or_default();
        subject.digest == index.digest && asked.is_signed_as(name, &requirement.signed_as)
    };
    let layers = image.parsed.layers.iter().map(|layer| layer.digest);
    // Each index that is stated has to be the one that the signed manifest has.
    let lists = |stated: &StatedLayer| {
        let mut listed = index.parsed.layers.iter();
        listed.any(|it| it.digest == stated.index && it.index_of() == Some(stated.layer))
    };
    let fits = index.parsed.artifact_type.as_deref() == Some(LAYER_INDEX)
        && index.parsed.is_index_of(&image.digest, &image.parsed)
        && statement.subjects.iter().any(is_subject)
        && indexing.source.manifest == image.digest
        && indexing.layers.iter().map(|stated| stated.layer).eq(layers)
        && indexing.layers.iter().all(lists);
    fits.then_some((signers, indexing))
}
