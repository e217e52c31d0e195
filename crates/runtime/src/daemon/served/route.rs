//! Routes to the blobs of images in use.
//!
//! containerd's registry configuration may change while containers run: a certificate is renewed, a
//! mirror is added or removed. The daemon checks it every few seconds, and images change routes
//! without being mounted again. While a file is invalid, perhaps half written, they keep the last
//! good route.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock},
};

use lazuli_image::Blob;
use lazuli_registry::{ImageName, Options, Pull, RegistryError, Repository, Route};

use crate::{
    cache::{Cache, CachedBlob},
    daemon::DaemonError,
    source::{BlobSource, NoRoute, RepositorySource},
    sync::lock,
};

/// A name of an image, and how the registry in it is reached.
#[derive(Debug)]
pub(in crate::daemon) struct ImageRoute {
    name: ImageName,
    options: Options,
    route: Route,
    repository: OnceLock<Arc<dyn Repository>>,
}

impl ImageRoute {
    /// The route at this moment.
    pub(in crate::daemon) fn to(name: &ImageName, options: &Options) -> Self {
        let route = Route::to(name, options);
        ImageRoute {
            name: name.clone(),
            options: options.clone(),
            route,
            repository: OnceLock::new(),
        }
    }

    /// Returns whether the route leads to a repository, rather than to a stand-in with the reason
    /// why there is none.
    fn is_open(&self) -> bool {
        self.repository.get().is_some()
    }

    /// The repository of the route. Always the same object: the connections that fetched the
    /// metadata then fetch the first data.
    pub(in crate::daemon) fn open(&self) -> Result<Arc<dyn Repository>, RegistryError> {
        if let Some(repository) = self.repository.get() {
            return Ok(repository.clone());
        }
        let repository = self.route.clone().open(&self.name, &self.options)?;
        Ok(self.repository.get_or_init(|| repository).clone())
    }
}

/// The servers that have the image, in the order in which they are to be asked.
fn servers(repository: Arc<dyn Pull>) -> Vec<Arc<dyn Pull>> {
    let servers = repository.clone().places();
    // The repository's own error then reports that no server may be asked.
    if servers.is_empty() { vec![repository] } else { servers }
}

/// The routes to one image.
#[derive(Debug)]
pub(super) struct ImageRoutes(Mutex<HashMap<String, KnownRoute>>);

/// A route in use, and the sources that it has brought to each of the image's blobs.
#[derive(Debug)]
struct KnownRoute {
    route: ImageRoute,
    sources: Vec<Sources>,
    /// The unusable route that was last found in its place.
    refused: Option<Route>,
}

type Sources = Vec<Arc<dyn BlobSource>>;

/// For each of `blobs` one source per server of `repository` that suits it.
fn sources(repository: Arc<dyn Pull>, blobs: &[Blob]) -> Vec<Sources> {
    let servers = servers(repository);
    let of_blob = |blob: &Blob| {
        let source = |server: &Arc<dyn Pull>| {
            let source = RepositorySource::new(server.clone(), blob.id, blob.stored_size);
            Arc::new(source) as Arc<dyn BlobSource>
        };
        let suits = |server: &&Arc<dyn Pull>| server.request_policy().suits_size(blob.stored_size);
        servers.iter().filter(suits).map(source).collect()
    };
    blobs.iter().map(of_blob).collect()
}

/// A stand-in for the sources of each blob of the image `name`.
fn no_sources(name: &ImageName, reason: RegistryError, blobs: &[Blob]) -> Vec<Sources> {
    let stand_in: Arc<dyn BlobSource> = Arc::new(NoRoute::new(name, reason));
    blobs.iter().map(|_| vec![stand_in.clone()]).collect()
}

impl ImageRoutes {
    /// Opens `blobs` in the cache, with the first route to them.
    pub(in crate::daemon) fn begin(
        route: ImageRoute,
        blobs: &[Blob],
        cache: &Cache,
    ) -> Result<(Self, Vec<Arc<CachedBlob>>), DaemonError> {
        let cached =
            blobs.iter().map(|blob| cache.unsourced(blob)).collect::<Result<Vec<_>, _>>()?;
        let routes = ImageRoutes(Mutex::default());
        routes.add(route, blobs, &cached);
        Ok((routes, cached))
    }

    /// Adds a route to `blobs`, which are open as `cached`, or replaces the route of this name. An
    /// unusable route replaces none; if there is no other, as for an image of the previous worker,
    /// reads fail with the reason until there is a usable one.
    pub(in crate::daemon) fn add(
        &self,
        route: ImageRoute,
        blobs: &[Blob],
        cached: &[Arc<CachedBlob>],
    ) {
        let mut routes = self.lock();
        let name = route.name.to_string();
        let mut known = routes.get_mut(&name);
        if let Some(known) = &mut known {
            if known.route.route == route.route {
                known.refused = None;
                // A file that the route names may have become readable.
                if known.route.is_open() {
                    return;
                }
            }
            if known.refused.as_ref() == Some(&route.route) {
                return;
            }
        }
        let sources = match (route.open(), known) {
            (Ok(repository), _) => sources(repository, blobs),
            (Err(error), Some(known)) => {
                if known.route.route != route.route {
                    tracing::warn!(image = name, %error, "the image is fetched as before");
                    known.refused = Some(route.route);
                }
                return;
            }
            (Err(error), None) => {
                tracing::warn!(image = name, %error, "there is no route to the image");
                no_sources(&route.name, error, blobs)
            }
        };
        cached.iter().zip(&sources).for_each(|(cached, sources)| attach(cached, sources));
        let now = KnownRoute { route, sources, refused: None };
        let Some(before) = routes.insert(name, now) else { return };
        for (cached, sources) in cached.iter().zip(&before.sources) {
            sources.iter().for_each(|source| cached.detach(source));
        }
    }

    /// Replaces routes that have changed. Reads files.
    pub(super) fn refresh(&self, blobs: &[Blob], cached: &[Arc<CachedBlob>]) {
        let now: Vec<_> = {
            let routes = self.lock();
            let known = routes.values().map(|known| &known.route);
            known.map(|route| ImageRoute::to(&route.name, &route.options)).collect()
        };
        now.into_iter().for_each(|route| self.add(route, blobs, cached));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, KnownRoute>> {
        lock(&self.0)
    }
}

/// The source attached last is asked first.
fn attach(blob: &CachedBlob, sources: &[Arc<dyn BlobSource>]) {
    sources.iter().rev().for_each(|source| blob.attach(source.clone()));
}
