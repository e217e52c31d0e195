//! What a node serves: images, their mounts, and the requests that change them.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use lazuli_image::Digest;
use lazuli_policy::{Gate, Verified};
use lazuli_registry::{ImageName, IndexTrust, Options, Platform, lazy_manifest};
use tokio::sync::{Mutex, OnceCell, RwLock, watch};

use super::{
    DaemonError, Settings,
    api::{CacheStatus, DaemonStatus, DriverChoice, MountRequest, MountStatus, Mounted, Status},
    expected::Expected,
    fetch_locks::FetchLocks,
    filesystems::{self, Filesystems},
    images::{Explanation, Remembering},
    layers::Recent,
    leftovers::Pins,
    logins::Logins,
    mount_users,
    occupied::Counted,
    prefetch::Prefetches,
    record::{MountRecord, Records, mount_key},
    route::ImageRoute,
    served_image::{Attachment, Counters, ServedImage},
};
use crate::{
    cache::{self, Cache},
    image::{self, Fetched, StoredImage},
    keeper::Link,
    kernel::{
        Probe, blobfs, fanotify,
        mount::{self, Suid},
        mountinfo::{self, MountEntry as KernelMount},
    },
    prefetch::{Known, Prefetcher},
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
    pub(super) pins: Arc<Pins>,
    pub(super) counted: Counted,
    pub(super) remembering: Remembering,
    pub(super) cache: Arc<Cache>,
    pub(super) probe: Probe,
    pub(super) link: Arc<Link>,
    pub(super) fanotify: Option<Arc<fanotify::Session>>,
    /// See [`Node::loops`].
    pub(super) loops: OnceCell<Result<Arc<blobfs::Session>, String>>,
    pub(super) records: Records<MountRecord>,
    images: Mutex<HashMap<Digest, Weak<ServedImage>>>,
    mounts: Mutex<BTreeMap<PathBuf, Slot>>,
    pub(super) filesystems: Arc<Filesystems>,
    pub(super) prefetcher: Arc<Prefetcher>,
    pub(super) prefetches: Prefetches,
    /// Which start of the kernel this is.
    pub(super) boot: String,
    stopping: watch::Sender<bool>,
    /// Whether another worker is about to take over.
    pub(super) leaving: watch::Sender<bool>,
    /// Read while a request is carried out.
    pub(super) working: Arc<RwLock<()>>,
    /// Who says what mounts are for.
    pub(super) explanation: Explanation,
    started: Instant,
}

/// What is known of a mount point. A slot is taken before work on it starts, so that slow work on
/// one mount point never blocks another.
#[derive(Debug)]
enum Slot {
    /// Somebody mounts or unmounts here.
    Busy,
    /// An image is mounted here.
    Mounted(Box<Mount>),
}

#[derive(Debug)]
struct Mount {
    record: MountRecord,
    image: Arc<ServedImage>,
    attachment: Attachment,
    /// The kernel's number of the mount, by which it is known from others at the same place.
    id: u64,
    /// Counters of the image when this mount was made.
    before: Counters,
    /// Metadata that was fetched for this mount.
    metadata: Fetched,
}

impl Node {
    /// Opens what is in `root`. With `probe`, the fanotify driver has proven itself.
    pub(super) fn open(
        root: &Path,
        settings: &Settings,
        link: Arc<Link>,
        proven: bool,
    ) -> Result<Self, DaemonError> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| DaemonError::Io { path, source }
        };
        for part in ["cache", "images"] {
            let path = root.join(part);
            let created = DirBuilder::new().recursive(true).mode(0o700).create(&path);
            created.map_err(io(&path))?;
        }
        image::sweep(&root.join("images"));
        let [mounts, filesystems] = ["mounts", "filesystems"].map(|name| root.join(name));
        let records = Records::open(mounts.clone()).map_err(io(&mounts))?;
        let alive = Records::open(filesystems.clone()).map_err(io(&filesystems))?;
        let logins = root.join("logins");
        let logins = Logins::open(&logins, &settings.registry.keyring).map_err(io(&logins))?;
        let boot = Path::new("/proc/sys/kernel/random/boot_id");
        let boot = fs::read_to_string(boot).map_err(io(boot))?.trim_end().to_owned();
        let defaults = cache::Settings::default();
        let cache_settings = cache::Settings {
            amplify: settings.amplify.unwrap_or(defaults.amplify),
            deadline: settings.deadline.unwrap_or(defaults.deadline),
            max_bytes: settings.max_bytes,
            keep_free: settings.keep_free,
            metadata: Some(root.join("images")),
            ..defaults
        };
        let directory = root.join("cache");
        let cache = Cache::open(&directory, cache_settings)?;
        let prefetcher = Prefetcher::new(settings.prefetch.clone(), root, cache.clone());
        let mut probe = if proven { Probe::of_successor() } else { Probe::run(&directory) };
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
            gate: Arc::new(Gate::new(settings.policy.clone(), Some(root.join("verdicts")))),
            fetch_locks: FetchLocks::default(),
            logins,
            recent: Recent::default(),
            expected: Expected::default(),
            pins: Arc::default(),
            counted: Counted::default(),
            remembering: Remembering::default(),
            cache,
            probe,
            link,
            fanotify: None,
            loops: OnceCell::new(),
            records,
            images: Mutex::default(),
            mounts: Mutex::default(),
            filesystems,
            prefetcher,
            prefetches: Prefetches::default(),
            boot,
            stopping: watch::Sender::new(false),
            leaving: watch::Sender::new(false),
            working: Arc::default(),
            explanation: Explanation::default(),
            started: Instant::now(),
        })
    }

    /// Makes a fanotify session, if this machine can. Nobody is answered before [`Node::answer`]:
    /// what the kernel kept from holes is told by which chunks are missing, so none may arrive
    /// before it is gone.
    pub(super) fn start_fanotify(&mut self) {
        if self.probe.fanotify.is_err() {
            return;
        }
        match fanotify::Session::start(&self.link) {
            Ok(session) => self.fanotify = Some(session),
            Err(error) => self.probe.fanotify = Err(error.to_string()),
        }
    }

    /// Mounts an image. `cancelled` ends the part that may take long, fetching the metadata.
    pub(super) async fn mount(
        &self,
        mut request: MountRequest,
        cancelled: impl Future<Output = ()>,
    ) -> Result<Mounted, DaemonError> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| DaemonError::Io { path, source }
        };
        let mountpoint = mount::real_path(&request.mountpoint).map_err(io(&request.mountpoint))?;
        request.mountpoint.clone_from(&mountpoint);
        self.reserve(&mountpoint).await?;
        let result = self.mount_reserved(request, cancelled).await;
        if result.is_err() {
            self.mounts.lock().await.remove(&mountpoint);
        }
        result
    }

    async fn reserve(&self, mountpoint: &Path) -> Result<(), DaemonError> {
        let mut mounts = self.mounts.lock().await;
        if *self.stopping.borrow() {
            return Err(DaemonError::Stopping);
        }
        self.prune(&mut mounts);
        if mounts.contains_key(mountpoint) {
            return Err(DaemonError::Taken { mountpoint: mountpoint.to_owned() });
        }
        mounts.insert(mountpoint.to_owned(), Slot::Busy);
        Ok(())
    }

    async fn mount_reserved(
        &self,
        request: MountRequest,
        cancelled: impl Future<Output = ()>,
    ) -> Result<Mounted, DaemonError> {
        let (driver, driver_reason) = self.choose(request.driver).await?;
        let name: ImageName = request.image.parse()?;
        let platform: Option<Platform> = request.platform.as_deref().map(str::parse).transpose()?;
        let platform = platform.map(|platform| platform.with_lazy(true));
        let mut options = self.options(&request);
        if request.base {
            // containerd names layers by what the image's configuration claims of their content,
            // and shares them between images: what only the repository vouches for must not decide
            // that.
            options.indexes = IndexTrust::Nothing;
        }
        let way = ImageRoute::to(&name, &options);
        let repository = way.open()?;
        let images = self.root.join("images");
        let mut stopping = self.stopping.subscribe();
        let remembering = self.remember_images();
        let pull = async {
            let opening = repository.request_policy().preconnect();
            let manifest = match self.recent.get(&name) {
                Some(manifest) => manifest,
                None => {
                    let may_replace = self.may_replace(&name, &options);
                    let platform = platform.as_ref();
                    let indexes = options.indexes;
                    let found = lazy_manifest(&*repository, &name, platform, may_replace, indexes);
                    found.await?.into()
                }
            };
            opening.done().await;
            // Until there is a record of the mount.
            let pin = self.pins.pin(&images, manifest.digest);
            let is_started = self.is_started(&manifest.digest).await;
            let has_metadata = StoredImage::is_in(&images, &manifest.digest);
            let look_up = async {
                match is_started {
                    true => Known::default(),
                    false => self.prefetcher.look_up(&repository, &manifest, has_metadata),
                }
            };
            // Metadata first: nothing that is fetched ahead is of use before they are here.
            let fetch = async {
                let _lock = self.fetch_locks.lock(&request.image).await;
                let admission = self.admit(&request, &manifest);
                StoredImage::fetch_admitted(&repository, &manifest, &images, admission).await
            };
            let (fetched, known) = tokio::join!(fetch, look_up);
            let (stored, fetched, verified) = fetched?;
            stored.must_be_whole_unless(request.base, repository.describe())?;
            Ok::<_, DaemonError>((stored, verified, fetched, known, pin))
        };
        let (stored, verified, metadata, known, _pin) = tokio::select! {
            pulled = pull => pulled?,
            _ = stopping.wait_for(|stopping| *stopping) => return Err(DaemonError::Stopping),
            () = cancelled => return Err(DaemonError::Stopping),
        };
        let config = stored.config.clone();
        let manifest_digest = stored.manifest_digest;
        let image = self.serve(stored, &verified, way).await?;
        remembering.await;
        if image.is_first_start() {
            self.prefetcher.start(image.prefetched(), known);
        }
        let mut record = MountRecord {
            request,
            manifest_digest,
            driver,
            driver_reason,
            backing: None,
            journal: false,
        };
        let attached = self.attach(&image, &mut record, false).await;
        let (attachment, id) = attached.inspect_err(|_| self.forget(&record.request.mountpoint))?;
        let mountpoint = &record.request.mountpoint;
        tracing::info!(image = %record.request.image, digest = %manifest_digest,
            mountpoint = %mountpoint.display(), ?driver, "mounted");
        let mount = self.insert(record, image, attachment, id, metadata).await;
        Ok(Mounted { mount, config })
    }

    /// Whether an image that is served at this moment has been mounted.
    async fn is_started(&self, manifest: &Digest) -> bool {
        let images = self.images.lock().await;
        images.get(manifest).and_then(Weak::upgrade).is_some_and(|image| image.is_started())
    }

    /// All images that are served at this moment.
    pub(super) async fn served_images(&self) -> Vec<Arc<ServedImage>> {
        self.images.lock().await.values().filter_map(Weak::upgrade).collect()
    }

    /// The served form of an image, which takes that it may run: the same for all of its mounts.
    pub(super) async fn serve(
        &self,
        stored: StoredImage,
        verified: &Verified,
        way: ImageRoute,
    ) -> Result<Arc<ServedImage>, DaemonError> {
        if verified.manifest() != stored.manifest_digest {
            return Err(DaemonError::Unverified { image: stored.manifest_digest });
        }
        let mut images = self.images.lock().await;
        images.retain(|_, image| image.strong_count() > 0);
        let digest = stored.manifest_digest;
        if let Some(image) = images.get(&digest).and_then(Weak::upgrade) {
            image.add_way(way)?;
            return Ok(image);
        }
        let image = Arc::new(ServedImage::new(stored, &self.cache, way)?);
        images.insert(digest, Arc::downgrade(&image));
        Ok(image)
    }

    /// Mounts, with a record of it on disk before it can be seen. In the place of a mount that is
    /// dead, if there is one.
    pub(super) async fn attach(
        &self,
        image: &Arc<ServedImage>,
        record: &mut MountRecord,
        is_dead: bool,
    ) -> Result<(Attachment, u64), DaemonError> {
        let mountpoint = record.request.mountpoint.clone();
        let suid = if record.request.nosuid { Suid::Ignore } else { Suid::Keep };
        let io = |source| DaemonError::Io { path: self.root.join("mounts"), source };
        let (filesystems, request) = (&self.filesystems, &record.request);
        let erofs = match (&self.fanotify, self.loops.get(), record.driver) {
            (Some(session), _, DriverChoice::Fanotify) => {
                Some(image.erofs_on_files(session, filesystems, request, &self.boot).await)
            }
            (_, Some(Ok(session)), DriverChoice::Loop) => {
                Some(image.erofs_on_disks(session, filesystems, request, &self.boot).await)
            }
            _ => None,
        };
        let attached = match erofs {
            Some(mount) => {
                let mount = mount.map_err(|source| mount_error(record, source))?;
                record.backing = Some(mount.erofs.backing().clone());
                self.records.write(record).map_err(io)?;
                mount.erofs.bind(&mountpoint, suid).map(|()| Attachment::Bind(mount))
            }
            None => {
                record.journal = true;
                self.records.write(record).map_err(io)?;
                image.fuse(&mountpoint, &record.request.image, suid, is_dead, &self.link).await
            }
        };
        let attachment = attached.map_err(|source| mount_error(record, source))?;
        let mounts = mountinfo::list().map_err(|source| mount_error(record, source))?;
        let id = seen_at(&mounts, &mountpoint).map_or(0, |mount| mount.id);
        Ok((attachment, id))
    }

    pub(super) async fn insert(
        &self,
        record: MountRecord,
        image: Arc<ServedImage>,
        attachment: Attachment,
        id: u64,
        metadata: Fetched,
    ) -> MountStatus {
        let before = image.counters(&attachment);
        let mountpoint = record.request.mountpoint.clone();
        let mount = Box::new(Mount { record, image, attachment, id, before, metadata });
        let status = mount.status();
        self.mounts.lock().await.insert(mountpoint, Slot::Mounted(mount));
        status
    }

    /// Whether this daemon has a mount at a place.
    pub(super) async fn serves_at(&self, mountpoint: &Path) -> bool {
        let mut mounts = self.mounts.lock().await;
        self.prune(&mut mounts);
        matches!(mounts.get(mountpoint), Some(Slot::Mounted(_)))
    }

    /// Takes a mount away; with `also_busy` from under its users, who are served until they are
    /// done.
    pub(super) async fn umount(
        &self,
        mountpoint: &Path,
        also_busy: bool,
    ) -> Result<(), DaemonError> {
        let mount = {
            let mut mounts = self.mounts.lock().await;
            self.prune(&mut mounts);
            let mountpoint = mountpoint.to_owned();
            match mounts.insert(mountpoint.clone(), Slot::Busy) {
                Some(Slot::Mounted(mount)) => mount,
                Some(Slot::Busy) => return Err(DaemonError::Taken { mountpoint }),
                None => {
                    mounts.remove(&mountpoint);
                    return Err(DaemonError::NotMounted { mountpoint });
                }
            }
        };
        if let Err(error) = self.unmount(&mount, mountpoint, also_busy).await {
            let mut mounts = self.mounts.lock().await;
            mounts.insert(mountpoint.to_owned(), Slot::Mounted(mount));
            return Err(error);
        }
        self.forget(mountpoint);
        drop(mount);
        self.mounts.lock().await.remove(mountpoint);
        tracing::info!(mountpoint = %mountpoint.display(), "unmounted");
        Ok(())
    }

    async fn unmount(
        &self,
        mount: &Mount,
        mountpoint: &Path,
        also_busy: bool,
    ) -> Result<(), DaemonError> {
        let io = |source| DaemonError::Io { path: mountpoint.to_owned(), source };
        let mounts = mountinfo::list().map_err(io)?;
        if seen_at(&mounts, mountpoint).is_none_or(|seen| seen.id != mount.id) {
            return Err(DaemonError::Covered { mountpoint: mountpoint.to_owned() });
        }
        match mount.attachment.unmount(mountpoint).await {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && also_busy => {
                mount.attachment.detach(mountpoint).await.map_err(io)
            }
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                let holders = mount_users::of(mountpoint);
                Err(DaemonError::Busy { mountpoint: mountpoint.to_owned(), holders })
            }
            other => other.map_err(io),
        }
    }

    /// Returns when the mounts of now have answered every request that an earlier worker left.
    pub(super) async fn caught_up(&self) {
        if let Some(Ok(session)) = self.loops.get() {
            session.caught_up().await;
        }
        let mut sessions = Vec::new();
        for slot in self.mounts.lock().await.values() {
            if let Slot::Mounted(mount) = slot
                && let Attachment::Fuse(session) = &mount.attachment
            {
                sessions.push(session.caught_up());
            }
        }
        futures_util::future::join_all(sessions).await;
    }

    /// What is mounted where.
    pub(super) async fn served(&self) -> Vec<(PathBuf, Arc<ServedImage>)> {
        let mounts = self.mounts.lock().await;
        let mounted = mounts.iter().filter_map(|(mountpoint, slot)| match slot {
            Slot::Mounted(mount) => Some((mountpoint.clone(), mount.image.clone())),
            Slot::Busy => None,
        });
        mounted.collect()
    }

    pub(super) async fn status(&self) -> Result<Status, DaemonError> {
        let (driver, driver_reason) = self.default_driver();
        let directory = self.root.join("cache");
        let (blobs, bytes_used) = self.cache.usage()?;
        let evicted = self.cache.evictions();
        let (snapshots, mut why) = self.explanation.read().await;
        let mut mounts = self.mounts.lock().await;
        self.prune(&mut mounts);
        let mounted = mounts.iter().filter_map(|(mountpoint, slot)| match slot {
            Slot::Mounted(mount) => {
                Some(MountStatus { snapshot: why.remove(mountpoint), ..mount.status() })
            }
            Slot::Busy => None,
        });
        let keeper = self.link.keeper().unwrap_or_default();
        Ok(Status {
            daemon: DaemonStatus {
                keeper_pid: keeper.pid,
                worker_pid: std::process::id(),
                restarts: keeper.restarts,
                last_exit: keeper.last_exit,
                version: env!("CARGO_PKG_VERSION").to_owned(),
                root: self.root.clone(),
                uptime_seconds: self.started.elapsed().as_secs(),
                driver,
                driver_reason,
                cache: CacheStatus {
                    directory,
                    blobs,
                    bytes_used,
                    max_bytes: evicted.max_bytes,
                    over_budget: evicted.is_over,
                    evicted_chunks: evicted.chunks,
                    evicted_blobs: evicted.blobs,
                    evicted_bytes: evicted.bytes,
                },
            },
            mounts: mounted.collect(),
            snapshots,
            mirror: self.explanation.mirror(),
        })
    }

    /// Lets requests under way get done, for a while; later ones are answered with
    /// [`super::Response::Again`] for ever.
    pub(super) async fn quiesce(&self, limit: Duration) {
        self.leaving.send_replace(true);
        match tokio::time::timeout(limit, self.working.clone().write_owned()).await {
            Ok(guard) => std::mem::forget(guard),
            Err(_) => tracing::warn!("leaving in the middle of a request"),
        }
    }

    /// Makes the node ready to end; nothing is mounted afterwards. Without `force` it refuses while
    /// anybody uses an image. With it, mounts are detached, and what still holds them open gets
    /// errors instead of data that is not here.
    pub(super) async fn stop(&self, force: bool) -> Result<(), DaemonError> {
        let mut mounts = loop {
            let mut mounts = self.mounts.lock().await;
            self.prune(&mut mounts);
            if !force {
                self.refuse_if_used(&mounts)?;
            }
            // From here on nothing new is mounted, and what is under way gives up or gets done.
            self.stopping.send_replace(true);
            if !mounts.values().any(|slot| matches!(slot, Slot::Busy)) {
                break mounts;
            }
            drop(mounts);
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        let seen = mountinfo::list().unwrap_or_default();
        for (mountpoint, slot) in std::mem::take(&mut *mounts) {
            if let Slot::Mounted(mount) = slot {
                let covered = seen_at(&seen, &mountpoint).is_none_or(|seen| seen.id != mount.id);
                if covered {
                    tracing::warn!(mountpoint = %mountpoint.display(), "left: something covers it");
                } else if let Err(error) = mount.attachment.detach(&mountpoint).await {
                    tracing::warn!(mountpoint = %mountpoint.display(), %error, "cannot detach");
                }
            }
            self.forget(&mountpoint);
        }
        let filesystems = self.filesystems.clone();
        let ended = tokio::task::spawn_blocking(move || {
            filesystems.settle();
            filesystems.cut_off();
        });
        ended.await.unwrap_or_else(|error| tracing::error!(%error, "stopping failed half way"));
        self.cache.flush();
        Ok(())
    }

    fn refuse_if_used(&self, mounts: &BTreeMap<PathBuf, Slot>) -> Result<(), DaemonError> {
        if !mounts.is_empty() {
            let describe = |path: &PathBuf| match mount_users::of(path) {
                holders if holders.is_empty() => path.display().to_string(),
                holders => format!("{} (in use{holders})", path.display()),
            };
            let mountpoints: Vec<_> = mounts.keys().map(describe).collect();
            return Err(DaemonError::Mounted { mountpoints: mountpoints.join(", ") });
        }
        let images = self.filesystems.settle();
        if images.is_empty() { Ok(()) } else { Err(DaemonError::StillUsed { images }) }
    }

    /// Drops mounts that somebody removed with umount(8).
    fn prune(&self, mounts: &mut BTreeMap<PathBuf, Slot>) {
        let present = match mountinfo::list() {
            Ok(present) => present,
            Err(error) => {
                tracing::error!(%error, "cannot see what is mounted");
                return;
            }
        };
        mounts.retain(|mountpoint, slot| {
            let Slot::Mounted(mount) = slot else { return true };
            let stays = present.iter().any(|present| present.id == mount.id);
            if !stays {
                tracing::info!(mountpoint = %mountpoint.display(), "unmounted by somebody else");
                self.forget(mountpoint);
            }
            stays
        });
    }

    pub(super) fn forget(&self, mountpoint: &Path) {
        if let Err(error) = self.records.remove(&mount_key(mountpoint)) {
            tracing::warn!(mountpoint = %mountpoint.display(), %error, "stale mount record stays");
        }
    }
}

impl Mount {
    fn status(&self) -> MountStatus {
        let now = self.image.counters(&self.attachment);
        let MountRecord { request, manifest_digest, driver, driver_reason, .. } = &self.record;
        MountStatus {
            image: request.image.clone(),
            manifest_digest: *manifest_digest,
            mountpoint: request.mountpoint.clone(),
            driver: *driver,
            driver_reason: driver_reason.clone(),
            bytes_fetched: self.metadata.bytes + now.bytes_fetched - self.before.bytes_fetched,
            requests: self.metadata.requests + now.requests - self.before.requests,
            bytes_total: self.image.bytes_total(),
            bytes_copied: now.bytes_copied - self.before.bytes_copied,
            chunks_ready: now.chunks_ready,
            chunks_total: now.chunks_total,
            events: now.events - self.before.events,
            stale_pages: self.attachment.stale_pages(),
            snapshot: None,
        }
    }
}

/// The mount that is seen at a place: the last one made there.
fn seen_at<'a>(mounts: &'a [KernelMount], mountpoint: &Path) -> Option<&'a KernelMount> {
    mounts.iter().rfind(|mount| mount.target == mountpoint)
}

pub(super) fn mount_error(record: &MountRecord, source: io::Error) -> DaemonError {
    let MountRequest { image, mountpoint, .. } = &record.request;
    DaemonError::Mount { image: image.clone(), mountpoint: mountpoint.clone(), source }
}
