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
    Repository,
    blob::{BlobContent, BlobReader, Progress, Pushed},
    client::Options,
    error::RegistryError,
    health::Health,
    manifest::Manifest,
    mirror::Mirror,
    name::Reference,
    remote::Registry,
};

/// How long one place may be silent before the next is asked as well. A cold proxy needs most of a second for a manifest.
const PATIENCE: Duration = Duration::from_secs(2);

/// A repository in a registry that has mirrors. Reads ask the mirrors in their order and then the registry, those that did well
/// lately first, and take the first answer that is one; pushes go to the registry.
///
/// What a tag names is whatever the first of them says; name a digest to depend on nobody.
pub struct Mirrored {
    /// The registry itself comes last.
    places: Vec<Arc<Registry>>,
    origin: Arc<Registry>,
}

impl fmt::Debug for Mirrored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.places).finish()
    }
}

impl Mirrored {
    /// Prepares to talk to the registry of `reference` and to its mirrors.
    ///
    /// # Errors
    /// Those of [`Registry::open`].
    pub fn open(
        reference: &Reference,
        mirrors: &[Mirror],
        options: &Options,
    ) -> Result<Self, RegistryError> {
        let mirror = |mirror| Registry::open_mirror(reference, mirror, options).map(Arc::new);
        let mut places = mirrors.iter().map(mirror).collect::<Result<Vec<_>, _>>()?;
        let origin = Arc::new(Registry::open(reference.clone(), options)?);
        places.push(origin.clone());
        Ok(Mirrored { places, origin })
    }

    /// The first answer that is one.
    async fn first<'a, T, F>(&'a self, ask: impl Fn(&'a Registry) -> F) -> Result<T, RegistryError>
    where
        F: Future<Output = Result<T, RegistryError>> + 'a,
    {
        let health = |at: usize| self.places[at].server();
        let (well, rest): (Vec<_>, Vec<_>) =
            (0..self.places.len()).partition(|at| health(*at).is_well());
        let mut waiting: VecDeque<usize> = well.into_iter().chain(rest).collect();
        let mut failures: Vec<(usize, RegistryError)> = Vec::new();
        let mut silent: Vec<(usize, Instant)> = Vec::new();
        let mut under_way = FuturesUnordered::new();
        loop {
            if let Some(at) = waiting.pop_front() {
                let (asked, started) = (ask(&self.places[at]), Instant::now());
                silent.push((at, started));
                under_way.push(async move { (at, started, asked.await) });
            }
            let (at, started, answer) = tokio::select! {
                answer = under_way.next() => match answer {
                    Some(answer) => answer,
                    None => break,
                },
                () = sleep(PATIENCE), if !waiting.is_empty() => continue,
            };
            silent.retain(|(other, _)| *other != at);
            match answer {
                Ok(value) => {
                    health(at).worked();
                    // Who was overtaken although there was time enough is not asked first any more.
                    for (at, started) in silent.into_iter().filter(|s| s.1.elapsed() >= PATIENCE) {
                        health(at).failed(started, None);
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
        self.first(|place| place.manifest(platform)).await
    }

    async fn has_blob(&self, digest: &Digest) -> Result<bool, RegistryError> {
        self.origin.has_blob(digest).await
    }

    async fn blob(&self, digest: &Digest, size: u64) -> Result<BlobReader, RegistryError> {
        self.first(|place| place.blob(digest, size)).await
    }

    async fn small_blob(&self, blob: &Descriptor) -> Result<Bytes, RegistryError> {
        self.first(|place| place.small_blob(blob)).await
    }

    async fn read(
        &self,
        digest: &Digest,
        range: Range<Stored>,
        arrived: Progress<'_>,
    ) -> Result<Bytes, RegistryError> {
        let bytes = self.first(|place| place.read(digest, range.clone(), &|_| {})).await?;
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
        self.origin.push_blob(digest, size, content, mount_from, progress).await
    }

    async fn push_manifest(&self, raw: Bytes, media_type: &str) -> Result<Digest, RegistryError> {
        self.origin.push_manifest(raw, media_type).await
    }

    /// A mirror that knows of none has the last word only if nobody else answers: many never copy referrers.
    async fn referrers(
        &self,
        subject: &Digest,
        artifact_type: &str,
    ) -> Result<Vec<Descriptor>, RegistryError> {
        let found = self.first(|place| async move {
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
        self.origin.push_referrer(subject, artifact_type, annotations, replaces).await
    }

    fn describe(&self) -> String {
        self.origin.describe()
    }

    fn health(&self) -> Option<&Arc<Health>> {
        self.origin.health()
    }

    fn places(self: Arc<Self>) -> Vec<Arc<dyn Repository>> {
        self.places.iter().map(|place| place.clone() as Arc<dyn Repository>).collect()
    }
}
