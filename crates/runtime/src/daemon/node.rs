//! The state of one root directory.

use std::{
    fs::{self, DirBuilder},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Instant, SystemTime},
};

use lazuli_policy::{Gate, Verified};
use lazuli_registry::Options;
use tokio::sync::{OnceCell, RwLock, watch};

use super::{
    DaemonError, Settings,
    api::MountRequest,
    expected::Expected,
    fetch_locks::FetchLocks,
    filesystems::{self, Filesystems},
    latest_failures::LatestFailures,
    logins::Logins,
    mount_table::MountTable,
    occupied::Counted,
    ordinary::state::Ordinaries,
    pins::Pins,
    prefetch_jobs::PrefetchJobs,
    recent::Recent,
    record::Records,
    remember::Remembering,
    route::ImageRoute,
    served_image::ServedImage,
    served_images::ServedImages,
    status_parts::Explanation,
};
use crate::{
    cache::{self, Cache},
    image::{self, StoredImage},
    keeper::Link,
    kernel::{Probe, fanotify, loop_devices},
    path_error::At as _,
    prefetch::Prefetcher,
};

/// Whether to try the fanotify driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fanotify {
    /// A worker before this one uses it.
    Proven,
    /// Nothing is known.
    Untried,
}

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
    pub(super) counted: Counted,
    pub(super) remembering: Remembering,
    pub(super) cache: Arc<Cache>,
    pub(super) probe: Probe,
    pub(super) link: Arc<Link>,
    pub(super) fanotify: Option<Arc<fanotify::Session>>,
    /// See [`Node::loops`].
    pub(super) loops: OnceCell<Result<Arc<loop_devices::Session>, String>>,
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
    /// Other parts of the worker that `status` asks.
    pub(super) explanation: Explanation,
    pub(super) latest_failures: Arc<LatestFailures>,
    pub(super) started: Instant,
    /// The same by the calendar.
    pub(super) started_at: SystemTime,
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
        let mut probe = match fanotify {
            Fanotify::Proven => Probe::of_successor(),
            Fanotify::Untried => Probe::run(&directory),
        };
        match settings.direct_io {
            Some(true) => probe.direct_reads = Ok(()),
            Some(false) => {
                probe.direct_reads = Err("the configuration forbids direct reads".into())
            }
            None => {}
        }
        let filesystems = Filesystems::new(alive, probe.direct_reads.is_ok());
        tokio::spawn(filesystems::sweep_while_used(Arc::downgrade(&filesystems)));
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
            counted: Counted::default(),
            remembering: Remembering::default(),
            cache,
            probe,
            link,
            fanotify: None,
            loops: OnceCell::new(),
            images: ServedImages::default(),
            mounts: MountTable::new(records),
            filesystems,
            prefetcher,
            prefetches: PrefetchJobs::default(),
            boot,
            leaving: watch::Sender::new(false),
            working: Arc::default(),
            explanation: Explanation::default(),
            latest_failures: Arc::default(),
            started: Instant::now(),
            started_at: SystemTime::now(),
        })
    }

    /// Starts a fanotify session, if this machine supports it. No event is answered before
    /// [`Node::answer`]: missing chunks show which pages the kernel may have read from holes, so no
    /// chunk may arrive before these pages are gone.
    pub(super) fn start_fanotify(&mut self) {
        if self.probe.fanotify.is_err() {
            return;
        }
        match fanotify::Session::start(&self.link) {
            Ok(session) => self.fanotify = Some(session),
            Err(error) => self.probe.fanotify = Err(error.to_string()),
        }
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
