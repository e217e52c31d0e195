//! Fetches whole images on request.
//!
//! A client asks again and again how far it is, so that nothing is lost when a worker dies: the
//! next one begins where it was.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lazuli_registry::{ImageName, Platform};

use super::prefetch_jobs::{Job, status};
use crate::{
    daemon::{
        DaemonError,
        api::{MountRequest, PrefetchRequest, PrefetchStatus},
        node::Node,
        served::route::ImageRoute,
    },
    image::{self, StoredImage},
};

/// Pauses between attempts to fetch a configured image; the registry may start after the node.
const PAUSES: [Duration; 4] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(30),
    Duration::from_secs(300),
];

impl Node {
    /// Starts to fetch an image, unless that is in progress, and returns the progress.
    pub(in crate::daemon) fn prefetch(
        self: &Arc<Self>,
        request: PrefetchRequest,
    ) -> Result<PrefetchStatus, DaemonError> {
        self.prefetches.progress(&request, || self.begin(request.clone()))
    }

    /// Fetches an image of the configuration, sooner or later.
    pub(in crate::daemon) fn preload(self: &Arc<Self>, image: String) {
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
                let status = image.as_deref().map(status).unwrap_or_default();
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
        let wanted = wanted.map(Platform::lazy);
        let request = MountRequest { platform, plain_http, ..MountRequest::of(image) };
        let options = self.admission.options(&request);
        let route = ImageRoute::to(&name, &options);
        let repository = route.open()?;
        let images = self.root.join("images");
        let resolved = self
            .admission
            .resolve(&request, &name, &*repository, wanted.as_ref(), &options, &self.ordinaries)
            .await?;
        let manifest = &resolved.manifest;
        let seekable = options.indexes.seekable_layers(&name);
        let mut by_layers = self.by_layers(&request, &name, manifest).await?;
        let has_metadata = StoredImage::has_metadata(&manifest.parsed, seekable);
        if by_layers.is_none() && !has_metadata && self.may_index() {
            let show = |pull| job.lock().pull = pull;
            self.pull_layers(&request, &name, manifest, show).await?;
            by_layers = self.by_layers(&request, &name, manifest).await?;
        }
        let (stored, verified, _pin) = match by_layers {
            Some((stored, verified, _, pin)) => (stored, verified, pin),
            None => {
                let pin = self.admission.pins.pin(&images, manifest.digest);
                let admission = self.admission.admit_resolved(&request, &resolved);
                let repository = repository.clone();
                let fetch =
                    StoredImage::fetch_admitted(repository, manifest, &images, seekable, admission);
                let (stored, _, verified) = fetch.await?;
                (stored, verified, pin)
            }
        };
        stored.must_be_whole(repository.describe())?;
        let directory = stored.directory.clone();
        let served = self.serve(stored, &verified, route).await?;
        self.refuse_wrong_files(&served)?;
        job.lock().image = Some(served.clone());
        let fetched = crate::prefetch::fast(&self.prefetcher, &served.weak_blobs()).await;
        fetched.map_err(|source| DaemonError::Prefetch { image: request.image, source })?;
        let synced = tokio::task::spawn_blocking(move || image::sync(&directory)).await;
        Ok(synced.unwrap_or(Ok(()))?)
    }
}
