//! An image while it is served: its blobs in the cache and its mounts.

use std::{
    fs, io,
    ops::Range,
    path::Path,
    sync::{Arc, Weak},
    time::Duration,
};

use lazuli_image::{BlobIndex, Decoded};
use lazuli_registry::Repository;
use tokio::{runtime::Handle, sync::Mutex};

use super::DaemonError;
use crate::{
    cache::{Cache, CacheError, CachedBlob},
    image::StoredImage,
    kernel::{
        errno::errno,
        fanotify::{self, Watch},
        fuse::{self, BlobReader, FuseError, ImageFilesystem},
        mount::{self, Erofs},
    },
    source::{RepositorySource, Retry},
};

/// How long a source that fails is asked again before its readers get EIO.
const DEADLINE: Duration = Duration::from_secs(60);

/// How often a detached mount is asked whether its last user is gone.
const LINGER: Duration = Duration::from_secs(1);

/// A container that fetched nothing for so long has started: 5 s is well above the longest pause between two
/// fetches of one start that was seen, and well below the life of anything worth tuning for.
const QUIET: Duration = Duration::from_secs(5);

/// One image. All of its mounts share it.
#[derive(Debug)]
pub(super) struct ServedImage {
    stored: StoredImage,
    blobs: Arc<[Arc<CachedBlob>]>,
    erofs: Mutex<Weak<ErofsMount>>,
}

/// What one mount point holds on to.
#[derive(Debug)]
pub(super) enum Attachment {
    /// A bind mount of the image's EROFS mount.
    Bind(Arc<ErofsMount>),
    /// A FUSE connection.
    Fuse(Arc<fuse::Session>),
}

/// What was done for an image so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    pub(super) bytes_fetched: u64,
    pub(super) requests: u64,
    pub(super) chunks_ready: u64,
    pub(super) chunks_total: u64,
    pub(super) events: u64,
}

impl ServedImage {
    pub(super) fn new(
        stored: StoredImage,
        cache: &Cache,
        repository: &Arc<dyn Repository>,
        deadline: Option<Duration>,
    ) -> Result<Self, CacheError> {
        let blobs = cached(&stored, cache, repository, deadline)?;
        Ok(ServedImage { stored, blobs: blobs.into(), erofs: Mutex::default() })
    }

    /// Lets the image's blobs be fetched from `repository`, too.
    pub(super) fn add_source(
        &self,
        cache: &Cache,
        repository: &Arc<dyn Repository>,
        deadline: Option<Duration>,
    ) -> Result<(), DaemonError> {
        cached(&self.stored, cache, repository, deadline)?;
        Ok(())
    }

    pub(super) fn bytes_total(&self) -> u64 {
        self.stored.bytes_total
    }

    pub(super) fn counters(&self, attachment: &Attachment) -> Counters {
        let mut counters = Counters {
            events: match attachment {
                Attachment::Bind(mount) => mount.watches.iter().map(Watch::events).sum(),
                Attachment::Fuse(session) => session.requests(),
            },
            ..Counters::default()
        };
        for blob in self.blobs.iter() {
            let stats = blob.stats();
            counters.bytes_fetched += stats.bytes_fetched;
            counters.requests += stats.requests;
            counters.chunks_ready += stats.chunks_ready;
            counters.chunks_total += stats.chunks_total;
        }
        counters
    }

    /// Binds the image's EROFS mount to `mountpoint`; makes it at `at` when this is its first user, or
    /// takes over the one that is there when `adopt` says so.
    pub(super) async fn bind(
        &self,
        session: &Arc<fanotify::Session>,
        at: &Path,
        mountpoint: &Path,
        adopt: bool,
    ) -> io::Result<Attachment> {
        let mut erofs = self.erofs.lock().await;
        let mount = match erofs.upgrade() {
            Some(mount) => mount,
            None => {
                let mount = Arc::new(self.mount_erofs(session, at, adopt)?);
                *erofs = Arc::downgrade(&mount);
                tokio::spawn(read_directly_when_quiet(Arc::downgrade(&mount), self.blobs.clone()));
                mount
            }
        };
        let bound = if adopt { Ok(()) } else { mount::bind(at, mountpoint) };
        let attachment = Attachment::Bind(mount);
        match bound {
            Ok(()) => Ok(attachment),
            Err(error) => {
                attachment.release();
                Err(error)
            }
        }
    }

    fn mount_erofs(
        &self,
        session: &Arc<fanotify::Session>,
        at: &Path,
        adopt: bool,
    ) -> io::Result<ErofsMount> {
        // Marks come before the mount: the kernel decides at open whether a file has events.
        let watch = |blob: &Arc<CachedBlob>| session.watch(blob.clone()).map_err(io::Error::other);
        let mut watches = self.blobs.iter().map(watch).collect::<io::Result<Vec<_>>>()?;
        let erofs = if adopt {
            fanotify::adopt(&mut watches, at)?
        } else {
            fs::create_dir_all(at)?;
            fanotify::mount(&self.stored.bootstrap_path(), &mut watches, at)?
        };
        Ok(ErofsMount { erofs, watches })
    }

    /// Mounts the image with FUSE.
    pub(super) async fn fuse(&self, mountpoint: &Path, name: &str) -> io::Result<Attachment> {
        let blobs = Blobs { blobs: self.blobs.clone(), runtime: Handle::current() };
        let filesystem =
            ImageFilesystem::new(self.stored.bootstrap.clone(), blobs).map_err(io::Error::other)?;
        let (mountpoint, name) = (mountpoint.to_owned(), name.to_owned());
        let session = tokio::task::spawn_blocking(move || {
            fuse::Session::mount(filesystem, &mountpoint, &name).map_err(io::Error::other)
        });
        let session = session.await.map_err(io::Error::other)??;
        Ok(Attachment::Fuse(Arc::new(session)))
    }
}

fn cached(
    stored: &StoredImage,
    cache: &Cache,
    repository: &Arc<dyn Repository>,
    deadline: Option<Duration>,
) -> Result<Vec<Arc<CachedBlob>>, CacheError> {
    let blobs = stored.bootstrap.blobs().iter().map(|blob| {
        let source = RepositorySource::new(repository.clone(), blob.id, blob.stored_size);
        cache.blob(blob, Arc::new(Retry::new(source, deadline.unwrap_or(DEADLINE))))
    });
    blobs.collect()
}

impl Attachment {
    /// Removes the mount; fails with [`io::ErrorKind::ResourceBusy`] while somebody uses it.
    pub(super) async fn unmount(&self, mountpoint: &Path) -> io::Result<()> {
        match self {
            Attachment::Bind(_) => mount::unmount(mountpoint),
            Attachment::Fuse(session) => {
                let session = session.clone();
                let unmount = tokio::task::spawn_blocking(move || session.unmount());
                unmount.await.map_err(io::Error::other)?.map_err(|error| match error {
                    // fusermount3 has words only.
                    FuseError::Unmount { error, .. } if error.to_string().contains("busy") => {
                        io::ErrorKind::ResourceBusy.into()
                    }
                    FuseError::Unmount { error, .. } => error,
                    error => io::Error::other(error),
                })
            }
        }
    }

    /// Takes the mount out of the tree, with whatever uses it.
    pub(super) async fn detach(&self, mountpoint: &Path) -> io::Result<()> {
        match self {
            Attachment::Bind(_) => mount::detach(mountpoint),
            Attachment::Fuse(session) => {
                let session = session.clone();
                let detach = tokio::task::spawn_blocking(move || session.detach());
                detach.await.map_err(io::Error::other)?.map_err(io::Error::other)
            }
        }
    }

    /// Lets go after the mount was removed.
    pub(super) fn release(self) {
        if let Attachment::Bind(mount) = self
            && let Some(mount) = Arc::into_inner(mount)
        {
            mount.release();
        }
    }

    /// Lets go after the mount was detached, when nobody will serve it any more.
    pub(super) fn abandon(self) {
        if let Attachment::Bind(mount) = self
            && let Some(mount) = Arc::into_inner(mount)
        {
            mount.abandon();
        }
    }
}

/// The one EROFS mount of an image, and the marks on the files behind it.
#[derive(Debug)]
pub(super) struct ErofsMount {
    erofs: Erofs,
    watches: Vec<Watch>,
}

impl ErofsMount {
    /// Unmounts. Another mount namespace or an open file may keep the file system alive, and its readers
    /// would see holes without marks, so the marks stay as long as it does.
    fn release(self) {
        self.detach();
        let ErofsMount { erofs, watches } = self;
        tokio::spawn(async move {
            while erofs.is_alive() {
                tokio::time::sleep(LINGER).await;
            }
            drop(watches);
        });
    }

    /// Unmounts; if something keeps the file system alive, the files behind it are cut off, so that reads of
    /// what is not cached by the kernel fail with EIO instead of showing holes.
    fn abandon(self) {
        self.detach();
        if self.erofs.is_alive() {
            for watch in self.watches {
                watch.cut_off();
            }
        }
    }

    fn detach(&self) {
        let path = self.erofs.path();
        if let Err(error) = mount::detach(path) {
            tracing::warn!(path = %path.display(), %error, "cannot detach");
        }
        let _ = fs::remove_dir(path);
    }
}

/// Turns a mount to direct reads when its start is over: when nothing has arrived for [`QUIET`], or
/// everything is here.
async fn read_directly_when_quiet(mount: Weak<ErofsMount>, blobs: Arc<[Arc<CachedBlob>]>) {
    let fetched = || blobs.iter().map(|blob| blob.stats().bytes_fetched).sum::<u64>();
    let mut before = None;
    while !blobs.iter().all(|blob| blob.is_complete()) {
        let now = Some(fetched());
        if now == before {
            break;
        }
        before = now;
        tokio::time::sleep(QUIET).await;
        if mount.strong_count() == 0 {
            return;
        }
    }
    let Some(mount) = mount.upgrade() else { return };
    match mount.erofs.read_directly() {
        // The copies that buffered reads left behind are in nobody's use now.
        Ok(()) => blobs.iter().for_each(|blob| blob.forget_pages()),
        Err(error) => tracing::info!(%error, "reads stay buffered"),
    }
}

/// The cache as FUSE asks it.
#[derive(Debug)]
struct Blobs {
    blobs: Arc<[Arc<CachedBlob>]>,
    runtime: Handle,
}

impl Blobs {
    fn get(&self, blob: BlobIndex) -> io::Result<&Arc<CachedBlob>> {
        self.blobs.get(usize::from(blob.0)).ok_or_else(|| io::Error::other("no such blob"))
    }
}

impl BlobReader for Blobs {
    fn ensure(&self, blob: BlobIndex, range: Range<Decoded>) -> io::Result<()> {
        let blob = self.get(blob)?;
        if blob.is_ready(&range) {
            return Ok(());
        }
        self.runtime.block_on(blob.ensure(range)).map_err(|error| {
            tracing::error!(%error, "a reader gets an error");
            errno(&error).into()
        })
    }

    fn file(&self, blob: BlobIndex) -> io::Result<&fs::File> {
        Ok(self.get(blob)?.file())
    }
}
