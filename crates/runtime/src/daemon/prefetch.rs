//! Fetching whole images on request.
//!
//! A client asks again and again how far it is, so that nothing is lost when a worker dies: the next one begins
//! where it was.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lazuli_registry::{ImageName, Platform};
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;

use super::{DaemonError, api::MountRequest, node::Node, served::ServedImage, way::Way};
use crate::image::StoredImage;

/// Pauses after which an image of the configuration is tried again; the registry may come up after the node.
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

/// The prefetches that go on, and those that ended and were not asked about since.
#[derive(Debug, Default)]
pub(super) struct Prefetches(Mutex<HashMap<PrefetchRequest, Job>>);

#[derive(Debug)]
struct Job {
    task: JoinHandle<Result<(), DaemonError>>,
    image: Arc<Mutex<Option<Arc<ServedImage>>>>,
}

impl Prefetches {
    fn lock(&self) -> MutexGuard<'_, HashMap<PrefetchRequest, Job>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Node {
    /// Begins to fetch an image, unless that is under way, and says how far it is. An end is reported once.
    pub(super) async fn prefetch(
        self: &Arc<Self>,
        request: PrefetchRequest,
    ) -> Result<PrefetchStatus, DaemonError> {
        let ended = {
            let mut jobs = self.prefetches.lock();
            let job = jobs.entry(request.clone()).or_insert_with(|| self.begin(request.clone()));
            let image = job.image.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let (bytes_here, bytes_total) = image.map(|image| image.filled()).unwrap_or_default();
            if !job.task.is_finished() {
                return Ok(PrefetchStatus { bytes_here, bytes_total, done: false });
            }
            let status = PrefetchStatus { bytes_here, bytes_total, done: true };
            jobs.remove(&request).map(|job| (job.task, status))
        };
        let Some((task, status)) = ended else { return Ok(PrefetchStatus::default()) };
        match task.await {
            Ok(result) => result.map(|()| status),
            Err(error) => Err(DaemonError::Io {
                path: PathBuf::from(request.image),
                source: std::io::Error::other(error),
            }),
        }
    }

    /// Fetches an image of the configuration, sooner or later.
    pub(super) fn preload(self: &Arc<Self>, image: String) {
        let node = self.clone();
        tokio::spawn(async move {
            let request = PrefetchRequest { image, platform: None, plain_http: false };
            let mut pauses = PAUSES.into_iter();
            let mut pause = PAUSES[0];
            while let Err(error) = node.fetch_whole(&request, &Arc::default()).await {
                pause = pauses.next().unwrap_or(pause);
                let error = error.for_people();
                tracing::warn!(image = request.image, error, ?pause, "cannot preload");
                tokio::time::sleep(pause).await;
            }
            tracing::info!(image = request.image, "preloaded");
        });
    }

    fn begin(self: &Arc<Self>, request: PrefetchRequest) -> Job {
        let (node, image) = (self.clone(), Arc::default());
        let shown = Arc::clone(&image);
        let task = tokio::spawn(async move { node.fetch_whole(&request, &shown).await });
        Job { task, image }
    }

    async fn fetch_whole(
        &self,
        request: &PrefetchRequest,
        shown: &Mutex<Option<Arc<ServedImage>>>,
    ) -> Result<(), DaemonError> {
        let PrefetchRequest { image, platform, plain_http } = request.clone();
        let name: ImageName = image.parse()?;
        let wanted: Option<Platform> = platform.as_deref().map(str::parse).transpose()?;
        let request = MountRequest {
            image,
            mountpoint: PathBuf::new(),
            driver: super::DriverChoice::Auto,
            platform,
            plain_http,
            base: false,
        };
        let way = Way::to(&name, &self.options(&request));
        let repository = way.open()?;
        let images = self.root.join("images");
        let (stored, _) = StoredImage::pull(&repository, wanted.as_ref(), &images).await?;
        let served = self.serve(stored, way).await?;
        *shown.lock().unwrap_or_else(PoisonError::into_inner) = Some(served.clone());
        let fetched = crate::prefetch::fast(&self.prefetcher, &served.prefetched().blobs).await;
        fetched.map_err(|source| DaemonError::Prefetch { image: request.image, source })
    }
}
