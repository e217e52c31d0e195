//! Statements about indexes: which layers an unmodified image has, and how to read them in places.
//!
//! An index cannot be proved before its whole layer has been read. Nor does a layer's digest
//! determine its DiffID, by which containerd shares layers between images. So an index counts only
//! if a key vouches for it that the policy trusts for the image's name (the rule's `statements`).

use std::collections::BTreeSet;

use bytes::Bytes;
use lazuli_image::{
    Digest,
    oci::{Descriptor, media_type::LAYER_INDEX},
};
use lazuli_registry::{ImageName, Manifest, Options, Repository, fetch_index, listed_indexes};
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

/// The statement that an index belongs to an image, with the contents of the image's layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Indexing {
    /// The image.
    pub source: Source,
    /// The program that made the index.
    pub converter: Converter,
    /// The image's layers, lowest first.
    pub layers: Vec<StatedLayer>,
}

/// A layer as a statement describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StatedLayer {
    /// SHA-256 of the stored layer.
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
    /// The statement.
    pub indexing: Indexing,
    /// The bundles with the statement.
    pub bundles: Vec<Bytes>,
}

impl Statement {
    /// States that the manifest with this digest, beside the image `name`, is an index of the
    /// image's layers.
    ///
    /// # Errors
    /// The statement cannot be encoded as JSON.
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
    /// Finds the first index of `image` that a trusted key vouches for. `repository` is opened at
    /// `name`, and `referrers` are the image's, if they are known. `None` if there is no such
    /// index, or the policy trusts no key for the name.
    ///
    /// # Errors
    /// The policy cannot be used.
    pub async fn signed_index(
        &self,
        name: &ImageName,
        image: &Manifest,
        referrers: Option<&[Descriptor]>,
        repository: &dyn Repository,
        options: &Options,
    ) -> Result<Option<SignedIndex>, GateError> {
        let Some(policy) = self.policy()? else { return Ok(None) };
        if !policy.has_statement_keys(name) {
            return Ok(None);
        }
        for entry in listed_indexes(repository, &image.digest, referrers).await {
            let index = Descriptor::plain(&entry.media_type, entry.digest, entry.size);
            let question = Question::resolved(name, index, options);
            let search = timeout(SEARCH_DEADLINE, Search::new(&policy, &question).gather());
            // The list has the index's digest, and with it the statements can be looked up.
            let found = tokio::join!(fetch_index(repository, image, &entry), search);
            let (Some(manifest), Ok(evidence)) = found else { continue };
            if let Some((indexing, bundles)) =
                find_agreed_indexing(&policy, name, image, &manifest, &evidence.bundles)
            {
                return Ok(Some(SignedIndex { manifest, indexing, bundles }));
            }
        }
        Ok(None)
    }

    /// Verifies `bundles`, found earlier, against the present policy. Returns their statement about
    /// `index`, an index of `image`, if it still counts. Makes no request.
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
        let agreed = |policy: std::sync::Arc<Policy>| {
            find_agreed_indexing(&policy, name, image, index, bundles)
        };
        Ok(policy.and_then(agreed).map(|(indexing, _)| indexing))
    }
}

/// Finds a statement about `index` that as many trusted keys agree on as the policy requires.
/// Returns it with its bundles.
fn find_agreed_indexing(
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
        // Compare the layers only: another converter may have been another version of the program.
        let same = all.iter().filter(|(_, other, _)| other.layers == indexing.layers);
        let signers: BTreeSet<_> = same.clone().flat_map(|(signers, ..)| signers).collect();
        let bundles = same.map(|(.., bundle)| bundle.clone()).collect();
        let is_enough = signers.len() >= requirement.converters.threshold;
        is_enough.then(|| (indexing.clone(), bundles))
    })
}

/// Verifies `bundle`. Returns its statement about `index` of this very `image`, and the trusted
/// keys that signed it.
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
    // Each stated index must be the one in the signed manifest.
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
