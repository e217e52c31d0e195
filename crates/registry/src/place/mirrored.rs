//! A registry and its mirrors as one repository.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    future::Future,
    ops::Range,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::{
    Digest, Stored,
    oci::{Descriptor, Platform},
};

use crate::{
    blob::{BlobReader, Growing, Progress, Pushed, Urgency},
    error::RegistryError,
    hedge::{Attempt, Attempts, Event, Lateness},
    manifest::{Document, Manifest},
    name::{Reference, Selector},
    place::remote::Registry,
    repository::{BlobContent, Pull, Push, PushBy, Referrers, RequestPolicy, SmallBlob},
    route::{
        options::Options,
        server::{Capabilities, Server},
    },
};

/// Silence of one server after which a hedged request goes to the next. A cold proxy needs most of
/// a second for a manifest.
const HEDGE_AFTER: Duration = Duration::from_secs(2);

/// A repository on several servers.
///
/// Reads ask the servers that are trusted with the request in their order, healthy ones first and
/// the registry itself last, and take the first success. Pushes go to the registry, or to the first
/// server that accepts pushes if the registry doesn't.
///
/// The first server that answers decides what a tag names; open a digest to trust none of them.
pub struct Mirrored {
    reference: Reference,
    /// The registry itself comes last.
    places: Vec<Arc<Registry>>,
}

impl fmt::Debug for Mirrored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.places).finish()
    }
}

impl Mirrored {
    /// Opens clients for all `servers` of `reference`.
    pub(crate) fn open(
        reference: &Reference,
        servers: Vec<Server>,
        options: &Options,
    ) -> Result<Self, RegistryError> {
        let place = |server| Registry::at(reference.clone(), server, options).map(Arc::new);
        let places = servers.into_iter().map(place).collect::<Result<Vec<_>, _>>()?;
        Ok(Mirrored { reference: reference.clone(), places })
    }

    /// The servers with these capabilities.
    fn trusted(
        &self,
        with: impl Fn(Capabilities) -> bool + Clone,
    ) -> impl Iterator<Item = &Arc<Registry>> + Clone {
        self.places.iter().filter(move |place| with(place.may()))
    }

    /// Returns the registry that pushes go to.
    fn target(&self) -> Result<&Arc<Registry>, RegistryError> {
        let mut all = self.trusted(|may| may.push);
        let first = all.next();
        let last = all.last();
        let is_last =
            |place: &&Arc<Registry>| self.places.last().is_some_and(|l| Arc::ptr_eq(l, place));
        last.filter(is_last).or(first).ok_or_else(|| self.no_host("push"))
    }

    fn no_host(&self, capability: &'static str) -> RegistryError {
        RegistryError::NoHost { image: self.reference.to_string(), capability }
    }

    /// The first success among the servers that have manifests.
    async fn described<'a, T, F>(
        &'a self,
        ask: impl Fn(&'a Registry) -> F,
    ) -> Result<T, RegistryError>
    where
        F: Future<Output = Result<T, RegistryError>> + 'a,
    {
        let places = self.trusted(|may| may.pull).filter(|place| !place.policy().is_peer());
        self.first("pull", places.collect(), ask).await
    }

    /// The first success among the servers that deliver blobs of `size` bytes.
    async fn delivered<'a, T, F>(
        &'a self,
        size: u64,
        ask: impl Fn(&'a Registry) -> F,
    ) -> Result<T, RegistryError>
    where
        F: Future<Output = Result<T, RegistryError>> + 'a,
    {
        let places = self.trusted(|may| may.pull).filter(|place| place.policy().suits_size(size));
        self.first("pull", places.collect(), ask).await
    }

    /// The first success.
    async fn first<'a, T, F>(
        &'a self,
        capability: &'static str,
        places: Vec<&'a Arc<Registry>>,
        ask: impl Fn(&'a Registry) -> F,
    ) -> Result<T, RegistryError>
    where
        F: Future<Output = Result<T, RegistryError>> + 'a,
    {
        if places.is_empty() {
            return Err(self.no_host(capability));
        }
        let health = |at: usize| places[at].server();
        let (well, rest): (Vec<_>, Vec<_>) =
            (0..places.len()).partition(|at| health(*at).is_well());
        let mut waiting: VecDeque<usize> = well.into_iter().chain(rest).collect();
        let mut failures: Vec<(usize, RegistryError)> = Vec::new();
        let mut attempts = Attempts::default();
        let mut ask_next = |attempts: &mut Attempts<F>| {
            let Some(at) = waiting.pop_front() else { return };
            let number = attempts.start(at, ask(places[at]));
            attempts.look_after(number, hedge_after_of(places[at]), Lateness::Late);
        };
        ask_next(&mut attempts);
        while !attempts.is_idle() {
            match attempts.next().await {
                // Only the last one: after those before it the next place was asked already.
                Some(Event::Late(number, _)) if attempts.last() == Some(number) => {
                    ask_next(&mut attempts);
                }
                Some(Event::Late(..) | Event::Resume) => {}
                Some(Event::Ended(number, Ok(value))) => {
                    health(attempts.get(number).server).worked();
                    let limit = |server: usize| hedge_after_of(places[server]);
                    let age = |_, attempt: Attempt| Some(attempt.started.elapsed());
                    for (_, other) in attempts.overtaken(number, limit, age) {
                        health(other.server).failed(other.started, None);
                    }
                    return Ok(value);
                }
                Some(Event::Ended(number, Err(error))) => {
                    tracing::debug!(%error, "a place failed");
                    let Attempt { server, started, .. } = attempts.get(number);
                    if error.is_transient() {
                        health(server).failed(started, error.retry_after());
                    }
                    failures.push((server, error));
                    ask_next(&mut attempts);
                }
                None => break,
            }
        }
        failures.sort_by_key(|(at, _)| *at);
        Err(RegistryError::Everywhere { failures: failures.into_iter().map(|(_, e)| e).collect() })
    }
}

fn hedge_after_of(place: &Registry) -> Duration {
    place.policy().hedge_after().unwrap_or(HEDGE_AFTER)
}

#[async_trait]
impl Pull for Mirrored {
    async fn manifest(&self, platform: Option<&Platform>) -> Result<Manifest, RegistryError> {
        match self.reference.selector() {
            Selector::Digest(_) => self.described(|place| place.manifest(platform)).await,
            Selector::Tag(_) => {
                let places = self.trusted(|may| may.pull && may.resolve).collect();
                self.first("resolve", places, |place| place.manifest(platform)).await
            }
        }
    }

    async fn digest(&self) -> Result<Digest, RegistryError> {
        match self.reference.selector() {
            Selector::Digest(digest) => Ok(digest),
            Selector::Tag(_) => {
                let places = self.trusted(|may| may.pull && may.resolve).collect();
                self.first("resolve", places, |place| place.digest()).await
            }
        }
    }

    async fn document(&self, digest: Option<&Digest>) -> Result<Document, RegistryError> {
        match (digest, self.reference.selector()) {
            (None, Selector::Tag(_)) => {
                let places = self.trusted(|may| may.pull && may.resolve).collect();
                self.first("resolve", places, |place| place.document(None)).await
            }
            _ => self.described(|place| place.document(digest)).await,
        }
    }

    async fn has_blob(&self, digest: &Digest) -> Result<bool, RegistryError> {
        let asked = self.described(|place| async move {
            match place.has_blob(digest).await? {
                true => Ok(()),
                false => {
                    let (place, object) = (place.describe(), format!("blob {digest}"));
                    Err(RegistryError::Missing { place, object })
                }
            }
        });
        match asked.await {
            Ok(()) => Ok(true),
            Err(error) if error.is_missing() => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn blob_size(&self, digest: &Digest) -> Result<u64, RegistryError> {
        self.described(|place| place.blob_size(digest)).await
    }

    async fn blob(&self, digest: &Digest, size: u64) -> Result<BlobReader, RegistryError> {
        self.delivered(size, |place| place.blob(digest, size)).await
    }

    async fn small_blob(&self, blob: &Descriptor) -> Result<SmallBlob, RegistryError> {
        self.delivered(blob.size, |place| place.small_blob(blob)).await
    }

    async fn read(
        &self,
        digest: &Digest,
        size: u64,
        range: Range<Stored>,
        arrived: Progress<'_>,
    ) -> Result<Bytes, RegistryError> {
        let mut places = Vec::new();
        for place in self.trusted(|may| may.pull).filter(|it| it.policy().suits_size(size)) {
            if place.policy().suits_range(digest, size, &range, Urgency::Prefetch).await {
                places.push(place);
            }
        }
        let bytes = self
            .first("pull", places, |place| place.read(digest, size, range.clone(), &|_| {}))
            .await?;
        arrived(bytes.len() as u64);
        Ok(bytes)
    }

    /// Tags of the push target: a mirror has only what was pulled through it.
    async fn tags(&self, limit: usize) -> Result<Vec<String>, RegistryError> {
        self.target()?.tags(limit).await
    }

    /// Preconnects to the first healthy server that is no peer. A peer shares this node's link, so
    /// the health of a peer counts if one is asked first, and otherwise that of the registry.
    fn request_policy(&self) -> RequestPolicy {
        let deliver = || self.trusted(|may| may.pull);
        let is_well = |place: &&Arc<Registry>| place.server().is_well();
        let mut servers = deliver().filter(|place| !place.policy().is_peer());
        let first = servers.clone().find(is_well).or_else(|| servers.next());
        let peer = deliver().find(is_well).filter(|place| place.policy().is_peer());
        let policy = |place: &Arc<Registry>| place.policy().clone();
        RequestPolicy::combined(first.map(policy), peer.or(self.places.last()).map(policy))
    }

    fn describe(&self) -> String {
        self.reference.to_string()
    }

    fn repository_name(&self) -> Option<String> {
        Some(self.reference.in_registry())
    }

    /// A mirror may serve openly what is private at the registry, so the registry decides.
    fn serves_anonymously(&self) -> bool {
        self.places.last().is_some_and(|registry| registry.serves_anonymously())
    }

    fn places(self: Arc<Self>) -> Vec<Arc<dyn Pull>> {
        self.trusted(|may| may.pull).map(|place| place.clone() as Arc<dyn Pull>).collect()
    }
}

#[async_trait]
impl Push for Mirrored {
    async fn push_blob(
        &self,
        digest: &Digest,
        size: u64,
        content: BlobContent,
        mount_from: Option<&str>,
        progress: Progress<'_>,
    ) -> Result<Pushed, RegistryError> {
        self.target()?.push_blob(digest, size, content, mount_from, progress).await
    }

    async fn push_growing(
        &self,
        blob: Growing,
        progress: Progress<'_>,
    ) -> Result<Pushed, RegistryError> {
        self.target()?.push_growing(blob, progress).await
    }

    async fn push_manifest(&self, raw: Bytes, media_type: &str) -> Result<Digest, RegistryError> {
        self.target()?.push_manifest(raw, media_type).await
    }

    async fn push_document(
        &self,
        document: &Document,
        by: PushBy,
    ) -> Result<Pushed, RegistryError> {
        self.target()?.push_document(document, by).await
    }
}

#[async_trait]
impl Referrers for Mirrored {
    /// Mirrors often don't copy referrers: an empty list counts only if no other server answers.
    async fn referrers(
        &self,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>, RegistryError> {
        // Trust in tags of a server includes its referrers, as in containerd.
        let places = self.trusted(|may| may.referrers || may.resolve).collect();
        let found = self.first("referrers", places, |place| async move {
            let found = place.referrers(subject, artifact_type).await?;
            if found.is_empty() {
                let (place, object) = (place.describe(), format!("referrer of {subject}"));
                return Err(RegistryError::Missing { place, object });
            }
            Ok(found)
        });
        match found.await {
            Err(RegistryError::Everywhere { failures })
                if failures.iter().any(|f| matches!(f, RegistryError::Missing { .. })) =>
            {
                Ok(Vec::new())
            }
            answer => answer,
        }
    }

    async fn push_referrer(
        &self,
        subject: &Descriptor,
        artifact_type: &str,
        annotations: &BTreeMap<String, String>,
        replaces: Option<&Digest>,
    ) -> Result<Digest, RegistryError> {
        self.target()?.push_referrer(subject, artifact_type, annotations, replaces).await
    }

    async fn enlist_referrers(
        &self,
        subject: &Digest,
        entries: &[Descriptor],
    ) -> Result<(), RegistryError> {
        self.target()?.enlist_referrers(subject, entries).await
    }

    async fn delete_referrers(
        &self,
        subject: &Digest,
        manifests: &[Digest],
    ) -> Result<(), RegistryError> {
        self.target()?.delete_referrers(subject, manifests).await
    }
}
