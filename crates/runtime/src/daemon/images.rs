//! Images of the node for other parts of the worker than the control socket: mounted, and
//! remembered.

use std::{
    collections::HashMap,
    fmt,
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use lazuli_image::Digest;
use lazuli_registry::{ImageName, Login, Manifest};

use super::{
    DaemonError,
    api::{MirrorStatus, MountRequest, SnapshotStatus, SnapshotsStatus},
    node::Node,
};
use crate::{
    cache::Cache,
    image::{self, StoredImage},
};

/// How long to wait for somebody else's work on a mount point before looking again.
const OTHERS: Duration = Duration::from_millis(10);

/// Questions to a registry at the same time.
const PARALLEL: usize = 8;

/// Who had images mounted here and says what for, see [`Images::explained_by`]. Blocks while it
/// reads.
pub type Explain = dyn Fn() -> (SnapshotsStatus, HashMap<PathBuf, SnapshotStatus>) + Send + Sync;

/// What the mirror did so far.
pub type MirrorActivity = dyn Fn() -> MirrorStatus + Send + Sync;

/// Other parts of the worker that `status` asks, once they are there.
#[derive(Default)]
pub(super) struct Explanation {
    snapshots: OnceLock<Arc<Explain>>,
    mirror: OnceLock<Arc<MirrorActivity>>,
}

impl fmt::Debug for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Explanation").finish_non_exhaustive()
    }
}

impl Explanation {
    /// What is kept for containerd, and what is mounted for it.
    pub(super) async fn read(&self) -> (Option<SnapshotsStatus>, HashMap<PathBuf, SnapshotStatus>) {
        let Some(explain) = self.snapshots.get().cloned() else { return Default::default() };
        match tokio::task::spawn_blocking(move || explain()).await {
            Ok((snapshots, mounts)) => (Some(snapshots), mounts),
            Err(error) => {
                tracing::error!(%error, "what is mounted for containerd cannot be told");
                Default::default()
            }
        }
    }

    /// What the mirror did, if there is one.
    pub(super) fn mirror(&self) -> Option<MirrorStatus> {
        self.mirror.get().map(|activity| activity())
    }
}

/// The images of the worker in this process.
#[derive(Clone, Debug)]
pub struct Images(pub(super) Arc<Node>);

impl Images {
    /// Has `status` say what mounts are for. The first who calls this is asked.
    pub fn explained_by(&self, explain: Arc<Explain>) {
        let _ = self.0.explanation.snapshots.set(explain);
    }

    /// Has `status` show what the mirror does.
    pub fn mirrored_by(&self, activity: Arc<MirrorActivity>) {
        let _ = self.0.explanation.mirror.set(activity);
    }

    /// Finds out whether the image is lazy and all of its data can be reached. `login` is what the
    /// image came with, if anything.
    pub async fn check(
        &self,
        request: &MountRequest,
        login: Option<&Login>,
    ) -> Result<(), DaemonError> {
        let name: ImageName = request.image.parse()?;
        // Only as long as this takes: it may be wrong.
        let _login = login.map(|login| self.0.logins.lend(&name, login.clone()));
        let repository = lazuli_registry::open(&name, &self.0.options(request))?;
        // It will be mounted if all is well.
        let opening = repository.request_policy().preconnect();
        // Whoever may not read the image is told so by its first blob.
        let known = self.0.recent.get(&name).filter(|manifest| !data_of(manifest).is_empty());
        let manifest = match known {
            Some(manifest) => manifest,
            None => Arc::new(repository.manifest(None).await?),
        };
        opening.done().await;
        stream::iter(data_of(&manifest))
            .map(|blob| {
                let repository = repository.clone();
                async move {
                    if repository.has_blob(&blob).await? {
                        return Ok(());
                    }
                    Err(DaemonError::NoBlob { image: repository.describe(), blob })
                }
            })
            .buffer_unordered(PARALLEL)
            .try_collect()
            .await
    }

    /// Mounts an image, unless its mount point has a mount of this daemon; whether it may run is
    /// asked in any case. `login` replaces what the mount had before; it is kept until
    /// [`Images::unmount`], also while nothing is mounted.
    pub async fn mount(
        &self,
        request: MountRequest,
        login: Option<&Login>,
    ) -> Result<(), DaemonError> {
        let Ok(_working) = self.0.working.clone().try_read_owned() else {
            return Err(DaemonError::Stopping);
        };
        if let Some(login) = login {
            let path = self.0.root.join("logins");
            let kept = self.0.logins.set(&request, login.clone()).await;
            kept.map_err(|source| DaemonError::Io { path, source })?;
        }
        loop {
            if self.0.serves_at(&request.mountpoint).await {
                return self.0.admit_pinned(&request).await.map(drop);
            }
            match self.0.mount(request.clone(), std::future::pending()).await {
                Err(DaemonError::Taken { .. }) => tokio::time::sleep(OTHERS).await,
                other => return other.map(drop),
            }
        }
    }

    /// Takes a mount away, if there is one; also one that is in use, whose users are served until
    /// they are done.
    pub async fn unmount(&self, mountpoint: &Path) -> Result<(), DaemonError> {
        let Ok(_working) = self.0.working.clone().try_read_owned() else {
            return Err(DaemonError::Stopping);
        };
        let unmounted = loop {
            match self.0.umount(mountpoint, true).await {
                Err(DaemonError::Taken { .. }) => tokio::time::sleep(OTHERS).await,
                Err(DaemonError::NotMounted { .. }) => break Ok(()),
                other => break other,
            }
        };
        if unmounted.is_ok() {
            self.0.logins.remove(mountpoint);
        }
        unmounted
    }

    /// Returns when another worker is about to take over, and nothing new should be begun.
    pub async fn leaving(&self) {
        let _ = self.0.leaving.subscribe().wait_for(|leaving| *leaving).await;
    }
}

/// The blobs that hold an image's data.
fn data_of(manifest: &Manifest) -> Vec<Digest> {
    let data = manifest.parsed.lazy_base().map_or(&[][..], |(data, _)| data);
    // The index of a layer is as little use without the layer as the other way round.
    data.iter().flat_map(|layer| layer.index_of().into_iter().chain([layer.digest])).collect()
}

/// Largest bootstrap of an image that is looked at without being mounted: some 200,000 chunks,
/// which take four times as much memory for as long as that takes.
const REMEMBERED: u64 = 16 << 20;

/// How long the first mount waits for it: about a round trip.
const LOOK_WITHIN: Duration = Duration::from_millis(50);

/// Whether images that are not mounted have been looked at.
#[derive(Debug, Default)]
pub(super) struct Remembering(AtomicBool);

impl Node {
    /// Finds out what the cache has of images that are not mounted, once, when the first image is
    /// mounted that may have the same chunks. It goes on in the background when the mount waits no
    /// longer.
    pub(super) fn remember_images(&self) -> impl Future<Output = ()> + use<> {
        let is_first = !self.remembering.0.swap(true, Ordering::Relaxed);
        let (images, cache) = (self.root.join("images"), self.cache.clone());
        let looking =
            is_first.then(|| tokio::task::spawn_blocking(move || remember(&images, &cache)));
        async move {
            if let Some(looking) = looking {
                let _ = tokio::time::timeout(LOOK_WITHIN, looking).await;
            }
        }
    }
}

fn remember(images: &Path, cache: &Cache) {
    for path in image::directories(images).unwrap_or_default() {
        let bootstrap = std::fs::metadata(image::bootstrap_path(&path));
        if bootstrap.is_ok_and(|bootstrap| bootstrap.len() > REMEMBERED) {
            continue;
        }
        // What is damaged is fetched again when somebody mounts it, and told then.
        let Ok(image) = StoredImage::open(&path) else { continue };
        for blob in image.bootstrap.blobs() {
            if let Err(error) = cache.remember(blob) {
                tracing::debug!(%error, "not remembered");
            }
        }
    }
}
