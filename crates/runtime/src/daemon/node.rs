//! The state of one root directory.

use std::{
    fs::{self, DirBuilder},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use lazuli_policy::Verified;
use lazuli_sys::path_error::At as _;

use super::{
    DaemonError, Settings,
    admission::Admission,
    background::{prefetch_jobs::PrefetchJobs, remember::Remembering},
    drivers::{Drivers, Fanotify},
    filesystems::mounted::{self, Filesystems},
    layer_store::state::LayerStore,
    lifecycle::Lifecycle,
    mounts::table::MountTable,
    ordinary::{bundle::BUNDLE_DIRECTORY, state::Ordinaries},
    record::Records,
    served::{image::ServedImage, images::ServedImages, route::ImageRoute},
    status::parts::StatusParts,
};
use crate::{
    cache::{self, Cache},
    image::{self, StoredImage},
    keeper::Link,
    prefetch::Prefetcher,
};

/// Everything of one root directory.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) root: PathBuf,
    /// The kernel's boot id.
    pub(super) boot: String,
    pub(super) admission: Admission,
    pub(super) ordinaries: Ordinaries,
    pub(super) layer_store: LayerStore,
    pub(super) cache: Arc<Cache>,
    pub(super) drivers: Drivers,
    pub(super) images: ServedImages,
    pub(super) mounts: MountTable,
    pub(super) filesystems: Arc<Filesystems>,
    pub(super) prefetcher: Arc<Prefetcher>,
    pub(super) prefetches: PrefetchJobs,
    pub(super) remembering: Remembering,
    pub(super) lifecycle: Lifecycle,
    pub(super) status: StatusParts,
}

impl Node {
    /// Opens the state in `root`.
    pub(super) fn open(
        root: &Path,
        settings: &Settings,
        link: Arc<Link>,
        fanotify: Fanotify,
    ) -> Result<Self, DaemonError> {
        for part in ["cache", "images"] {
            let path = root.join(part);
            let created = DirBuilder::new().recursive(true).mode(0o700).create(&path);
            created.at(&path)?;
        }
        image::sweep(&root.join("images"));
        let [mounts, filesystems] = ["mounts", "filesystems"].map(|name| root.join(name));
        let records = Records::open(mounts.clone()).at(&mounts)?;
        let alive = Records::open(filesystems.clone()).at(&filesystems)?;
        let indexes = root.join("indexes");
        let boot = Path::new("/proc/sys/kernel/random/boot_id");
        let boot = fs::read_to_string(boot).at(boot)?.trim_end().to_owned();
        let defaults = cache::Settings::default();
        let cache_settings = cache::Settings {
            amplify: settings.amplify.unwrap_or(defaults.amplify),
            deadline: settings.deadline.unwrap_or(defaults.deadline),
            max_bytes: settings.max_bytes,
            keep_free: settings.keep_free,
            metadata: vec![root.join("images"), indexes.clone()],
            ..defaults
        };
        let directory = root.join("cache");
        let cache = Cache::open(&directory, cache_settings)?;
        let admission = Admission::open(root, settings)?;
        let ordinaries = Ordinaries::open(
            indexes.clone(),
            &root.join(BUNDLE_DIRECTORY),
            settings.index.clone(),
            admission.gate.clone(),
            settings.registry.clone(),
            cache.clone(),
        );
        let ordinaries = ordinaries.at(&indexes)?;
        let layers = root.join("layers");
        let layer_store = LayerStore::open(layers.clone(), settings.layers.clone()).at(&layers)?;
        let prefetcher = Prefetcher::new(settings.prefetch.clone(), root, cache.clone());
        let drivers = Drivers::new(directory, link, fanotify, settings.direct_io);
        let filesystems = Filesystems::new(alive, drivers.probe.direct_reads.is_ok());
        tokio::spawn(mounted::sweep_while_used(Arc::downgrade(&filesystems)));
        let registry = settings.registry.clone();
        tokio::task::spawn_blocking(move || registry.warm_up());
        Ok(Node {
            root: root.to_owned(),
            boot,
            admission,
            ordinaries,
            layer_store,
            cache,
            drivers,
            images: ServedImages::default(),
            mounts: MountTable::new(records),
            filesystems,
            prefetcher,
            prefetches: PrefetchJobs::default(),
            remembering: Remembering::default(),
            lifecycle: Lifecycle::default(),
            status: StatusParts::new(),
        })
    }

    /// The served form of an image, which takes that it may run.
    pub(super) async fn serve(
        &self,
        stored: StoredImage,
        verified: &Verified,
        route: ImageRoute,
    ) -> Result<Arc<ServedImage>, DaemonError> {
        self.images.serve(stored, verified, route, &self.cache).await
    }
}
