//! What a node serves: images, their mounts, and the requests that change them.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::Instant,
};

use lazuli_image::Digest;
use lazuli_registry::{ImageName, Options, Platform};
use tokio::sync::Mutex;

use super::{
    DaemonError, Settings,
    api::{CacheStatus, DaemonStatus, DriverChoice, MountRequest, MountStatus, Mounted, Status},
    holders,
    record::{MountRecord, Records},
    served::{Attachment, Counters, ServedImage},
};
use crate::{
    cache::{self, Cache},
    image::{Fetched, StoredImage},
    kernel::{self, Probe, fanotify},
};

/// Everything of one root directory.
#[derive(Debug)]
pub(super) struct Node {
    root: PathBuf,
    settings: Settings,
    cache: Arc<Cache>,
    probe: Probe,
    fanotify: Option<Arc<fanotify::Session>>,
    records: Records,
    images: Mutex<HashMap<Digest, Weak<ServedImage>>>,
    mounts: Mutex<BTreeMap<PathBuf, Slot>>,
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
    /// Counters of the image when this mount was made.
    before: Counters,
    /// Metadata that was fetched for this mount.
    metadata: Fetched,
}

impl Node {
    pub(super) fn open(root: &Path, settings: &Settings) -> Result<Self, DaemonError> {
        let io = |path: PathBuf| move |source| DaemonError::Io { path, source };
        for part in ["cache", "images", "erofs"] {
            let path = root.join(part);
            fs::create_dir_all(&path).map_err(io(path.clone()))?;
        }
        let records = root.join("mounts");
        let records = Records::open(records.clone()).map_err(io(records))?;
        let defaults = cache::Settings::default();
        let cache_settings =
            cache::Settings { amplify: settings.amplify.unwrap_or(defaults.amplify), ..defaults };
        let cache = Cache::open(&root.join("cache"), cache_settings)?;
        let mut probe = Probe::run(&root.join("cache"));
        let fanotify = match &probe.fanotify {
            Ok(()) => match fanotify::Session::start() {
                Ok(session) => Some(session),
                Err(error) => {
                    probe.fanotify = Err(error.to_string());
                    None
                }
            },
            Err(_) => None,
        };
        Ok(Node {
            root: root.to_owned(),
            settings: settings.clone(),
            cache,
            probe,
            fanotify,
            records,
            images: Mutex::default(),
            mounts: Mutex::default(),
            started: Instant::now(),
        })
    }

    /// Finds the mounts of an earlier daemon and serves them again.
    pub(super) async fn adopt(&self) -> Result<(), DaemonError> {
        let records = self
            .records
            .all()
            .map_err(|source| DaemonError::Io { path: self.root.join("mounts"), source })?;
        let present = kernel::mount::mount_points().unwrap_or_default();
        let mut images = 0;
        for record in records {
            let mountpoint = record.request.mountpoint.clone();
            if !present.contains(&mountpoint) {
                self.forget(&mountpoint);
                continue;
            }
            match self.adopt_one(record).await {
                Ok(()) => images += 1,
                // Readers there get errors, or see what the kernel has cached; nobody can serve them.
                Err(error) => {
                    tracing::error!(mountpoint = %mountpoint.display(), %error, "mount is lost");
                    let _ = kernel::mount::detach(&mountpoint);
                    self.forget(&mountpoint);
                }
            }
        }
        // EROFS mounts whose last user went away with the daemon.
        let served = self.images.lock().await;
        let prefix = self.root.join("erofs");
        for path in present.iter().filter(|path| path.starts_with(&prefix)) {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let used = served
                .iter()
                .any(|(digest, image)| digest.hex() == name && image.strong_count() > 0);
            if !used {
                let _ = kernel::mount::detach(path);
            }
        }
        if images > 0 {
            tracing::info!(mounts = images, "serving the mounts of an earlier daemon");
        }
        Ok(())
    }

    async fn adopt_one(&self, record: MountRecord) -> Result<(), DaemonError> {
        let directory = self.root.join("images").join(record.manifest_digest.hex());
        let stored = StoredImage::open(&directory)?;
        let name: ImageName = record.request.image.parse()?;
        let image = self.serve(stored, &name, &record.request).await?;
        let attachment = match record.driver {
            DriverChoice::Fuse => {
                // The connection died with its daemon; a new one takes its place.
                let _ = kernel::mount::detach(&record.request.mountpoint);
                self.attach_fuse(&image, &record).await?
            }
            _ => self.attach_fanotify(&image, &record, true).await?,
        };
        self.insert(record, image, attachment, Fetched::default()).await;
        Ok(())
    }

    pub(super) async fn mount(&self, request: MountRequest) -> Result<Mounted, DaemonError> {
        let mountpoint = request.mountpoint.clone();
        self.reserve(&mountpoint).await?;
        let result = self.mount_reserved(request).await;
        if result.is_err() {
            self.mounts.lock().await.remove(&mountpoint);
        }
        result
    }

    async fn reserve(&self, mountpoint: &Path) -> Result<(), DaemonError> {
        let mut mounts = self.mounts.lock().await;
        self.prune(&mut mounts);
        if mounts.contains_key(mountpoint) {
            return Err(DaemonError::Taken { mountpoint: mountpoint.to_owned() });
        }
        mounts.insert(mountpoint.to_owned(), Slot::Busy);
        Ok(())
    }

    async fn mount_reserved(&self, request: MountRequest) -> Result<Mounted, DaemonError> {
        let (driver, driver_reason) = self.choose(request.driver)?;
        let name: ImageName = request.image.parse()?;
        let platform: Option<Platform> = request.platform.as_deref().map(str::parse).transpose()?;
        let repository = lazuli_registry::open(&name, &options(&request))?;
        let images = self.root.join("images");
        let (stored, metadata) = StoredImage::pull(&repository, platform.as_ref(), &images).await?;
        let config = stored.config.clone();
        let manifest_digest = stored.manifest_digest;
        let image = self.serve(stored, &name, &request).await?;
        let record = MountRecord { request, manifest_digest, driver, driver_reason };
        let mountpoint = record.request.mountpoint.clone();
        self.records
            .write(&record)
            .map_err(|source| DaemonError::Io { path: self.root.join("mounts"), source })?;
        let attached = match driver {
            DriverChoice::Fuse => self.attach_fuse(&image, &record).await,
            _ => self.attach_fanotify(&image, &record, false).await,
        };
        let attachment = attached.inspect_err(|_| self.forget(&mountpoint))?;
        tracing::info!(image = %record.request.image, digest = %manifest_digest,
            mountpoint = %mountpoint.display(), ?driver, "mounted");
        let mount = self.insert(record, image, attachment, metadata).await;
        Ok(Mounted { mount, config })
    }

    /// What `--driver` means here.
    fn choose(&self, wanted: DriverChoice) -> Result<(DriverChoice, String), DaemonError> {
        let asked = || "asked for".to_owned();
        match wanted {
            DriverChoice::Auto => Ok(self.default_driver()),
            DriverChoice::Fanotify => match &self.probe.fanotify {
                Ok(()) => Ok((wanted, asked())),
                Err(reason) => {
                    Err(DaemonError::Driver { driver: "fanotify", reason: reason.clone() })
                }
            },
            DriverChoice::Fuse => match &self.probe.fuse {
                Ok(()) => Ok((wanted, asked())),
                Err(reason) => Err(DaemonError::Driver { driver: "fuse", reason: reason.clone() }),
            },
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
        let mut images = self.images.lock().await;
        images.retain(|_, image| image.strong_count() > 0);
        let digest = stored.manifest_digest;
        if let Some(image) = images.get(&digest).and_then(Weak::upgrade) {
            // Blobs may be asked from here, too.
            image.add_source(&self.cache, &repository, self.settings.deadline)?;
            return Ok(image);
        }
        let image = ServedImage::new(stored, &self.cache, &repository, self.settings.deadline)?;
        let image = Arc::new(image);
        images.insert(digest, Arc::downgrade(&image));
        Ok(image)
    }

    async fn attach_fanotify(
        &self,
        image: &Arc<ServedImage>,
        record: &MountRecord,
        adopt: bool,
    ) -> Result<Attachment, DaemonError> {
        let Some(session) = &self.fanotify else {
            let reason = self.probe.fanotify.clone().err().unwrap_or_default();
            return Err(DaemonError::Driver { driver: "fanotify", reason });
        };
        let at = self.root.join("erofs").join(record.manifest_digest.hex());
        let mountpoint = record.request.mountpoint.clone();
        let result = image.bind(session, &at, &mountpoint, adopt).await;
        result.map_err(|source| mount_error(record, source))
    }

    async fn attach_fuse(
        &self,
        image: &Arc<ServedImage>,
        record: &MountRecord,
    ) -> Result<Attachment, DaemonError> {
        let result = image.fuse(&record.request.mountpoint, &record.request.image).await;
        result.map_err(|source| mount_error(record, source))
    }

    async fn insert(
        &self,
        record: MountRecord,
        image: Arc<ServedImage>,
        attachment: Attachment,
        metadata: Fetched,
    ) -> MountStatus {
        let before = image.counters(&attachment);
        let mountpoint = record.request.mountpoint.clone();
        let mount = Box::new(Mount { record, image, attachment, before, metadata });
        let status = mount.status();
        self.mounts.lock().await.insert(mountpoint, Slot::Mounted(mount));
        status
    }

    pub(super) async fn umount(&self, mountpoint: &Path) -> Result<(), DaemonError> {
        let mount = {
            let mut mounts = self.mounts.lock().await;
            self.prune(&mut mounts);
            match mounts.insert(mountpoint.to_owned(), Slot::Busy) {
                Some(Slot::Mounted(mount)) => mount,
                Some(Slot::Busy) => {
                    return Err(DaemonError::Taken { mountpoint: mountpoint.to_owned() });
                }
                None => {
                    mounts.remove(mountpoint);
                    return Err(DaemonError::NotMounted { mountpoint: mountpoint.to_owned() });
                }
            }
        };
        if let Err(source) = mount.attachment.unmount(mountpoint).await {
            let mut mounts = self.mounts.lock().await;
            mounts.insert(mountpoint.to_owned(), Slot::Mounted(mount));
            return Err(if source.kind() == io::ErrorKind::ResourceBusy {
                let holders = holders::of(mountpoint);
                DaemonError::Busy { mountpoint: mountpoint.to_owned(), holders }
            } else {
                DaemonError::Io { path: mountpoint.to_owned(), source }
            });
        }
        self.forget(mountpoint);
        mount.attachment.release();
        self.mounts.lock().await.remove(mountpoint);
        tracing::info!(mountpoint = %mountpoint.display(), "unmounted");
        Ok(())
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

    /// Makes the node ready to end. With `force`, mounts are detached, and what still holds them open
    /// gets errors instead of data that is not here.
    pub(super) async fn stop(&self, force: bool) -> Result<(), DaemonError> {
        let mut mounts = self.mounts.lock().await;
        self.prune(&mut mounts);
        if !mounts.is_empty() && !force {
            let mountpoints: Vec<_> =
                mounts.keys().map(|path| path.display().to_string()).collect();
            return Err(DaemonError::Mounted { mountpoints: mountpoints.join(", ") });
        }
        for (mountpoint, slot) in std::mem::take(&mut *mounts) {
            if let Slot::Mounted(mount) = slot {
                if let Err(error) = mount.attachment.detach(&mountpoint).await {
                    tracing::warn!(mountpoint = %mountpoint.display(), %error, "cannot detach");
                }
                mount.attachment.abandon();
            }
            self.forget(&mountpoint);
        }
        self.cache.flush();
        Ok(())
    }

    /// Drops mounts that somebody removed with umount(8).
    fn prune(&self, mounts: &mut BTreeMap<PathBuf, Slot>) {
        let Ok(present) = kernel::mount::mount_points() else { return };
        mounts.retain(|mountpoint, slot| {
            let gone = matches!(slot, Slot::Mounted(_)) && !present.contains(mountpoint);
            if gone {
                tracing::info!(mountpoint = %mountpoint.display(), "unmounted by somebody else");
                self.forget(mountpoint);
            }
            !gone
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
        let MountRecord { request, manifest_digest, driver, driver_reason } = &self.record;
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

fn options(request: &MountRequest) -> Options {
    Options { plain_http: request.plain_http, ..Options::default() }
}

fn mount_error(record: &MountRecord, source: io::Error) -> DaemonError {
    let MountRequest { image, mountpoint, .. } = &record.request;
    DaemonError::Mount { image: image.clone(), mountpoint: mountpoint.clone(), source }
}
