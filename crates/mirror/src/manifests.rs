//! Manifests, and the requests that follow them in a pull.
//!
//! The first request for a name, even a HEAD, makes the mirror GET the manifest, then the manifest
//! for this machine and its configuration, which a pull needs next. containerd's later requests are
//! answered from memory, or join the fetches in flight.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use lazuli_image::{
    Digest,
    oci::{Descriptor, Platform},
};
use lazuli_registry::{
    Document, ImageName, Manifest, Parsed, Reference, RegistryError, Repository, Selector,
    lazy_form, manifest::choose,
};
use tokio::time::timeout;

use crate::{
    ANSWER_LIMIT, Mirror,
    reply::Problem,
    sessions::{Key, Session},
    shared_answers::{Asked, Lookup},
};

/// How long a tag's answer is reused: long enough for the requests of one pull.
const TAG_LIFE: Duration = Duration::from_secs(3);

/// How long content with a digest is kept for a client.
const DIGEST_LIFE: Duration = Duration::from_secs(30);

/// Bytes of answers that are kept.
pub(crate) const ANSWERS: usize = 16 << 20;

/// Largest blob that is answered from memory: configurations have some KiB.
pub(crate) const SMALL: u64 = 256 << 10;

/// A session's question.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Question {
    /// A manifest, by tag or digest.
    Manifest(Key, String),
    /// A small blob.
    Blob(Key, Digest),
}

/// The registry's answer.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Manifest(Document),
    Blob(Bytes),
}

/// An answer, its size in bytes, and how long to keep it.
type Fetched = Result<(Answer, usize, Duration), RegistryError>;

impl Mirror {
    /// The manifest or index that `reference` names, as far as the client of `session` may see it.
    pub(crate) async fn manifest(
        self: &Arc<Self>,
        session: &Arc<Session>,
        reference: &Reference,
    ) -> Result<Document, Problem> {
        let problem = match self.ask_registry(session, reference).await {
            Ok(document) => return Ok(document),
            Err(problem) => problem,
        };
        let answer_file = self.outage_answers.answer_file(session, reference, &self.seal);
        let mirror = self.clone();
        let answer = tokio::task::spawn_blocking(move || match problem {
            Problem::Denied(_) => {
                if let Err(error) = mirror.outage_answers.forget(&answer_file) {
                    tracing::warn!(%error, "cannot remove the answers of a client that was refused");
                }
                Err(problem)
            }
            Problem::Away(why) => match mirror.outage_answers.find(&answer_file) {
                Some(document) => {
                    tracing::info!(why, "the registry is away: sent its earlier answer");
                    mirror.counters.stale();
                    Ok(document)
                }
                None => Err(Problem::Away(why)),
            },
            problem => Err(problem),
        });
        answer.await.unwrap_or_else(|error| Err(Problem::Away(error.to_string())))
    }

    /// The problem of a client that nothing on the node answers while the registry is away.
    pub(crate) async fn unanswered(
        self: &Arc<Self>,
        session: &Session,
        reference: &Reference,
        why: String,
    ) -> Problem {
        let answer_file = self.outage_answers.answer_file(session, reference, &self.seal);
        let (mirror, is_stranger) = (self.clone(), session.login.is_none());
        let known = tokio::task::spawn_blocking(move || {
            is_stranger && mirror.outage_answers.is_known(&answer_file)
        });
        match known.await {
            // Some client's login was accepted for this repository, so challenge this client: it
            // may have one.
            Ok(true) => Problem::Denied(why),
            _ => Problem::Away(why),
        }
    }

    /// The registry's answer, which may be one from memory.
    async fn ask_registry(
        self: &Arc<Self>,
        session: &Arc<Session>,
        reference: &Reference,
    ) -> Result<Document, Problem> {
        if let Some(problem) = self.answered_before(session) {
            return Err(problem);
        }
        let asked = self.ask(session, reference);
        match self.within(session, asked).await? {
            Answer::Manifest(document) => Ok(document),
            Answer::Blob(_) => Err(Problem::Wrong("a blob instead of a manifest".to_owned())),
        }
    }

    /// The small blob `digest` of `size` bytes, checked.
    pub(crate) async fn small_blob(
        self: &Arc<Self>,
        session: &Arc<Session>,
        digest: Digest,
        size: u64,
    ) -> Result<Bytes, Problem> {
        let asked = self.ask_blob(session, digest, size);
        match self.within(session, asked).await? {
            Answer::Blob(content) => Ok(content),
            Answer::Manifest(_) => Err(Problem::Wrong("a manifest instead of a blob".to_owned())),
        }
    }

    /// Waits for an answer, at most [`ANSWER_LIMIT`]. An answer that arrives later serves the next
    /// request.
    async fn within(
        &self,
        session: &Session,
        Asked { answer, lookup }: Asked<Answer>,
    ) -> Result<Answer, Problem> {
        match lookup {
            Lookup::Hit => self.counters.hit(),
            Lookup::Miss => self.counters.miss(),
        }
        let problem = match timeout(ANSWER_LIMIT, answer).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(failure)) => Problem::of(&failure),
            Err(_) => Problem::Away(too_slow(session.reference.registry())),
        };
        self.record_refusal(session, &problem);
        Err(problem)
    }

    /// Applies the registry's recent refusal to this question.
    pub(crate) fn answered_before(&self, session: &Session) -> Option<Problem> {
        if self.sessions.refuses(session) {
            return Some(Problem::Denied("the registry wants a login".to_owned()));
        }
        let busy = session.busy_for().map(|pause| Problem::Busy(Some(pause)));
        busy.or_else(|| self.rests(session))
    }

    /// Remembers a registry's refusal of this client, or its request to pause.
    pub(crate) fn record_refusal(&self, session: &Session, problem: &Problem) {
        match problem {
            Problem::Denied(_) => self.sessions.refuse(session),
            Problem::Busy(Some(pause)) => session.pause_for(*pause),
            _ => {}
        }
    }

    fn ask(self: &Arc<Self>, session: &Arc<Session>, reference: &Reference) -> Asked<Answer> {
        let question = Question::Manifest(session.key.clone(), reference.selector().to_string());
        let (mirror, session, reference) = (self.clone(), session.clone(), reference.clone());
        self.answers.get(question, move || fetch(mirror, session, reference))
    }

    fn ask_blob(
        self: &Arc<Self>,
        session: &Arc<Session>,
        digest: Digest,
        size: u64,
    ) -> Asked<Answer> {
        let question = Question::Blob(session.key.clone(), digest);
        let (mirror, session) = (self.clone(), session.clone());
        self.answers.get(question, move || fetch_blob(mirror, session, digest, size))
    }

    /// Starts to fetch what a pull needs after `document`.
    fn prefetch_next(
        self: &Arc<Self>,
        session: &Arc<Session>,
        reference: &Reference,
        document: &Document,
    ) {
        // A malformed document is reported by the request that reads it.
        match document.parse(&reference.to_string()) {
            Ok(Parsed::Index(_, entries)) => {
                let wanted = Platform::host();
                if let Ok(chosen) = choose("", &entries, Some(&wanted)) {
                    drop(self.ask(session, &reference.at(chosen.digest)));
                }
            }
            Ok(Parsed::Image(manifest)) => self.expect(session, reference, *manifest),
            Err(_) => {}
        }
    }

    /// Prepares for the pull of an image: fetches its configuration, and reports the image to the
    /// node.
    fn expect(self: &Arc<Self>, session: &Arc<Session>, reference: &Reference, manifest: Manifest) {
        let parsed = &manifest.parsed;
        let blobs = parsed.layers.iter().chain([&parsed.config]);
        session.record_sizes(blobs.map(|blob| (blob.digest, blob.size)));
        let Descriptor { digest, size, .. } = parsed.config;
        if size <= SMALL {
            drop(self.ask_blob(session, digest, size));
        }
        let image = reference.at(manifest.digest);
        if let Some(login) = &session.login {
            self.pulls.record_login(&image, login.clone());
        }
        self.node.expect(image, manifest, session.login.clone());
    }
}

/// Fetches the manifest or index `reference`.
async fn fetch(mirror: Arc<Mirror>, session: Arc<Session>, reference: Reference) -> Fetched {
    let _permit = mirror.permits.at(reference.registry()).await;
    let repository = session.at(&reference)?;
    // A pull goes on with several requests at a time.
    drop(repository.request_policy().preconnect());
    let mut document = session.heard(repository.document(None).await)?;
    let mut life = DIGEST_LIFE;
    if let Selector::Tag(_) = reference.selector() {
        life = TAG_LIFE;
        document = lazy(&mirror, &session, &reference, &*repository, document).await;
        // Clients ask for it by its digest next.
        let by_digest = Question::Manifest(session.key.clone(), document.digest.to_string());
        let (answer, bytes) = (Answer::Manifest(document.clone()), document.raw.len());
        drop(mirror.answers.get(by_digest, || async move { Ok((answer, bytes, DIGEST_LIFE)) }));
    }
    mirror.prefetch_next(&session, &reference, &document);
    remember(&mirror, &session, &reference, &document);
    let bytes = document.raw.len();
    Ok((Answer::Manifest(document), bytes, life))
}

/// The form of an image that a tag is answered with.
pub(crate) async fn lazy(
    mirror: &Mirror,
    session: &Session,
    reference: &Reference,
    repository: &dyn Repository,
    document: Document,
) -> Document {
    if !mirror.lazy.has(reference) {
        return document;
    }
    let name = ImageName::Registry(reference.clone());
    let trusted = &session.options().referrers;
    match lazy_form(repository, &name, &document, trusted).await {
        Ok(Some(manifest)) => manifest.into(),
        Ok(None) => document,
        Err(error) => {
            tracing::debug!(%error, "cannot find out whether there is a lazy form");
            document
        }
    }
}

async fn fetch_blob(
    mirror: Arc<Mirror>,
    session: Arc<Session>,
    digest: Digest,
    size: u64,
) -> Fetched {
    let _permit = mirror.permits.at(session.reference.registry()).await;
    let descriptor = Descriptor::plain("application/octet-stream", digest, size);
    let blob = session.heard(session.repository.small_blob(&descriptor).await)?;
    let bytes = blob.content.len();
    Ok((Answer::Blob(blob.content), bytes, DIGEST_LIFE))
}

/// Keeps an answer for the time when the registry is away.
fn remember(
    mirror: &Arc<Mirror>,
    session: &Arc<Session>,
    reference: &Reference,
    document: &Document,
) {
    let answer_file = mirror.outage_answers.answer_file(session, reference, &mirror.seal);
    let (mirror, document) = (mirror.clone(), document.clone());
    tokio::task::spawn_blocking(move || {
        if let Err(error) = mirror.outage_answers.store(&answer_file, &document) {
            tracing::warn!(%error, "an answer is not kept for when the registry is away");
        }
    });
}

pub(crate) fn too_slow(registry: &str) -> String {
    format!("{registry} did not answer within {} s", ANSWER_LIMIT.as_secs())
}
