//! Fetching whole images on request.
//!
//! A client asks again and again how far it is, so that nothing is lost when a worker dies: the
//! next one begins where it was.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use lazuli_registry::{ImageName, Platform, lazy_manifest};
use serde::{Deserialize, Serialize};

use super::{
    DaemonError, api::MountRequest, node::Node, route::ImageRoute, served_image::ServedImage,
};
use crate::image::{self, StoredImage};

/// Pauses after which an image of the configuration is tried again; the registry may come up after
/// the node.
const PAUSES: [Duration; 4] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(30),
    Duration::from_secs(300),
];

/// Which image to fetch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefetchRequest {
    /// A registry reference or `oci:DIR[:TAG]` with an absolute directory.
    pub image: String,
    /// `os/arch[/variant]`; this machine's when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<String>,
    /// Talk HTTP to the registry.
    #[serde(default)]
    pub plain_http: bool,
}

/// How far it is.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct PrefetchStatus {
    /// Bytes of chunks that are here, as stored.
    pub bytes_here: u64,
    /// Bytes of all chunks, as stored; 0 until the image's metadata is here.
    pub bytes_total: u64,
    /// Whether everything is here and on the disk.
    pub done: bool,
}

/// How long the end of a prefetch is kept for whoever asks first. Who asks after that wants another
/// one.
const NEWS: Duration = Duration::from_secs(10);

/// The prefetches that go on, and those that ended a moment ago.
#[derive(Debug, Default)]
pub(super) struct Prefetches(Mutex<HashMap<PrefetchRequest, Arc<Job>>>);

#[derive(Debug, Default)]
struct Job(Mutex<Progress>);

#[derive(Debug, Default)]
struct Progress {
    /// What is fetched, as soon as that is known and until it ends.
    image: Option<Arc<ServedImage>>,
    ended: Option<(Instant, Result<PrefetchStatus, Arc<DaemonError>>)>,
}

impl Job {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_old(&self) -> bool {
        self.lock().ended.as_ref().is_some_and(|(ended, _)| ended.elapsed() > NEWS)
    }
}

impl Node {
    /// Begins to fetch an image, unless that is under way, and says how far it is.
    pub(super) fn prefetch(
        self: &Arc<Self>,
        request: PrefetchRequest,
    ) -> Result<PrefetchStatus, DaemonError> {
        let mut jobs = self.prefetches.0.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.retain(|_, job| !job.is_old());
        let new = || self.begin(request.clone());
        let job = jobs.entry(request.clone()).or_insert_with(new).clone();
        let progress = job.lock();
        if progress.ended.is_some() {
            jobs.remove(&request);
        }
        match &progress.ended {
            Some((_, Ok(status))) => Ok(*status),
            Some((_, Err(error))) => Err(DaemonError::Shared(error.clone())),
            None => Ok(progress.image.as_ref().map(status).unwrap_or_default()),
        }
    }

    /// Fetches an image of the configuration, sooner or later.
    pub(super) fn preload(self: &Arc<Self>, image: String) {
        let node = self.clone();
        tokio::spawn(async move {
            let request = PrefetchRequest { image, platform: None, plain_http: false };
            let mut pauses = PAUSES.into_iter();
            let mut pause = PAUSES[0];
            loop {
                let fetched = node.fetch_whole(&request, &Job::default()).await;
                let Err(error) = fetched else { break };
                pause = pauses.next().unwrap_or(pause);
                let error = error.for_people();
                tracing::warn!(image = request.image, error, ?pause, "cannot preload");
                tokio::time::sleep(pause).await;
            }
            tracing::info!(image = request.image, "preloaded");
        });
    }

    fn begin(self: &Arc<Self>, request: PrefetchRequest) -> Arc<Job> {
        let (node, job) = (self.clone(), Arc::<Job>::default());
        let shown = job.clone();
        tokio::spawn(async move {
            let fetched = node.fetch_whole(&request, &shown).await;
            let mut progress = shown.lock();
            let image = progress.image.take();
            let ended = fetched.map(|()| {
                let status = image.as_ref().map(status).unwrap_or_default();
                PrefetchStatus { done: true, ..status }
            });
            match &ended {
                Ok(_) => tracing::info!(image = request.image, "is here"),
                Err(error) => {
                    let error = error.for_people();
                    tracing::warn!(image = request.image, error, "cannot prefetch");
                }
            }
            progress.ended = Some((Instant::now(), ended.map_err(Arc::new)));
        });
        job
    }

    async fn fetch_whole(&self, request: &PrefetchRequest, job: &Job) -> Result<(), DaemonError> {
        let PrefetchRequest { image, platform, plain_http } = request.clone();
        let name: ImageName = image.parse()?;
        let wanted: Option<Platform> = platform.as_deref().map(str::parse).transpose()?;
        let wanted = wanted.map(|platform| platform.with_lazy(true));
        let request = MountRequest {
            image,
            asked: None,
            mountpoint: PathBuf::new(),
            driver: super::DriverChoice::Auto,
            platform,
            plain_http,
            base: false,
            nosuid: true,
        };
        let options = self.options(&request);
        let way = ImageRoute::to(&name, &options);
        let repository = way.open()?;
        let images = self.root.join("images");
        let may_replace = self.may_replace(&name, &options);
        let indexes = options.indexes;
        let manifest = lazy_manifest(&*repository, &name, wanted.as_ref(), may_replace, indexes);
        let manifest = manifest.await?;
        let _pin = self.pins.pin(&images, manifest.digest);
        let admission = self.admit(&request, &manifest);
        let fetch = StoredImage::fetch_admitted(&repository, &manifest, &images, admission);
        let (stored, _, verified) = fetch.await?;
        stored.must_be_whole_unless(request.base, repository.describe())?;
        let directory = stored.directory.clone();
        let served = self.serve(stored, &verified, way).await?;
        job.lock().image = Some(served.clone());
        let fetched = crate::prefetch::fast(&self.prefetcher, &served.prefetched().blobs).await;
        fetched.map_err(|source| DaemonError::Prefetch { image: request.image, source })?;
        let synced = tokio::task::spawn_blocking(move || image::sync(&directory)).await;
        Ok(synced.unwrap_or(Ok(()))?)
    }
}

fn status(image: &Arc<ServedImage>) -> PrefetchStatus {
    let (bytes_here, bytes_total) = image.filled();
    PrefetchStatus { bytes_here, bytes_total, done: false }
}
