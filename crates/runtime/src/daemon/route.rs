//! Routes to the blobs of images in use.
//!
//! What containerd was told about registries may change while containers run: a certificate is
//! renewed, a mirror comes or goes. So it is looked at every few seconds, and images take other
//! routes without being mounted anew.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock},
};

use lazuli_image::Blob;
use lazuli_registry::{ImageName, Options, Pull, Repository, Route};

use super::DaemonError;
use crate::{
    cache::{Cache, CachedBlob},
    source::{BlobSource, RepositorySource},
    sync::lock,
};

/// A name of an image, and how the registry in it is reached.
#[derive(Debug)]
pub(super) struct ImageRoute {
    name: ImageName,
    options: Options,
    route: Route,
    repository: OnceLock<Arc<dyn Repository>>,
}

impl ImageRoute {
    /// The route at this moment.
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

/// Every place that holds the image, in the order in which they are to be asked.
fn places(repository: &Arc<dyn Repository>) -> Vec<Arc<dyn Pull>> {
    let places = repository.clone().places();
    // The repository's own error then says that no server may be asked.
    if places.is_empty() { vec![repository.clone()] } else { places }
}

/// The routes to one image.
#[derive(Debug)]
pub(super) struct ImageRoutes(Mutex<Known>);

#[derive(Debug)]
struct Known {
    by_name: HashMap<String, KnownRoute>,
    newest: Arc<dyn Repository>,
}

/// A route, and the sources that it has brought to each of the image's blobs.
#[derive(Debug)]
struct KnownRoute {
    route: ImageRoute,
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
    /// Opens `blobs` in the cache, with the first route to them.
    pub(super) fn begin(
        route: ImageRoute,
        blobs: &[Blob],
        cache: &Cache,
    ) -> Result<(Self, Vec<Arc<CachedBlob>>), DaemonError> {
        let newest = route.open()?;
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
        let by_name =
            HashMap::from([(route.name.to_string(), KnownRoute { route, sources: brought })]);
        Ok((ImageRoutes(Mutex::new(Known { by_name, newest })), cached))
    }

    /// The image, by the route that was added last.
    pub(super) fn newest(&self) -> Arc<dyn Repository> {
        self.lock().newest.clone()
    }

    /// Adds a route to `blobs`, which are open as `cached`, or replaces the one that was known under
    /// that name.
    pub(super) fn add(
        &self,
        route: ImageRoute,
        blobs: &[Blob],
        cached: &[Arc<CachedBlob>],
    ) -> Result<(), DaemonError> {
        let mut known = self.lock();
        let name = route.name.to_string();
        if known.by_name.get(&name).is_some_and(|known| known.route.route == route.route) {
            return Ok(());
        }
        let repository = route.open()?;
        let places = places(&repository);
        let mut brought = Vec::new();
        for (blob, cached) in blobs.iter().zip(cached) {
            let sources = sources(blob, &places);
            attach(cached, &sources);
            brought.push(sources);
        }
        known.newest = repository;
        if let Some(before) = known.by_name.insert(name, KnownRoute { route, sources: brought }) {
            for (cached, sources) in cached.iter().zip(&before.sources) {
                sources.iter().for_each(|source| cached.detach(source));
            }
        }
        Ok(())
    }

    /// Replaces routes that have changed. Reads files.
    pub(super) fn refresh(&self, blobs: &[Blob], cached: &[Arc<CachedBlob>]) {
        let now: Vec<_> = {
            let known = self.lock();
            known
                .by_name
                .values()
                .map(|known| ImageRoute::to(&known.route.name, &known.route.options))
                .collect()
        };
        for route in now {
            if let Err(error) = self.add(route, blobs, cached) {
                tracing::warn!(error = error.for_people(), "an image is fetched as before");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        lock(&self.0)
    }
}

/// What is attached last is asked first.
fn attach(blob: &CachedBlob, sources: &[Arc<dyn BlobSource>]) {
    sources.iter().rev().for_each(|source| blob.attach(source.clone()));
}
