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
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use lazuli_image::{
    Digest, Stored,
    oci::{Descriptor, Platform},
};
use tokio::time::{Instant, sleep};

use crate::{
    blob::{BlobReader, Growing, Progress, Pushed},
    error::RegistryError,
    manifest::{Document, Manifest},
    name::{Reference, Selector},
    place::remote::Registry,
    repository::{BlobContent, Repository, SmallBlob},
    route::{
        options::Options,
        server::{Capabilities, Server},
    },
    transport::{health::Health, preconnect::Preconnect},
};

/// How long one place may be silent before the next is asked as well. A cold proxy needs most of a
/// second for a manifest.
const HEDGE_AFTER: Duration = Duration::from_secs(2);

/// A repository of which there are several servers. Reads ask those that may be asked for it in
/// their order, the registry itself last, but those that did well lately first, and take the first
/// answer that is one; pushes go to the registry itself, or to the first that may be pushed to when
/// it may not.
///
/// What a tag names is whatever the first of them says; name a digest to depend on nobody.
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
    /// Prepares to talk to all `servers` of what `reference` names.
    pub(crate) fn open(
        reference: &Reference,
        servers: Vec<Server>,
        options: &Options,
    ) -> Result<Self, RegistryError> {
        let place = |server| Registry::at(reference.clone(), server, options).map(Arc::new);
        let places = servers.into_iter().map(place).collect::<Result<Vec<_>, _>>()?;
        Ok(Mirrored { reference: reference.clone(), places })
    }

    /// Those that may be asked for something.
    fn trusted(
        &self,
        with: impl Fn(Capabilities) -> bool + Clone,
    ) -> impl Iterator<Item = &Arc<Registry>> + Clone {
        self.places.iter().filter(move |place| with(place.may()))
    }

    /// Where pushes go.
    fn target(&self) -> Result<&Arc<Registry>, RegistryError> {
        let mut all = self.trusted(|may| may.push);
        let first = all.next();
        let last = all.last();
        let is_last =
            |place: &&Arc<Registry>| self.places.last().is_some_and(|l| Arc::ptr_eq(l, place));
        last.filter(is_last).or(first).ok_or_else(|| self.nobody("push"))
    }

    fn nobody(&self, capability: &'static str) -> RegistryError {
        RegistryError::NoHost { image: self.reference.to_string(), capability }
    }

    /// The first answer that is one, of those that have manifests.
    async fn described<'a, T, F>(
        &'a self,
        ask: impl Fn(&'a Registry) -> F,
    ) -> Result<T, RegistryError>
    where
        F: Future<Output = Result<T, RegistryError>> + 'a,
    {
        let places = self.trusted(|may| may.pull).filter(|place| !place.is_for_all());
        self.first("pull", places.collect(), ask).await
    }

    /// The first answer that is one, of those that deliver blobs of `size` bytes.
    async fn delivered<'a, T, F>(
        &'a self,
        size: u64,
        ask: impl Fn(&'a Registry) -> F,
    ) -> Result<T, RegistryError>
    where
        F: Future<Output = Result<T, RegistryError>> + 'a,
    {
        let places = self.trusted(|may| may.pull).filter(|place| place.is_worth(size));
        self.first("pull", places.collect(), ask).await
    }

    /// The first answer that is one.
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
            return Err(self.nobody(capability));
        }
        let health = |at: usize| places[at].server();
        let (well, rest): (Vec<_>, Vec<_>) =
            (0..places.len()).partition(|at| health(*at).is_well());
        let mut waiting: VecDeque<usize> = well.into_iter().chain(rest).collect();
        let mut failures: Vec<(usize, RegistryError)> = Vec::new();
        let mut silent: Vec<(usize, Instant)> = Vec::new();
        let mut under_way = FuturesUnordered::new();
        let mut hedge_after = HEDGE_AFTER;
        loop {
            if let Some(at) = waiting.pop_front() {
                hedge_after = places[at].hedge_after().unwrap_or(HEDGE_AFTER);
                let (asked, started) = (ask(places[at]), Instant::now());
                silent.push((at, started));
                under_way.push(async move { (at, started, asked.await) });
            }
            let (at, started, answer) = tokio::select! {
                answer = under_way.next() => match answer {
                    Some(answer) => answer,
                    None => break,
                },
                () = sleep(hedge_after), if !waiting.is_empty() => continue,
            };
            silent.retain(|(other, _)| *other != at);
            match answer {
                Ok(value) => {
                    health(at).worked();
                    // Who was overtaken although there was time enough is not asked first any more.
                    for (at, started) in silent {
                        if started.elapsed() >= places[at].hedge_after().unwrap_or(HEDGE_AFTER) {
                            health(at).failed(started, None);
                        }
                    }
                    return Ok(value);
                }
                Err(error) => {
                    tracing::debug!(%error, "a place failed");
                    if error.is_transient() {
                        health(at).failed(started, error.retry_after());
                    }
                    failures.push((at, error));
                }
            }
        }
        failures.sort_by_key(|(at, _)| *at);
        Err(RegistryError::Everywhere { failures: failures.into_iter().map(|(_, e)| e).collect() })
    }
}

#[async_trait]
impl Repository for Mirrored {
    async fn manifest(&self, platform: Option<&Platform>) -> Result<Manifest, RegistryError> {
        match self.reference.selector() {
            Selector::Digest(_) => self.described(|place| place.manifest(platform)).await,
            Selector::Tag(_) => {
                let places = self.trusted(|may| may.pull && may.resolve).collect();
                self.first("resolve", places, |place| place.manifest(platform)).await
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

    /// Whether anybody has it.
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
        for place in self.trusted(|may| may.pull).filter(|place| place.is_worth(size)) {
            if place.is_shared(digest, size, &range, false).await {
                places.push(place);
            }
        }
        let bytes = self
            .first("pull", places, |place| place.read(digest, size, range.clone(), &|_| {}))
            .await?;
        arrived(bytes.len() as u64);
        Ok(bytes)
    }

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

    /// Of where pushes go: a mirror has only what somebody pulled.
    async fn tags(&self) -> Result<Vec<String>, RegistryError> {
        self.target()?.tags().await
    }

    async fn push_document(
        &self,
        document: &Document,
        named: bool,
    ) -> Result<Pushed, RegistryError> {
        self.target()?.push_document(document, named).await
    }

    /// A mirror that knows of none has the last word only if nobody else answers: many never copy
    /// referrers.
    async fn referrers(
        &self,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>, RegistryError> {
        // Who is trusted with the meaning of a tag is trusted with this, as in containerd.
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

    fn prepare(&self) -> Preconnect {
        let mut all = self.trusted(|may| may.pull).filter(|place| !place.is_for_all());
        let first = all.clone().find(|place| place.server().is_well()).or_else(|| all.next());
        first.map_or_else(Preconnect::default, |place| place.prepare())
    }

    fn describe(&self) -> String {
        self.reference.to_string()
    }

    fn repository(&self) -> Option<String> {
        Some(self.reference.in_registry())
    }

    /// What a mirror gives away may be private at its registry, so that has to say it.
    fn is_open(&self) -> bool {
        self.places.last().is_some_and(|registry| registry.is_open())
    }

    fn health(&self) -> Option<&Arc<Health>> {
        let first = self.trusted(|may| may.pull).find(|place| place.server().is_well());
        let first = first.filter(|place| place.is_for_all());
        first.or(self.places.last()).map(|place| place.server())
    }

    /// Those that deliver blobs.
    fn places(self: Arc<Self>) -> Vec<Arc<dyn Repository>> {
        self.trusted(|may| may.pull).map(|place| place.clone() as Arc<dyn Repository>).collect()
    }
}
