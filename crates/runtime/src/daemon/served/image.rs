//! An image while it is served: its blobs in the cache and its mounts.

use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use lazuli_image::{BlobIndex, Decoded, Digest, rafs::Bootstrap};
use lazuli_registry::Repository;
use lazuli_sys::mmap::Map;
use tokio::{runtime::Handle, sync::Mutex};

use super::route::{ImageRoute, ImageRoutes};
use crate::{
    cache::{Cache, CachedBlob},
    daemon::{
        DaemonError,
        api::{DriverChoice, MountRequest},
        filesystems::{
            attachment::Attachment,
            direct_reads::{forget_pages_when_quiet, read_directly_when_quiet},
            fuse_blobs::Blobs,
            mounted::{BlobBackends, FilesystemMount, FilesystemRecord, Filesystems},
            stale_pages::{self, Gap},
        },
        record::{MountRecord, mount_key},
    },
    image::{self, StoredImage},
    keeper::Link,
    kernel::{
        disks::DiskFilesystem,
        ext4,
        fanotify::{self, Watch},
        fuse::{self, ImageFilesystem, MountPoint, MountTarget},
        loop_devices,
        mount::{Format, ImageMount, Suid},
    },
    prefetch,
    sharing::Owner,
};

/// One image. All of its mounts share it.
#[derive(Debug)]
pub(in crate::daemon) struct ServedImage {
    stored: StoredImage,
    blobs: Arc<[Arc<CachedBlob>]>,
    _owners: Vec<Owner>,
    /// The servers to fetch its blobs from.
    routes: ImageRoutes,
    on_files: Mutex<Weak<FilesystemMount>>,
    erofs_on_disks: Mutex<Weak<FilesystemMount>>,
    ext4_on_disks: Mutex<Weak<FilesystemMount>>,
    /// Whether it has been started, see [`crate::prefetch`].
    is_started: AtomicBool,
}

/// Counters of an image.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::daemon) struct Counters {
    pub(in crate::daemon) bytes_fetched: u64,
    pub(in crate::daemon) bytes_copied: u64,
    pub(in crate::daemon) requests: u64,
    pub(in crate::daemon) chunks_ready: u64,
    pub(in crate::daemon) chunks_total: u64,
    pub(in crate::daemon) events: u64,
}

impl ServedImage {
    pub(in crate::daemon) fn new(
        stored: StoredImage,
        cache: &Cache,
        route: ImageRoute,
    ) -> Result<Self, DaemonError> {
        let (routes, blobs) = ImageRoutes::begin(route, stored.bootstrap.blobs(), cache)?;
        let manifest = stored.manifest_digest;
        Ok(ServedImage {
            _owners: blobs.iter().map(|blob| blob.owned_by(manifest)).collect(),
            stored,
            blobs: blobs.into(),
            routes,
            on_files: Mutex::default(),
            erofs_on_disks: Mutex::default(),
            ext4_on_disks: Mutex::default(),
            is_started: AtomicBool::new(false),
        })
    }

    /// Returns whether it has had a mount.
    pub(in crate::daemon) fn is_started(&self) -> bool {
        self.is_started.load(Ordering::Relaxed)
    }

    /// Returns whether this is the first of its mounts.
    pub(in crate::daemon) fn is_first_start(&self) -> bool {
        !self.is_started.swap(true, Ordering::Relaxed)
    }

    /// The prefetcher's view of a start. Traces and lessons are in `repository`.
    pub(in crate::daemon) fn prefetched(&self, repository: Arc<dyn Repository>) -> prefetch::Image {
        prefetch::Image {
            manifest: self.stored.descriptor.clone(),
            config: self.stored.config.clone(),
            bootstrap: self.stored.bootstrap.clone(),
            hot: self.stored.hot.clone(),
            guess: self.stored.guess.clone(),
            blobs: self.weak_blobs(),
            repository,
        }
    }

    /// Its blobs, as long as it is served.
    pub(in crate::daemon) fn weak_blobs(&self) -> Weak<[Arc<CachedBlob>]> {
        Arc::downgrade(&self.blobs)
    }

    /// Lets the image's blobs be fetched by this route, too.
    pub(super) fn add_route(&self, route: ImageRoute) {
        self.routes.add(route, self.stored.bootstrap.blobs(), &self.blobs);
    }

    /// Finds out whether registries are reached by another route by now.
    pub(super) fn refresh(&self) {
        self.routes.refresh(self.stored.bootstrap.blobs(), &self.blobs);
    }

    pub(in crate::daemon) fn manifest_digest(&self) -> Digest {
        self.stored.manifest_digest
    }

    /// The directories of its files.
    pub(in crate::daemon) fn directories(&self) -> Vec<PathBuf> {
        let blobs = self.blobs.iter().filter_map(|blob| Some(blob.path().parent()?.to_owned()));
        blobs.chain([self.stored.directory.clone()]).collect()
    }

    /// Returns whether the image has this very blob.
    pub(in crate::daemon) fn has(&self, blob: &Arc<CachedBlob>) -> bool {
        self.blobs.iter().any(|own| Arc::ptr_eq(own, blob))
    }

    /// Drops the pages of missing chunks, see [`stale_pages::close`]. Blocks.
    pub(in crate::daemon) fn close_gap(&self, mountpoint: &Path) -> io::Result<()> {
        stale_pages::close(mountpoint, &self.stored.bootstrap, &self.blobs, || {}).map(drop)
    }

    /// Drops the pages of missing chunks while readers are served, see [`stale_pages::clean`].
    /// Blocks.
    pub(in crate::daemon) fn forget_missing(&self, mountpoint: &Path) -> io::Result<()> {
        stale_pages::clean(mountpoint, &self.stored.bootstrap, &self.blobs)
    }

    /// Stored bytes of the chunks present, and of all chunks.
    pub(in crate::daemon) fn filled(&self) -> (u64, u64) {
        self.blobs.iter().map(|blob| blob.filled()).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1))
    }

    pub(in crate::daemon) fn bytes_total(&self) -> u64 {
        self.stored.bytes_total
    }

    /// Stored bytes of the chunks that are not on this node.
    pub(in crate::daemon) fn bytes_missing(&self) -> u64 {
        self.blobs.iter().map(|blob| blob.missing_bytes()).sum()
    }

    pub(in crate::daemon) fn counters(&self, attachment: &Attachment) -> Counters {
        let mut counters = Counters {
            events: match attachment {
                Attachment::Bind(mount) => mount.events(),
                Attachment::Fuse(session) => session.requests(),
            },
            ..Counters::default()
        };
        for blob in self.blobs.iter() {
            let stats = blob.stats();
            counters.bytes_fetched += stats.bytes_fetched;
            counters.bytes_copied += stats.bytes_copied;
            counters.requests += stats.requests;
            counters.chunks_ready += stats.chunks_ready;
            counters.chunks_total += stats.chunks_total;
        }
        counters
    }

    /// The image's EROFS mount on the files of its blobs: the existing one, or a new one.
    pub(in crate::daemon) async fn erofs_on_files(
        &self,
        session: &Arc<fanotify::Session>,
        filesystems: &Arc<Filesystems>,
        request: &MountRequest,
        boot: &str,
    ) -> io::Result<Arc<FilesystemMount>> {
        let mut erofs = self.on_files.lock().await;
        if let Some(mount) = erofs.upgrade() {
            return Ok(mount);
        }
        let mut watches = self.watch(session)?;
        let mounted = fanotify::mount(&self.stored.bootstrap_path(), &mut watches)?;
        let record = self.record(&mounted, request, boot)?;
        let mount = filesystems.add(mounted, BlobBackends::Watches(watches), record)?;
        *erofs = Arc::downgrade(&mount);
        self.read_directly_later(&mount);
        Ok(mount)
    }

    /// The image's mount on loop devices, in this format.
    pub(in crate::daemon) async fn on_disks(
        &self,
        format: Format,
        session: &Arc<loop_devices::Session>,
        filesystems: &Arc<Filesystems>,
        request: &MountRequest,
        boot: &str,
    ) -> io::Result<Arc<FilesystemMount>> {
        let mut current = self.current_on_disks(format).lock().await;
        if let Some(mount) = current.upgrade() {
            return Ok(mount);
        }
        let (other, blobs) = (session.clone(), self.blobs.clone());
        let (bootstrap, directory) = (self.stored.bootstrap.clone(), self.stored.directory.clone());
        let make = move || {
            if format == Format::Erofs {
                loop_devices::must_be_read_right(&bootstrap)?;
            }
            let disks = attach(&other, &blobs)?;
            let mounted = match format {
                Format::Erofs => {
                    loop_devices::mount(&other, &image::bootstrap_path(&directory), &disks)?
                }
                Format::Ext4 => ext4::mount(&other, &bootstrap, &directory, &disks)?,
            };
            io::Result::Ok((mounted, disks))
        };
        let (mounted, disks) = blocking(make).await?;
        let loops = disks.iter().map(|disk| disk.number()).collect();
        let record = FilesystemRecord { loops, ..self.record(&mounted, request, boot)? };
        let mount =
            filesystems.add(mounted, BlobBackends::Disks(session.clone(), disks), record)?;
        *current = Arc::downgrade(&mount);
        tokio::spawn(forget_pages_when_quiet(Arc::downgrade(&mount), Arc::downgrade(&self.blobs)));
        Ok(mount)
    }

    fn current_on_disks(&self, format: Format) -> &Mutex<Weak<FilesystemMount>> {
        match format {
            Format::Erofs => &self.erofs_on_disks,
            Format::Ext4 => &self.ext4_on_disks,
        }
    }

    fn record(
        &self,
        mounted: &ImageMount,
        request: &MountRequest,
        boot: &str,
    ) -> io::Result<FilesystemRecord> {
        Ok(FilesystemRecord {
            request: request.clone(),
            manifest_digest: self.stored.manifest_digest,
            backing: mounted.backing().clone(),
            device: mounted.device()?,
            devices: self.blobs.iter().map(|blob| blob.path()).collect(),
            loops: None,
            boot: boot.to_owned(),
        })
    }

    /// The digest of the index by which it has this layer, if that is unconverted.
    pub(in crate::daemon) fn index_of(&self, layer: &Digest) -> Option<Digest> {
        let bootstrap = &self.stored.bootstrap;
        let mut blobs = bootstrap.blobs().iter().zip(bootstrap.tails());
        let (_, tail) = blobs.find(|(blob, _)| blob.id == *layer)?;
        tail.index.map(|index| index.digest)
    }

    /// The layer that this index leads to, if the image has it.
    pub(in crate::daemon) fn blob_of_index(&self, index: &Digest) -> Option<Arc<CachedBlob>> {
        let mut blobs = self.blobs.iter();
        blobs.find(|blob| self.index_of(&blob.id()) == Some(*index)).cloned()
    }

    /// Returns whether it has the blob with this digest.
    pub(in crate::daemon) fn has_blob(&self, blob: &Digest) -> bool {
        self.blobs.iter().any(|own| own.id() == *blob)
    }

    /// Adds the paths of its files that have bytes of `range` in this blob, until there are `most`.
    pub(in crate::daemon) fn files_with(
        &self,
        blob: &Digest,
        range: &Range<Decoded>,
        most: usize,
        files: &mut Vec<String>,
    ) {
        let positions = self.blobs.iter().zip(0..).filter(|(own, _)| own.id() == *blob);
        for (_, position) in positions {
            let position = BlobIndex(position);
            image::files_with(&self.stored.bootstrap, position, range, most, files);
        }
    }

    /// Its blobs in the cache.
    pub(in crate::daemon) fn blobs(&self) -> &[Arc<CachedBlob>] {
        &self.blobs
    }

    /// Takes over a file system of an earlier worker on loop devices, which is bound at one of
    /// `places` or nowhere.
    pub(in crate::daemon) async fn adopt_disks(
        &self,
        session: &Arc<loop_devices::Session>,
        filesystems: &Arc<Filesystems>,
        record: &FilesystemRecord,
        places: &[&Path],
    ) -> io::Result<Option<Arc<FilesystemMount>>> {
        let mut current = self.current_on_disks(record.backing.format()).lock().await;
        let (other, blobs) = (session.clone(), self.blobs.clone());
        let numbers = record.loops.clone().unwrap_or_default();
        let (format, bootstrap) = (record.backing.format(), self.stored.bootstrap.clone());
        let adopt = move || {
            let right = match format {
                Format::Erofs => loop_devices::must_be_read_right(&bootstrap),
                Format::Ext4 => Ok(()),
            };
            adopt(&other, &blobs, &numbers).map(|disks| (disks, right))
        };
        let (disks, right) = blocking(adopt).await?;
        let backends = BlobBackends::Disks(session.clone(), disks);
        for place in places {
            let adopted = ImageMount::adopt(place, record.backing.clone())?;
            if adopted.device()? == record.device {
                let adopted = session.keep(adopted)?;
                let mount = filesystems.keep(adopted, backends, record.clone(), 0);
                match right {
                    Ok(()) => *current = Arc::downgrade(&mount),
                    // An earlier version mounted it nevertheless. Its users keep it, new ones get
                    // another one.
                    Err(error) => {
                        tracing::error!(at = %place.display(), %error, "start its containers again");
                    }
                }
                let (weak, blobs) = (Arc::downgrade(&mount), Arc::downgrade(&self.blobs));
                tokio::spawn(forget_pages_when_quiet(weak, blobs));
                return Ok(Some(mount));
            }
        }
        filesystems.linger(backends, record.clone());
        Ok(None)
    }

    /// Takes over a file system of an earlier worker that is bound `at` some place. `None` when
    /// another file system is mounted there.
    pub(in crate::daemon) async fn adopt(
        &self,
        session: &Arc<fanotify::Session>,
        filesystems: &Arc<Filesystems>,
        record: &FilesystemRecord,
        at: &Path,
        gap: Gap,
    ) -> io::Result<Option<Arc<FilesystemMount>>> {
        let mut erofs = self.on_files.lock().await;
        let adopted = ImageMount::adopt(at, record.backing.clone())?;
        if adopted.device()? != record.device {
            return Ok(None);
        }
        let mut watches = self.watch(session)?;
        let mut stale = 0;
        if gap == Gap::Unheard {
            let (at, bootstrap) = (adopted.path(), self.stored.bootstrap.clone());
            let (blobs, session) = (self.blobs.clone(), session.clone());
            let close =
                move || stale_pages::close(&at, &bootstrap, &blobs, || session.deny_queued());
            stale = tokio::task::spawn_blocking(close).await.map_err(io::Error::other)??;
        }
        watches.iter_mut().for_each(Watch::mounted);
        let mount =
            filesystems.keep(adopted, BlobBackends::Watches(watches), record.clone(), stale);
        *erofs = Arc::downgrade(&mount);
        if !mount.reads_directly()
            && let Err(error) = mount.image.read_through_cache()
        {
            tracing::warn!(%error, "reads may stay direct, as the worker before this one left them");
        }
        self.read_directly_later(&mount);
        Ok(Some(mount))
    }

    fn read_directly_later(&self, mount: &Arc<FilesystemMount>) {
        if mount.reads_directly() {
            let (mount, blobs) = (Arc::downgrade(mount), Arc::downgrade(&self.blobs));
            tokio::spawn(read_directly_when_quiet(mount, blobs));
        }
    }

    /// Marks come before the mount: the kernel decides at open whether a file has events.
    pub(in crate::daemon) fn watch(
        &self,
        session: &Arc<fanotify::Session>,
    ) -> io::Result<Vec<Watch>> {
        let watch = |blob: &Arc<CachedBlob>| {
            session.watch(blob.clone(), self.manifest_digest()).map_err(io::Error::other)
        };
        self.blobs.iter().map(watch).collect()
    }

    /// Mounts the image, or its disks, with FUSE.
    pub(in crate::daemon) async fn fuse(
        &self,
        record: &MountRecord,
        suid: Suid,
        place: MountPoint,
        link: &Arc<Link>,
    ) -> io::Result<Attachment> {
        let MountRequest { mountpoint, image: name, .. } = record.request.clone();
        let (image, link) = (self.manifest_digest(), link.clone());
        let (bootstrap, blobs) = self.fuse_content();
        let driver = record.driver;
        let session = tokio::task::spawn_blocking(move || {
            let key = mount_key(&mountpoint);
            let target = MountTarget { mountpoint: &mountpoint, key: &key, image, place };
            match driver {
                DriverChoice::Disks => {
                    let disks = DiskFilesystem::new(bootstrap, blobs).map_err(io::Error::other)?;
                    fuse::Session::mount(disks, target, &name, suid, &link)
                }
                _ => {
                    let tree = ImageFilesystem::new(bootstrap, blobs).map_err(io::Error::other)?;
                    fuse::Session::mount(tree, target, &name, suid, &link)
                }
            }
            .map_err(io::Error::other)
        });
        session.await.map_err(io::Error::other)?.map(|session| Attachment::Fuse(Arc::new(session)))
    }

    /// Serves a FUSE mount of an earlier worker.
    pub(in crate::daemon) fn resume_fuse(
        &self,
        place: MountTarget<'_>,
        left: fuse::Left,
        record: &MountRecord,
        link: &Arc<Link>,
    ) -> io::Result<Attachment> {
        let (bootstrap, blobs) = self.fuse_content();
        let session = match record.driver {
            DriverChoice::Disks => {
                let disks = DiskFilesystem::new(bootstrap, blobs).map_err(io::Error::other)?;
                fuse::Session::resume(disks, left, place, link)
            }
            _ => {
                let tree = ImageFilesystem::new(bootstrap, blobs).map_err(io::Error::other)?;
                let tree = if record.journal { tree } else { tree.with_acls_checked() };
                fuse::Session::resume(tree, left, place, link)
            }
        };
        session.map(|session| Attachment::Fuse(Arc::new(session))).map_err(io::Error::other)
    }

    fn fuse_content(&self) -> (Arc<Bootstrap<Map>>, Blobs) {
        let blobs = Blobs { blobs: self.blobs.clone(), runtime: Handle::current() };
        (self.stored.bootstrap.clone(), blobs)
    }
}

/// The loop devices of an image's blobs. Blocks.
fn attach(
    session: &loop_devices::Session,
    blobs: &[Arc<CachedBlob>],
) -> io::Result<Vec<Arc<loop_devices::Disk>>> {
    let disks: io::Result<Vec<_>> = blobs.iter().map(|blob| session.disk(blob.clone())).collect();
    let disks = disks?;
    disks.iter().try_for_each(|disk| disk.attach())?;
    Ok(disks)
}

/// The same, of an earlier worker. Blocks.
fn adopt(
    session: &loop_devices::Session,
    blobs: &[Arc<CachedBlob>],
    numbers: &[u32],
) -> io::Result<Vec<Arc<loop_devices::Disk>>> {
    if blobs.len() != numbers.len() {
        return Err(io::Error::other("it has another number of blobs than loop devices"));
    }
    session.wait_for_others()?;
    let adopt = |(blob, number): (&Arc<CachedBlob>, &u32)| {
        let disk = session.disk(blob.clone())?;
        disk.adopt(*number).map(|()| disk)
    };
    blobs.iter().zip(numbers).map(adopt).collect()
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}
