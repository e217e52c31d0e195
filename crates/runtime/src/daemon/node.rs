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
use lazuli_registry::{ImageName, Options, Platform};
use tokio::sync::{Mutex, watch};

use super::{
    DaemonError, Settings,
    api::{CacheStatus, DaemonStatus, DriverChoice, MountRequest, MountStatus, Mounted, Status},
    holders,
    lingering::{Lingering, cut_off_file},
    record::{MountRecord, Records},
    served::{Attachment, Counters, ServedImage},
};
use crate::{
    cache::{self, Cache},
    image::{self, Fetched, StoredImage},
    kernel::{
        Probe, fanotify, fuse,
        mountinfo::{self, Mounted as KernelMount},
    },
};

/// How often file systems that outlive their mounts are looked after.
const SWEEP: Duration = Duration::from_secs(1);

/// Everything of one root directory.
#[derive(Debug)]
pub(super) struct Node {
    root: PathBuf,
    deadline: Duration,
    cache: Arc<Cache>,
    probe: Probe,
    fanotify: Option<Arc<fanotify::Session>>,
    records: Records,
    images: Mutex<HashMap<Digest, Weak<ServedImage>>>,
    mounts: Mutex<BTreeMap<PathBuf, Slot>>,
    lingering: Arc<Lingering>,
    stopping: watch::Sender<bool>,
    started: Instant,
}

/// What is known of a mount point. A slot is taken before work on it starts, so that slow work on one
/// mount point never blocks another.
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
    pub(super) fn open(root: &Path, settings: &Settings) -> Result<Self, DaemonError> {
        for part in ["cache", "images"] {
            let path = root.join(part);
            let created = DirBuilder::new().recursive(true).mode(0o700).create(&path);
            created.map_err(|source| DaemonError::Io { path, source })?;
        }
        image::sweep(&root.join("images"));
        let path = root.join("mounts");
        let records = Records::open(path.clone());
        let records = records.map_err(|source| DaemonError::Io { path, source })?;
        let defaults = cache::Settings::default();
        let cache_settings = cache::Settings {
            amplify: settings.amplify.unwrap_or(defaults.amplify),
            deadline: settings.deadline.unwrap_or(defaults.deadline),
            ..defaults
        };
        let deadline = cache_settings.deadline;
        let cache = Cache::open(&root.join("cache"), cache_settings)?;
        let mut probe = Probe::run(&root.join("cache"));
        let mut session = None;
        if probe.fanotify.is_ok() {
            match fanotify::Session::start() {
                Ok(started) => session = Some(started),
                Err(error) => probe.fanotify = Err(error.to_string()),
            }
        }
        let lingering = Arc::new(Lingering::default());
        tokio::spawn(sweep(Arc::downgrade(&lingering)));
        Ok(Node {
            root: root.to_owned(),
            deadline,
            cache,
            probe,
            fanotify: session,
            records,
            images: Mutex::default(),
            mounts: Mutex::default(),
            lingering,
            stopping: watch::Sender::new(false),
            started: Instant::now(),
        })
    }

    /// Finds the mounts of a daemon that did not end properly, and serves them again.
    pub(super) async fn adopt(&self) -> Result<(), DaemonError> {
        let io = |source| DaemonError::Io { path: self.root.join("mounts"), source };
        let mounts = mountinfo::list().map_err(io)?;
        for record in self.records.all().map_err(io)? {
            let mountpoint = record.request.mountpoint.clone();
            let Some(mount) = seen_at(&mounts, &mountpoint).filter(|m| self.is_ours(m, &record))
            else {
                // Gone, or the place of something else by now.
                self.forget(&mountpoint);
                continue;
            };
            let (id, devices) = (mount.id, record.devices.clone());
            match self.adopt_one(record, id).await {
                Ok(()) => tracing::info!(mountpoint = %mountpoint.display(), "served again"),
                Err(error) => {
                    let error = error.for_people();
                    tracing::error!(mountpoint = %mountpoint.display(), error, "mount is lost");
                    devices.iter().for_each(|path| cut_off_file(path));
                    detach(&mountpoint);
                    self.forget(&mountpoint);
                }
            }
        }
        Ok(())
    }

    /// Whether a mount is the one that a record speaks of.
    fn is_ours(&self, mount: &KernelMount, record: &MountRecord) -> bool {
        match record.driver {
            DriverChoice::Fuse => mount.kind == fuse::KIND,
            _ => {
                let image = self.root.join("images").join(record.manifest_digest.hex());
                mount.kind == "erofs" && mount.source == image::bootstrap_path(&image)
            }
        }
    }

    async fn adopt_one(&self, mut record: MountRecord, id: u64) -> Result<(), DaemonError> {
        let directory = self.root.join("images").join(record.manifest_digest.hex());
        let stored = StoredImage::open(&directory)?;
        let name: ImageName = record.request.image.parse()?;
        let image = self.serve(stored, &name, &record.request).await?;
        let mountpoint = record.request.mountpoint.clone();
        let (attachment, id) = match (&self.fanotify, record.backing.clone()) {
            (Some(session), Some(backing)) => {
                let adopted = image.adopt(session, &self.lingering, &mountpoint, backing).await;
                (adopted.map_err(|source| mount_error(&record, source))?, id)
            }
            _ => {
                // The connection died with its daemon; a new one takes its place.
                detach(&mountpoint);
                self.attach(&image, &mut record).await?
            }
        };
        self.insert(record, image, attachment, id, Fetched::default()).await;
        Ok(())
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
        let mountpoint = fs::canonicalize(&request.mountpoint).map_err(io(&request.mountpoint))?;
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
        let (driver, driver_reason) = self.choose(request.driver)?;
        let name: ImageName = request.image.parse()?;
        let platform: Option<Platform> = request.platform.as_deref().map(str::parse).transpose()?;
        let repository = lazuli_registry::open(&name, &options(&request))?;
        let images = self.root.join("images");
        let mut stopping = self.stopping.subscribe();
        let (stored, metadata) = tokio::select! {
            pulled = StoredImage::pull(&repository, platform.as_ref(), &images) => pulled?,
            _ = stopping.wait_for(|stopping| *stopping) => return Err(DaemonError::Stopping),
            () = cancelled => return Err(DaemonError::Stopping),
        };
        let config = stored.config.clone();
        let manifest_digest = stored.manifest_digest;
        let image = self.serve(stored, &name, &request).await?;
        let devices = image.devices();
        let mut record =
            MountRecord { request, manifest_digest, driver, driver_reason, backing: None, devices };
        let attached = self.attach(&image, &mut record).await;
        let (attachment, id) = attached.inspect_err(|_| self.forget(&record.request.mountpoint))?;
        let mountpoint = &record.request.mountpoint;
        tracing::info!(image = %record.request.image, digest = %manifest_digest,
            mountpoint = %mountpoint.display(), ?driver, "mounted");
        let mount = self.insert(record, image, attachment, id, metadata).await;
        Ok(Mounted { mount, config })
    }

    /// What `--driver` means here.
    fn choose(&self, wanted: DriverChoice) -> Result<(DriverChoice, String), DaemonError> {
        let (driver, works) = match wanted {
            DriverChoice::Auto => return Ok(self.default_driver()),
            DriverChoice::Fanotify => ("fanotify", &self.probe.fanotify),
            DriverChoice::Fuse => ("fuse", &self.probe.fuse),
        };
        match works {
            Ok(()) => Ok((wanted, "asked for".to_owned())),
            Err(reason) => Err(DaemonError::Driver { driver, reason: reason.clone() }),
        }
    }

    fn default_driver(&self) -> (DriverChoice, String) {
        match &self.probe.fanotify {
            Ok(()) => {
                let reason = "this kernel has pre-content events and file-backed EROFS mounts";
                (DriverChoice::Fanotify, reason.to_owned())
            }
            Err(reason) => (DriverChoice::Fuse, format!("fanotify does not work: {reason}")),
        }
    }

    /// The served form of an image: the same for all of its mounts.
    async fn serve(
        &self,
        stored: StoredImage,
        name: &ImageName,
        request: &MountRequest,
    ) -> Result<Arc<ServedImage>, DaemonError> {
        let repository = lazuli_registry::open(name, &options(request))?;
        let deadline = self.deadline;
        let mut images = self.images.lock().await;
        images.retain(|_, image| image.strong_count() > 0);
        let digest = stored.manifest_digest;
        if let Some(image) = images.get(&digest).and_then(Weak::upgrade) {
            image.add_source(&self.cache, &repository, deadline).await?;
            return Ok(image);
        }
        let image = Arc::new(ServedImage::new(stored, &self.cache, &repository, deadline)?);
        images.insert(digest, Arc::downgrade(&image));
        Ok(image)
    }

    /// Mounts, with a record of it on disk before it can be seen.
    async fn attach(
        &self,
        image: &Arc<ServedImage>,
        record: &mut MountRecord,
    ) -> Result<(Attachment, u64), DaemonError> {
        let mountpoint = record.request.mountpoint.clone();
        let io = |source| DaemonError::Io { path: self.root.join("mounts"), source };
        let attached = match (&self.fanotify, record.driver) {
            (Some(session), DriverChoice::Fanotify) => {
                let mount = image.erofs(session, &self.lingering).await;
                let mount = mount.map_err(|source| mount_error(record, source))?;
                record.backing = Some(mount.erofs.backing().clone());
                self.records.write(record).map_err(io)?;
                mount.erofs.bind(&mountpoint).map(|()| Attachment::Bind(mount))
            }
            _ => {
                self.records.write(record).map_err(io)?;
                image.fuse(&mountpoint, &record.request.image).await
            }
        };
        let attachment = attached.map_err(|source| mount_error(record, source))?;
        let mounts = mountinfo::list().map_err(|source| mount_error(record, source))?;
        let id = seen_at(&mounts, &mountpoint).map_or(0, |mount| mount.id);
        Ok((attachment, id))
    }

    async fn insert(
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

    pub(super) async fn umount(&self, mountpoint: &Path) -> Result<(), DaemonError> {
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
        if let Err(error) = self.unmount(&mount, mountpoint).await {
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

    async fn unmount(&self, mount: &Mount, mountpoint: &Path) -> Result<(), DaemonError> {
        let io = |source| DaemonError::Io { path: mountpoint.to_owned(), source };
        let mounts = mountinfo::list().map_err(io)?;
        if seen_at(&mounts, mountpoint).is_none_or(|seen| seen.id != mount.id) {
            return Err(DaemonError::Covered { mountpoint: mountpoint.to_owned() });
        }
        mount.attachment.unmount(mountpoint).await.map_err(|source| {
            if source.kind() == io::ErrorKind::ResourceBusy {
                let holders = holders::of(mountpoint);
                DaemonError::Busy { mountpoint: mountpoint.to_owned(), holders }
            } else {
                io(source)
            }
        })
    }

    pub(super) async fn status(&self) -> Result<Status, DaemonError> {
        let (driver, driver_reason) = self.default_driver();
        let directory = self.root.join("cache");
        let (blobs, bytes_used) = self.cache.usage()?;
        let mut mounts = self.mounts.lock().await;
        self.prune(&mut mounts);
        let mounted = mounts.values().filter_map(|slot| match slot {
            Slot::Mounted(mount) => Some(mount.status()),
            Slot::Busy => None,
        });
        Ok(Status {
            daemon: DaemonStatus {
                worker_pid: std::process::id(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                root: self.root.clone(),
                uptime_seconds: self.started.elapsed().as_secs(),
                driver,
                driver_reason,
                cache: CacheStatus { directory, blobs, bytes_used },
            },
            mounts: mounted.collect(),
        })
    }

    /// Makes the node ready to end; nothing is mounted afterwards. Without `force` it refuses while anybody
    /// uses an image. With it, mounts are detached, and what still holds them open gets
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
        let lingering = self.lingering.clone();
        let ended = tokio::task::spawn_blocking(move || {
            lingering.settle();
            lingering.cut_off();
        });
        ended.await.unwrap_or_else(|error| tracing::error!(%error, "stopping failed half way"));
        self.cache.flush();
        Ok(())
    }

    fn refuse_if_used(&self, mounts: &BTreeMap<PathBuf, Slot>) -> Result<(), DaemonError> {
        if !mounts.is_empty() {
            let mountpoints: Vec<_> =
                mounts.keys().map(|path| path.display().to_string()).collect();
            return Err(DaemonError::Mounted { mountpoints: mountpoints.join(", ") });
        }
        let images = self.lingering.settle();
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

    fn forget(&self, mountpoint: &Path) {
        if let Err(error) = self.records.remove(mountpoint) {
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
            chunks_ready: now.chunks_ready,
            chunks_total: now.chunks_total,
            events: now.events - self.before.events,
        }
    }
}

async fn sweep(lingering: Weak<Lingering>) {
    loop {
        tokio::time::sleep(SWEEP).await;
        match lingering.upgrade() {
            Some(lingering) => lingering.sweep(),
            None => return,
        }
    }
}

/// The mount that is seen at a place: the last one made there.
fn seen_at<'a>(mounts: &'a [KernelMount], mountpoint: &Path) -> Option<&'a KernelMount> {
    mounts.iter().rfind(|mount| mount.target == mountpoint)
}

/// Takes a mount of an earlier daemon away.
fn detach(mountpoint: &Path) {
    if let Err(error) = fuse::detach(mountpoint) {
        tracing::warn!(mountpoint = %mountpoint.display(), %error, "cannot detach");
    }
}

fn options(request: &MountRequest) -> Options {
    Options { plain_http: request.plain_http, ..Options::default() }
}

fn mount_error(record: &MountRecord, source: io::Error) -> DaemonError {
    let MountRequest { image, mountpoint, .. } = &record.request;
    DaemonError::Mount { image: image.clone(), mountpoint: mountpoint.clone(), source }
}
