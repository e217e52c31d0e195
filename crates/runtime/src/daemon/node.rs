//! The state of one root directory.

use std::{
    fs::{self, DirBuilder},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use lazuli_policy::{Gate, Verified};
use lazuli_registry::Options;
use tokio::sync::{RwLock, watch};

use super::{
    DaemonError, Settings,
    admission::{
        expected::Expected, fetch_locks::FetchLocks, logins::Logins, pins::Pins, recent::Recent,
    },
    api::MountRequest,
    background::{prefetch_jobs::PrefetchJobs, remember::Remembering},
    drivers::{Drivers, Fanotify},
    filesystems::erofs::{self, Filesystems},
    mounts::table::MountTable,
    ordinary::state::Ordinaries,
    record::Records,
    served::{image::ServedImage, images::ServedImages, route::ImageRoute},
    status::parts::StatusParts,
};
use crate::{
    cache::{self, Cache},
    image::{self, StoredImage},
    keeper::Link,
    path_error::At as _,
    prefetch::Prefetcher,
};

/// Everything of one root directory.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) root: PathBuf,
    pub(super) registry: Options,
    pub(super) gate: Arc<Gate>,
    pub(super) fetch_locks: FetchLocks,
    pub(super) logins: Logins,
    pub(super) recent: Recent,
    pub(super) expected: Expected,
    pub(super) ordinaries: Ordinaries,
    pub(super) pins: Arc<Pins>,
    pub(super) remembering: Remembering,
    pub(super) cache: Arc<Cache>,
    pub(super) drivers: Drivers,
    pub(super) images: ServedImages,
    pub(super) mounts: MountTable,
    pub(super) filesystems: Arc<Filesystems>,
    pub(super) prefetcher: Arc<Prefetcher>,
    pub(super) prefetches: PrefetchJobs,
    /// The kernel's boot id.
    pub(super) boot: String,
    /// Whether another worker is about to take over.
    pub(super) leaving: watch::Sender<bool>,
    /// Read-locked while a request is carried out.
    pub(super) working: Arc<RwLock<()>>,
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
        let logins = root.join("logins");
        let logins = Logins::open(&logins, &settings.registry.keyring).at(&logins)?;
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
        let gate = Arc::new(Gate::new(settings.policy.clone(), Some(root.join("verdicts"))));
        let (index, registry) = (settings.index.clone(), settings.registry.clone());
        let ordinaries =
            Ordinaries::open(indexes.clone(), index, gate.clone(), registry, cache.clone());
        let ordinaries = ordinaries.at(&indexes)?;
        let prefetcher = Prefetcher::new(settings.prefetch.clone(), root, cache.clone());
        let drivers = Drivers::new(directory, link, fanotify, settings.direct_io);
        let filesystems = Filesystems::new(alive, drivers.probe.direct_reads.is_ok());
        tokio::spawn(erofs::sweep_while_used(Arc::downgrade(&filesystems)));
        let registry = settings.registry.clone();
        tokio::task::spawn_blocking(move || registry.warm_up());
        Ok(Node {
            root: root.to_owned(),
            registry: settings.registry.clone(),
            gate,
            fetch_locks: FetchLocks::default(),
            logins,
            recent: Recent::default(),
            expected: Expected::default(),
            ordinaries,
            pins: Arc::default(),
            remembering: Remembering::default(),
            cache,
            drivers,
            images: ServedImages::default(),
            mounts: MountTable::new(records),
            filesystems,
            prefetcher,
            prefetches: PrefetchJobs::default(),
            boot,
            leaving: watch::Sender::new(false),
            working: Arc::default(),
            status: StatusParts::new(),
        })
    }

    /// How the registry of an image is reached.
    pub(super) fn options(&self, request: &MountRequest) -> Options {
        Options { plain_http: request.plain_http, ..self.registry.clone() }
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
