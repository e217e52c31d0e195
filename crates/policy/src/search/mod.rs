//! Searching registries for evidence about an image, in parallel, until there is enough.
//!
//! ```text
//! tag sha256-HEX.sig ─▶ payload, unless it is as cosign writes it
//! referrers of type bundle ─▶ manifest, unless the list has the blob ─▶ bundle
//! ```
//! The same for the index that lists the image, and for the source of its conversion.

mod place;

use std::collections::{HashMap, HashSet};

use futures_util::{
    future::BoxFuture,
    stream::{FuturesUnordered, StreamExt as _},
};
use lazuli_image::{Digest, oci::Descriptor};
use lazuli_registry::{ImageName, Options, RegistryError};

use self::place::{SearchedRepository, Task, TaskResult, described};
use crate::{
    evidence::{Consent, Evidence, SignatureLayer},
    name::Asked,
    payload::PAYLOAD_LIMIT,
    question::Question,
    rules::{Ground, Policy, Rule},
    statement,
    verify::{Claim, Refused, Verified, sources, verify},
};

/// Most requests for one image.
const REQUESTS: usize = 128;

/// Maximum number of failures that an error lists.
const FAILURES: usize = 3;

type Answer = (String, Result<TaskResult, RegistryError>);

/// A search for evidence.
pub(crate) struct Search<'a> {
    policy: &'a Policy,
    question: &'a Question,
    options: Options,
    places: HashMap<String, SearchedRepository>,
    known: HashSet<(String, Task)>,
    requests: usize,
    pending: FuturesUnordered<BoxFuture<'static, Answer>>,
    evidence: Evidence,
    failures: Vec<String>,
    index: Option<Descriptor>,
}

impl<'a> Search<'a> {
    pub(crate) fn new(policy: &'a Policy, question: &'a Question) -> Self {
        Search {
            policy,
            question,
            // Tags and lists have no digest to check them by: registries and mirrors alone are
            // asked.
            options: Options { dragonfly: None, ..question.options.clone() },
            places: HashMap::new(),
            known: HashSet::new(),
            requests: 0,
            pending: FuturesUnordered::new(),
            evidence: Evidence::default(),
            failures: Vec::new(),
            index: question.index.clone(),
        }
    }

    /// Searches until the evidence suffices, or no place is left to ask.
    pub(crate) async fn run(mut self) -> Result<Verified, Box<Refused>> {
        let question = self.question;
        let (home, manifest) = (&question.name, question.manifest.digest);
        let index = self.index.as_ref().map(|index| index.digest);
        for digest in [manifest].into_iter().chain(index).chain(question.source) {
            self.look_up(home, digest);
        }
        if question.may_have_index() {
            self.begin(home, Task::Index);
        }
        loop {
            self.look_up_sources();
            let claim = self.claim();
            let refused = match verify(self.policy, &claim, &self.evidence) {
                Ok(verified) => return Ok(verified),
                Err(refused) => refused,
            };
            match self.pending.next().await {
                Some((place, answer)) => self.take(&place, answer),
                None if self.consult().await => {}
                None => return Err(self.refuse(refused)),
            }
        }
    }

    /// Gathers the evidence of all bundles beside the manifest.
    pub(crate) async fn gather(mut self) -> Evidence {
        let (home, manifest) = (&self.question.name, self.question.manifest.digest);
        self.begin(home, Task::Referrers(manifest));
        while let Some((place, answer)) = self.pending.next().await {
            self.take(&place, answer);
        }
        for failure in &self.failures {
            tracing::debug!(failure, "the statements about an index are not known");
        }
        self.evidence
    }

    fn claim(&self) -> Claim<'a> {
        Claim {
            name: &self.question.name,
            manifest: self.question.manifest.digest,
            index: self.index.as_ref().map(|index| index.digest),
            replaces: self.question.replaces,
        }
    }

    /// Runs the policy's verifier program, once all other evidence is known. False if there is
    /// none.
    async fn consult(&mut self) -> bool {
        let asked = Asked::of(&self.question.name);
        let (_, Rule::Require(requirement)) = self.policy.rule(&asked) else { return false };
        let Some(Ground::ExternalVerifier(program)) = &requirement.ground else { return false };
        if !self.evidence.consents.is_empty() {
            return false;
        }
        // Signers sign the index if the name means one.
        let image = self.index.clone().unwrap_or_else(|| self.question.manifest.clone());
        let home = self.places.get(&Asked::of(&self.question.name).repository).cloned();
        let image = described(home, image).await;
        let answer = program.ask(&asked.to_string(), &image).await;
        self.evidence.consents.push(Consent { digest: image.digest, answer });
        true
    }

    fn look_up(&mut self, place: &ImageName, digest: Digest) {
        self.begin(place, Task::Tag(digest));
        self.begin(place, Task::Referrers(digest));
    }

    /// Signatures of a source lie beside it, and where its conversion was copied with them.
    fn look_up_sources(&mut self) {
        for statement::Source { name, digest, manifest } in
            sources(self.policy, &self.claim(), &self.evidence)
        {
            let Ok(name) = name.parse::<ImageName>() else { continue };
            for digest in [digest, manifest] {
                self.look_up(&self.question.name.clone(), digest);
                self.look_up(&name, digest);
            }
        }
    }

    fn begin(&mut self, place: &ImageName, task: Task) {
        let key = Asked::of(place).repository;
        if !self.known.insert((key.clone(), task.clone())) || self.requests >= REQUESTS {
            return;
        }
        self.requests += 1;
        let opened = match self.places.get(&key) {
            Some(place) => Ok(place.clone()),
            None => SearchedRepository::open(place, &self.options),
        };
        match opened {
            Ok(place) => {
                self.places.insert(key.clone(), place.clone());
                let (options, manifest) = (self.options.clone(), self.question.manifest.digest);
                self.pending.push(Box::pin(async move {
                    (key, place.perform(task, manifest, &options).await)
                }));
            }
            Err(error) => self.failures.push(error.to_string()),
        }
    }

    fn take(&mut self, place: &str, answer: Result<TaskResult, RegistryError>) {
        let Some(place) = self.places.get(place).cloned() else { return };
        let TaskResult { evidence, index, next, layers } = match answer {
            Ok(found) => found,
            Err(error) => return self.failures.push(error.to_string()),
        };
        self.evidence.extend(evidence);
        next.into_iter().for_each(|task| self.begin(&place.name, task));
        for layer in layers {
            self.fetch_payload(&place, layer);
        }
        if let Some(index) = index {
            self.look_up(&place.name, index.digest);
            self.index = Some(index);
        }
    }

    fn fetch_payload(&mut self, place: &SearchedRepository, layer: SignatureLayer) {
        if self.requests >= REQUESTS || layer.payload.size > PAYLOAD_LIMIT as u64 {
            return;
        }
        self.requests += 1;
        let (repository, key) = (place.repository.clone(), Asked::of(&place.name).repository);
        self.pending.push(Box::pin(async move {
            let fetched = repository.small_blob(&layer.payload).await;
            let found = fetched.map(|payload| {
                let signatures = vec![layer.with(payload.content)];
                TaskResult {
                    evidence: Evidence { signatures, ..Evidence::default() },
                    ..TaskResult::default()
                }
            });
            (key, found)
        }));
    }

    /// Adds failed requests to the reasons: they may be why no signature was found.
    fn refuse(self, mut refused: Box<Refused>) -> Box<Refused> {
        refused.reasons.extend(self.failures.into_iter().take(FAILURES));
        refused
    }
}
