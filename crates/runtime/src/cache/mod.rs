//! The node's cache of decoded blobs.
//!
//! ```text
//! <dir>/lock                                 held by the one process that uses the directory
//! <dir>/blobs/<blob id>-<layout digest>/     one per blob and per claim about it, see `store`
//! <dir>/incoming/                            blobs of which not all is known yet, see `import`
//! ```
//!
//! [`CachedBlob::ensure`] is the one operation that every driver uses. It returns when the range is
//! in the blob's file and every chunk of it was checked against its digest. Images with the same
//! description of a blob share its files. docs/cache.md explains what survives which crash.

use lazuli_sys::path_error::{At as _, PathError};

mod allowed_repositories;
mod blob;
mod budget;
mod chunk_index;
mod eviction_order;
mod extra_files;
mod failed_reads;
mod import;
mod keep_free;
mod layout;
mod pausing_clock;
mod readahead;
mod ready;
mod released_readers;
mod single_flight;
mod store;

#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    fs::{self, DirBuilder, File, TryLockError},
    io,
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt as _, MetadataExt as _},
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock, Weak},
    time::Duration,
};

use lazuli_image::{Blob, Digest};
use tokio::sync::mpsc::Receiver;

pub use self::{
    blob::{BlobStats, CachedBlob, Guard, Scrubbed, WrongChunk},
    budget::EvictionStats,
    keep_free::KeepFree,
};
pub(crate) use self::{
    blob::{BytesFrom, Listener},
    extra_files::ExtraFiles,
    failed_reads::FailedRead,
    ready::ReadyMap,
};
use self::{
    budget::Budget, chunk_index::ChunkIndex, failed_reads::FailedReads, layout::Layout,
    pausing_clock::Clock, released_readers::Released,
};
use crate::{
    metrics::Metrics,
    sharing::workers::{UrgentFetch, Workers},
    source::{BlobSource, link_speed::LinkSpeed},
    sync::lock,
};

/// How the cache behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// On a miss, missing neighbours are fetched too until the request has this many stored bytes,
    /// and more when readers continue there. 0 fetches only the requested chunks.
    pub amplify: u64,
    /// Time between the first chunk that is written and the moment when it is made to survive a
    /// power cut.
    pub flush_after: Duration,
    /// Longest wait of a reader for data, over all sources and retries, before it gets an error.
    pub deadline: Duration,
    /// Maximum size of the cache on the disk in bytes; `None` for no limit.
    pub max_bytes: Option<u64>,
    /// Space to keep free on the disk, as far as evicting blobs that no image uses achieves it.
    pub keep_free: Option<KeepFree>,
    /// Time after the machine's boot in which no blob is evicted for [`Settings::keep_free`].
    pub after_boot: Duration,
    /// Directories whose subdirectories' files count as well.
    pub metadata: Vec<PathBuf>,
    /// How long a chunk of a blob in use must not have been asked for before it may be given up.
    /// Has to be longer than any reader needs from the kernel's question to the page.
    pub grace: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        // Measured, see docs/measurements/cache.md: less costs round trips, more costs unread
        // bytes.
        Settings {
            amplify: 256 << 10,
            flush_after: Duration::from_secs(5),
            deadline: Duration::from_secs(60),
            max_bytes: None,
            keep_free: None,
            // Nothing is mounted at boot: the kubelet and podman start containers after the daemon.
            after_boot: Duration::from_secs(300),
            metadata: Vec::new(),
            grace: Duration::from_secs(60),
        }
    }
}

/// Why the cache or a blob in it cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// Another process uses the directory.
    #[error("{} is in use by another process", path.display())]
    InUse {
        /// The cache directory.
        path: PathBuf,
    },
    /// A file of the cache cannot be used.
    #[error("{}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// An image's description of a blob is impossible.
    #[error("blob {blob}: {problem}")]
    Layout {
        /// The blob.
        blob: Digest,
        /// The chunk, and the problem with it.
        problem: String,
    },
}

impl From<PathError> for CacheError {
    fn from(PathError { path, source }: PathError) -> Self {
        CacheError::Io { path, source }
    }
}

/// A cache directory in use by this process.
#[derive(Debug)]
pub struct Cache {
    dir: PathBuf,
    settings: Settings,
    boot: String,
    workers: Arc<Workers>,
    blobs: Mutex<HashMap<String, Weak<CachedBlob>>>,
    /// See [`Cache::give`], by device and inode.
    given: store::Given,
    budget: Arc<Budget>,
    /// See [`Cache::evict_extra_files`].
    extra_files: OnceLock<Arc<dyn ExtraFiles>>,
    /// Chunks that blobs can copy from each other.
    chunk_index: ChunkIndex,
    /// Readers that may be on their way to a page.
    released: Arc<Released>,
    /// Since this process began to use it.
    clock: Arc<Clock>,
    metrics: Arc<Metrics>,
    failed_reads: FailedReads,
    own: Weak<Cache>,
    /// Locked as long as the cache or one of its blobs is open.
    lock: Arc<File>,
}

impl Cache {
    /// Uses `dir`, which is made when it does not exist, with everything that is in it. Fails with
    /// [`CacheError::InUse`] while another process does.
    ///
    /// # Panics
    /// Outside a tokio runtime: the cache runs its fetches there.
    pub fn open(dir: &Path, settings: Settings) -> Result<Arc<Self>, CacheError> {
        let boot = Path::new("/proc/sys/kernel/random/boot_id");
        let boot = fs::read_to_string(boot).at(boot)?;
        Self::open_in_boot(dir, settings, boot)
    }

    fn open_in_boot(dir: &Path, settings: Settings, boot: String) -> Result<Arc<Self>, CacheError> {
        let blobs = dir.join("blobs");
        let create = DirBuilder::new().recursive(true).mode(0o700).create(&blobs);
        create.at(&blobs)?;
        let path = dir.join("lock");
        let lock = File::options().write(true).create(true).truncate(false).open(&path);
        let lock = lock.at(&path)?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => CacheError::InUse { path: dir.to_owned() },
            TryLockError::Error(source) => CacheError::Io { path, source },
        })?;
        budget::sweep(&blobs);
        import::sweep(dir).at(dir)?;
        Ok(Arc::new_cyclic(|own| Cache {
            dir: blobs,
            settings,
            boot,
            workers: Arc::new(Workers::new()),
            blobs: Mutex::default(),
            given: Mutex::default(),
            budget: Arc::default(),
            extra_files: OnceLock::new(),
            chunk_index: ChunkIndex::default(),
            released: Arc::default(),
            clock: Arc::new(Clock::new()),
            metrics: Arc::default(),
            failed_reads: FailedReads::new(),
            own: own.clone(),
            lock: Arc::new(lock),
        }))
    }

    /// Gives the cache data files that an earlier process opened and marked. The cache uses them in
    /// place of opening those files anew, because a file that is opened under a mark raises events
    /// for its own user.
    pub fn give(&self, files: Vec<OwnedFd>) {
        let mut given = lock(&self.given);
        for file in files.into_iter().map(File::from) {
            if let Ok(metadata) = file.metadata() {
                given.insert((metadata.dev(), metadata.ino()), file);
            }
        }
    }

    /// Removes and returns given descriptors that are not in use.
    pub fn take_back(&self) -> Vec<File> {
        let mut given = lock(&self.given);
        given.drain().map(|(_, file)| file).collect()
    }

    /// Returns the channel that reports reads that ended with an error, once. Not every such read
    /// is reported.
    pub(crate) fn failed_reads(&self) -> Option<Receiver<FailedRead>> {
        self.failed_reads.listen()
    }

    /// Counters of its process.
    pub(crate) fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Returns whether any reader waits for data.
    pub(crate) fn is_awaited(&self) -> bool {
        self.workers.is_awaited()
    }

    /// Counts a fetch that a start, a pull or a client's order waits for.
    pub(crate) fn urgent_fetch(&self) -> UrgentFetch<'_> {
        self.workers.urgent_fetch()
    }

    /// Returns whether there is any such fetch.
    pub(crate) fn has_urgent_fetches(&self) -> bool {
        self.workers.has_urgent_fetches()
    }

    /// The speed at which bytes of blobs arrive.
    pub(crate) fn link_speed(&self) -> &LinkSpeed {
        self.workers.link_speed()
    }

    /// Returns whether this many decoded bytes fit into [`Settings::max_bytes`].
    pub(crate) fn may_hold(&self, bytes: u64) -> bool {
        self.settings.max_bytes.is_none_or(|max| bytes <= max)
    }

    /// Returns whether a fiftieth of the disk stays free after `bytes` more. With less, prefetching
    /// on a hint would harm others.
    pub(crate) fn has_room_for_hints(&self, bytes: u64) -> bool {
        self.leaves_free(bytes, 50)
    }

    /// Returns whether a tenth of [`Settings::max_bytes`] stays free after `bytes` more, and on the
    /// disk [`Settings::keep_free`], but no less than for hints, or else a tenth. With less,
    /// background work would slow others down, and eviction would undo it. Blocks briefly.
    pub(crate) fn has_room_for_the_rest(&self, bytes: u64) -> bool {
        let on_disk = match self.settings.keep_free {
            Some(_) => self.has_room_for_hints(bytes) && self.lacking(bytes) == 0,
            None => self.leaves_free(bytes, 10),
        };
        let max = self.settings.max_bytes;
        let fits = |max: u64| self.usage().is_ok_and(|(_, used)| used + bytes <= max - max / 10);
        on_disk && max.is_none_or(fits)
    }

    /// Returns whether `bytes` more may come that someone has asked for and waits for: as for
    /// hints, and no more than [`Settings::max_bytes`], for which others are evicted. Blocks
    /// briefly.
    pub(crate) fn has_room_on_request(&self, bytes: u64) -> bool {
        self.has_room_for_hints(bytes) && self.may_hold(bytes)
    }

    /// Returns whether one in `parts` parts of the disk stays free.
    fn leaves_free(&self, bytes: u64, parts: u64) -> bool {
        rustix::fs::statvfs(&self.dir).is_ok_and(|disk| {
            let (all, free) = (disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize);
            free.saturating_sub(bytes) >= all / parts
        })
    }

    /// The blobs that are in use.
    pub fn in_use(&self) -> Vec<Arc<CachedBlob>> {
        let blobs = lock(&self.blobs);
        blobs.values().filter_map(Weak::upgrade).collect()
    }

    /// Opens the blob as one image describes it. Images with the same description share the
    /// [`CachedBlob`]; `source` becomes the first of its sources.
    pub fn blob(
        &self,
        blob: &Blob,
        source: Arc<dyn BlobSource>,
    ) -> Result<Arc<CachedBlob>, CacheError> {
        let cached = self.unsourced(blob)?;
        cached.attach(source);
        Ok(cached)
    }

    /// The same without a source.
    pub(crate) fn unsourced(&self, blob: &Blob) -> Result<Arc<CachedBlob>, CacheError> {
        self.open_blob(Layout::new(blob)?)
    }

    /// The same without a source, if the cache has anything of the blob.
    pub fn find(&self, blob: &Blob) -> Result<Option<Arc<CachedBlob>>, CacheError> {
        let layout = Layout::new(blob)?;
        if !self.dir.join(layout.key()).is_dir() {
            return Ok(None);
        }
        self.open_blob(layout).map(Some)
    }

    /// The name of the directory for this description of a blob.
    pub fn directory_name(blob: &Blob) -> Result<String, CacheError> {
        Ok(Layout::new(blob)?.key())
    }

    /// The names of all blobs' directories, with the bytes that they occupy.
    pub fn directories(&self) -> Result<Vec<(String, u64)>, CacheError> {
        let entries = fs::read_dir(&self.dir).at(&self.dir)?.flatten();
        let named = entries.filter_map(|e| Some((e.file_name().into_string().ok()?, e.path())));
        Ok(named.map(|(name, path)| (name, occupied(&path).0)).collect())
    }

    /// Returns whether the cache may have files of a blob.
    pub(crate) fn has_files_of(&self, blob: &Digest) -> bool {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let hex = blob.hex();
        entries.into_iter().any(|e| e.file_name().as_encoded_bytes().starts_with(hex.as_bytes()))
    }

    fn open_blob(&self, layout: Layout) -> Result<Arc<CachedBlob>, CacheError> {
        let key = layout.key();
        let mut blobs = lock(&self.blobs);
        if let Some(cached) = blobs.get(&key).and_then(Weak::upgrade) {
            return Ok(cached);
        }
        let cached = CachedBlob::open(self.dir.join(&key), layout, self)?;
        blobs.retain(|_, blob| blob.strong_count() > 0);
        blobs.insert(key, Arc::downgrade(&cached));
        Ok(cached)
    }

    /// Blobs that have files in the cache, and the bytes that these and [`Settings::metadata`]
    /// occupy on the disk.
    pub fn usage(&self) -> Result<(u64, u64), CacheError> {
        let (mut blobs, mut bytes) = (0, 0);
        for blob in fs::read_dir(&self.dir).at(&self.dir)?.flatten() {
            blobs += 1;
            bytes += occupied(&blob.path()).0;
        }
        let beside = self.settings.metadata.iter().flat_map(fs::read_dir).flatten().flatten();
        bytes += beside.map(|directory| occupied(&directory.path()).0).sum::<u64>();
        Ok((blobs, bytes))
    }

    /// Makes everything that is ready survive a power cut, see [`CachedBlob::flush`]. For the end
    /// of a process; otherwise the cache flushes by itself.
    pub fn flush(&self) {
        let blobs = lock(&self.blobs);
        let blobs: Vec<_> = blobs.values().filter_map(Weak::upgrade).collect();
        for blob in blobs {
            if let Err(error) = blob.flush() {
                tracing::warn!(?blob, %error, "cannot flush the cache");
            }
        }
    }
}

/// Disk usage in bytes and number of the files in `dir`. Files that disappear meanwhile are not
/// counted.
pub(crate) fn occupied(dir: &Path) -> (u64, u64) {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    // st_blocks counts 512 bytes, whatever the file system's block size.
    let sizes = files.filter_map(|file| Some(file.metadata().ok()?.blocks() * 512));
    sizes.fold((0, 0), |(bytes, files), size| (bytes + size, files + 1))
}
