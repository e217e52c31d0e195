//! How the blobs of an image that is in use are reached.
//!
//! What containerd was told about registries may change while containers run: a certificate is
//! renewed, a mirror comes or goes. So it is looked at every few seconds, and images go other ways
//! without being mounted anew.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::Duration,
};

use lazuli_image::Blob;
use lazuli_registry::{ImageName, Options, Pull, Repository, Route};

use super::{DaemonError, MountRequest, node::Node};
use crate::{
    cache::{Cache, CachedBlob},
    source::{BlobSource, RepositorySource},
};

/// How often files are looked at: well within the deadline of a reader who waits for somebody to
/// put them right.
const LOOK: Duration = Duration::from_secs(5);

/// A name of an image, and how the registry in it is reached.
#[derive(Debug)]
pub(super) struct ImageRoute {
    name: ImageName,
    options: Options,
    route: Route,
    repository: OnceLock<Arc<dyn Repository>>,
}

impl ImageRoute {
    /// The way at this moment.
    pub(super) fn to(name: &ImageName, options: &Options) -> Self {
        let route = Route::to(name, options);
        ImageRoute {
            name: name.clone(),
            options: options.clone(),
            route,
            repository: OnceLock::new(),
        }
    }

    /// The repository at its end. Always the same one: over the connections that brought the
    /// metadata comes the first data.
    pub(super) fn open(&self) -> Result<Arc<dyn Repository>, DaemonError> {
        if let Some(repository) = self.repository.get() {
            return Ok(repository.clone());
        }
        let repository = self.route.clone().open(&self.name, &self.options)?;
        Ok(self.repository.get_or_init(|| repository).clone())
    }
}

impl Node {
    /// How the registry of an image is reached.
    pub(super) fn options(&self, request: &MountRequest) -> Options {
        Options { plain_http: request.plain_http, ..self.registry.clone() }
    }
}

/// Every place that holds the image, in the order in which they are to be asked.
fn places(repository: &Arc<dyn Repository>) -> Vec<Arc<dyn Pull>> {
    let places = repository.clone().places();
    // Whoever is asked then says that nobody may be asked.
    if places.is_empty() { vec![repository.clone()] } else { places }
}

/// The ways to one image.
#[derive(Debug)]
pub(super) struct ImageRoutes(Mutex<Known>);

#[derive(Debug)]
struct Known {
    by_name: HashMap<String, Gone>,
    newest: Arc<dyn Repository>,
}

/// A way, and the sources that it has brought to each of the image's blobs.
#[derive(Debug)]
struct Gone {
    way: ImageRoute,
    sources: Vec<Vec<Arc<dyn BlobSource>>>,
}

/// One source for each place that is to be asked for such a blob.
fn sources(blob: &Blob, places: &[Arc<dyn Pull>]) -> Vec<Arc<dyn BlobSource>> {
    let source = |place: &Arc<dyn Pull>| {
        let source = RepositorySource::new(place.clone(), blob.id, blob.stored_size);
        Arc::new(source) as Arc<dyn BlobSource>
    };
    let suits = |place: &&Arc<dyn Pull>| place.request_policy().suits_size(blob.stored_size);
    places.iter().filter(suits).map(source).collect()
}

impl ImageRoutes {
    /// Opens `blobs` in the cache, with the first way to them.
    pub(super) fn begin(
        way: ImageRoute,
        blobs: &[Blob],
        cache: &Cache,
    ) -> Result<(Self, Vec<Arc<CachedBlob>>), DaemonError> {
        let newest = way.open()?;
        let places = places(&newest);
        let mut cached = Vec::new();
        let mut brought = Vec::new();
        for blob in blobs {
            let sources = sources(blob, &places);
            let opened = cache.unsourced(blob)?;
            attach(&opened, &sources);
            cached.push(opened);
            brought.push(sources);
        }
        let by_name = HashMap::from([(way.name.to_string(), Gone { way, sources: brought })]);
        Ok((ImageRoutes(Mutex::new(Known { by_name, newest })), cached))
    }

    /// The image, in the way that was added last.
    pub(super) fn newest(&self) -> Arc<dyn Repository> {
        self.lock().newest.clone()
    }

    /// Adds a way to `blobs`, which are open as `cached`, or replaces the one that was known under
    /// that name.
    pub(super) fn add(
        &self,
        way: ImageRoute,
        blobs: &[Blob],
        cached: &[Arc<CachedBlob>],
    ) -> Result<(), DaemonError> {
        let mut known = self.lock();
        let name = way.name.to_string();
        if known.by_name.get(&name).is_some_and(|known| known.way.route == way.route) {
            return Ok(());
        }
        let repository = way.open()?;
        let places = places(&repository);
        let mut brought = Vec::new();
        for (blob, cached) in blobs.iter().zip(cached) {
            let sources = sources(blob, &places);
            attach(cached, &sources);
            brought.push(sources);
        }
        known.newest = repository;
        if let Some(before) = known.by_name.insert(name, Gone { way, sources: brought }) {
            for (cached, sources) in cached.iter().zip(&before.sources) {
                sources.iter().for_each(|source| cached.detach(source));
            }
        }
        Ok(())
    }

    /// Replaces ways that have changed. Reads files.
    pub(super) fn refresh(&self, blobs: &[Blob], cached: &[Arc<CachedBlob>]) {
        let now: Vec<_> = {
            let known = self.lock();
            known
                .by_name
                .values()
                .map(|known| ImageRoute::to(&known.way.name, &known.way.options))
                .collect()
        };
        for way in now {
            if let Err(error) = self.add(way, blobs, cached) {
                tracing::warn!(error = error.for_people(), "an image is fetched as before");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        // No panic can leave the map half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is attached last is asked first.
fn attach(blob: &CachedBlob, sources: &[Arc<dyn BlobSource>]) {
    sources.iter().rev().for_each(|source| blob.attach(source.clone()));
}

/// Finds out again and again whether the registries of images in use are reached in another way by
/// now, for as long as the node serves.
pub(super) async fn keep_current(node: Weak<Node>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(node) = node.upgrade() else { return };
        let images = node.served_images().await;
        // Files are read.
        let refreshed = tokio::task::spawn_blocking(move || {
            images.iter().for_each(|image| image.refresh());
        });
        refreshed
            .await
            .unwrap_or_else(|error| tracing::error!(%error, "registries stay as they were"));
    }
}
