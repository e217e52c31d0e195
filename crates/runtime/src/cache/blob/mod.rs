//! One blob in the cache.
//!
//! Its state has parts, each with its own lock and file: which chunks are present ([`residency`]),
//! the files on disk ([`mod@file`]), the kernel's events ([`guard`]), and where bytes come from
//! ([`Sources`]). A method of one part is in the part's file; each operation on several parts has a
//! file of its own.

mod commit;
mod copy;
mod disk_full;
mod ensure;
mod evict;
mod file;
mod foresight;
mod guard;
mod listeners;
mod possession;
mod prefetch;
mod recheck;
mod residency;
mod scrub;
mod settle;
mod stats;
mod transfer;

use std::{
    fmt,
    fs::File,
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    sync::{Arc, Weak},
};

use lazuli_image::{Chunk, Decoded, Digest};

pub(in crate::cache) use self::guard::Hold;
use self::{
    file::BlobFile, foresight::Foresight, guard::Guarded, listeners::Listeners,
    residency::Residency, stats::Counters,
};
pub use self::{
    guard::Guard,
    scrub::{Scrubbed, WrongChunk},
    stats::BlobStats,
};
pub(crate) use self::{listeners::Listener, prefetch::BytesFrom};
use super::{
    Cache, CacheError, Settings,
    allowed_repositories::AllowedRepositories,
    layout::Layout,
    readahead::Runs,
    released_readers::{BlobKey, Released},
    store::{Store, is_full},
};
use crate::{
    error::ReadError,
    fetch::Fetch,
    kernel::pages,
    metrics::Metrics,
    sharing::{
        Account, Owner,
        account::Owners,
        priority_semaphore::Claim,
        workers::{Priority, Workers},
    },
    source::{BlobSource, request::Meter, sources::Sources, tracked_source::TrackedSource},
};

/// Fetches that may leave a chunk missing before the reader gets an error. Two reasons are known: a
/// bug that abandons a fetch, and a chunk that arrives after minutes and is evicted at once.
const TAKEOVERS: usize = 3;

/// One blob in the cache, as a set of images describes it.
///
/// The file has the decoded bytes of every chunk at the chunk's own address, zeros between chunks,
/// and holes where chunks are missing. Only [`CachedBlob::ensure`] tells which is which.
pub struct CachedBlob {
    key: BlobKey,
    layout: Layout,
    settings: Settings,
    residency: Residency,
    file: BlobFile,
    allowed: Arc<AllowedRepositories>,
    guarded: Guarded,
    sources: Sources,
    /// The sequential reads of readers.
    runs: Runs,
    counters: Counters,
    metrics: Arc<Metrics>,
    foresight: Foresight,
    listeners: Listeners,
    /// The images in use that have it.
    owners: Owners,
    workers: Arc<Workers>,
    released: Arc<Released>,
    cache: Weak<Cache>,
    _lock: Arc<File>,
}

impl CachedBlob {
    pub(super) fn open(
        dir: PathBuf,
        layout: Layout,
        cache: &Cache,
    ) -> Result<Arc<Self>, CacheError> {
        let allowed = Arc::new(AllowedRepositories::read(&dir));
        let (store, found) = Store::open(dir, &layout, cache)?;
        let chunks = layout.chunks().len();
        let sealed: &[u64] = if found.sealed { &found.durable } else { &[] };
        let runs = Runs::new(layout.is_one_file());
        let residency = Residency::new(chunks, &found.known, sealed, cache.clock.clone());
        let blob = Arc::new(CachedBlob {
            key: BlobKey::new(),
            layout,
            settings: cache.settings.clone(),
            guarded: Guarded::new(residency.is_full()),
            residency,
            file: BlobFile::new(store, found),
            allowed,
            sources: Sources::default(),
            runs,
            counters: Counters::default(),
            metrics: cache.metrics.clone(),
            foresight: Foresight::new(chunks, cache.metrics.clone()),
            listeners: Listeners::default(),
            owners: Owners::default(),
            workers: cache.workers.clone(),
            released: cache.released.clone(),
            cache: cache.own.clone(),
            _lock: cache.lock.clone(),
        });
        blob.offer((0..chunks).filter(|at| blob.has(*at)));
        if blob.residency.suspect_chunks() > 0 {
            blob.check_soon();
            blob.flush_soon();
        }
        Ok(blob)
    }

    /// Notes that the kernel is about to let a thread through to a range. The range stays until the
    /// thread was seen to have left the kernel's wait, even if it is frozen there. 0 is a thread
    /// that the kernel does not name.
    pub fn let_through(&self, thread: i32, range: &Range<Decoded>) {
        self.released.note(thread, self.key, self.layout.chunks_in(range));
    }

    /// Returns whether the file has every chunk of the range, checked by this process or not.
    pub fn is_filled(&self, range: &Range<Decoded>) -> bool {
        self.layout.chunks_in(range).all(|at| self.has(at))
    }

    /// The repositories whose images may use what is here of the blob.
    pub(crate) fn allowed_repositories(&self) -> &AllowedRepositories {
        &self.allowed
    }

    /// Notifies `listener` of the chunks that drivers ask for, as long as it lives.
    pub(crate) fn tell(&self, listener: &Arc<Listener>) {
        self.listeners.add(listener);
    }

    /// Adds a source, which becomes the first that is asked.
    pub(crate) fn attach(&self, source: Arc<dyn BlobSource>) {
        self.sources.attach(source);
    }

    /// Asks `source` no more, also for reads that wait.
    pub(crate) fn detach(&self, source: &Arc<dyn BlobSource>) {
        self.sources.detach(source);
    }

    /// Its sources, the most preferred first.
    pub(crate) fn sources(&self) -> Vec<Arc<TrackedSource>> {
        self.sources.list()
    }

    /// Charges the image with this manifest for the blob, until the result is dropped.
    #[must_use]
    pub fn owned_by(&self, image: Digest) -> Owner {
        self.owners.add(image)
    }

    /// The account that is charged at this moment.
    pub fn account(&self) -> Account {
        self.owners.account(self.id())
    }

    /// Logs a failed read. `thread` is the kernel's thread id; 0 if unknown.
    pub(crate) fn report_failed_read(
        &self,
        range: &Range<Decoded>,
        error: &ReadError,
        thread: Option<i32>,
    ) {
        if let Some(cache) = self.cache.upgrade() {
            let thread = thread.filter(|thread| *thread > 0);
            cache.failed_reads.report(self.account(), self.id(), range, error, thread);
        }
    }

    /// Runs `job` for the blob on a thread that may block. Panics when the job does.
    async fn run<R: Send + 'static>(
        &self,
        priority: Priority,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> R {
        self.workers.run(self.account(), priority, job).await
    }

    /// How to get the blob's stored bytes on this claim.
    fn fetch<'a>(&'a self, claim: &'a Claim) -> Fetch<'a> {
        let (sources, memory) = (&self.sources, self.workers.memory());
        Fetch { blob: self.id(), sources, memory, claim, meter: self }
    }

    /// Returns whether a reader waits for data of the images that have the blob.
    pub(crate) fn has_readers(&self) -> bool {
        self.workers.has_readers(&self.account())
    }

    /// Returns whether no fetch is in flight.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.residency.is_idle()
    }

    /// The fetches of the blob, held up as long as the result lives.
    #[cfg(test)]
    pub(super) fn hold_up_fetches(&self) -> impl Sized + '_ {
        self.residency.lock()
    }

    pub(crate) fn chunk(&self, at: usize) -> &Chunk {
        &self.layout.chunks()[at]
    }

    /// The stored bytes of a chunk.
    fn stored_bytes(&self, at: usize) -> u64 {
        self.chunk(at).stored_share()
    }

    pub(super) fn key(&self) -> BlobKey {
        self.key
    }

    fn write_error(&self, error: io::Error) -> ReadError {
        let path = self.path();
        if is_full(&error) {
            return ReadError::NoSpace { blob: self.id(), path };
        }
        ReadError::Cache { path, source: Arc::new(error) }
    }

    /// SHA-256 of the blob as stored.
    pub fn id(&self) -> Digest {
        self.layout.blob().id
    }

    /// The file with the decoded bytes, open for reading and writing. It was opened before the file
    /// had marks, so using it raises no events.
    pub fn file(&self) -> &File {
        self.file.store().data()
    }

    /// The path of [`CachedBlob::file`].
    pub fn path(&self) -> PathBuf {
        self.file.store().data_path()
    }

    /// The digest of this description of it.
    pub(crate) fn description(&self) -> Digest {
        *self.layout.digest()
    }

    /// See [`lazuli_image::Blob::is_one_file`].
    pub(crate) fn is_one_file(&self) -> bool {
        self.layout.is_one_file()
    }

    /// All of its chunks.
    pub(crate) fn chunks(&self) -> &[Chunk] {
        self.layout.chunks()
    }

    /// Bytes of [`CachedBlob::file`]: all decoded bytes, in whole blocks.
    pub fn file_size(&self) -> u64 {
        self.layout.file_size()
    }

    /// Lets the kernel drop its copies of the file's clean pages.
    pub fn forget_pages(&self) {
        self.file.drop_pages(0, None);
    }

    /// Bytes of the file that the page cache has, about.
    pub(crate) fn bytes_in_memory(&self) -> u64 {
        let (file, all) = (self.file(), 0..self.file_size());
        // Linux before 6.5 only shows a page at a time.
        let pages = pages::count(file, &all).or_else(|_| pages::visible(file, &all));
        pages.unwrap_or(0) * rustix::param::page_size() as u64
    }

    /// Counters since the blob was opened, and how much of it is present.
    pub fn stats(&self) -> BlobStats {
        self.counters.stats(&self.residency, &self.layout)
    }

    /// Sets the guard that must succeed before a chunk of a complete blob is evicted: afterwards
    /// the kernel sends events again for reads of the file. Each `driver` has its own guard.
    /// Without one, the file is read only through [`CachedBlob::ensure`].
    pub fn set_guard(&self, driver: &'static str, guard: Guard) {
        self.guarded.set(driver, guard);
    }

    /// Returns whether the kernel reads the blob's file by itself, guarded by events.
    pub(super) fn has_guard(&self) -> bool {
        self.guarded.has_guards()
    }

    /// Returns whether every chunk is in the file. A power cut may take some away until it
    /// [is complete](CachedBlob::is_complete).
    pub(crate) fn has_all_chunks(&self) -> bool {
        self.residency.is_full()
    }

    /// Returns whether every chunk is in the file and on the disk.
    pub fn is_complete(&self) -> bool {
        self.guarded.is_complete()
    }

    /// Waits until [`CachedBlob::is_complete`].
    pub async fn completed(&self) {
        self.guarded.completed().await;
    }
}

impl Meter for CachedBlob {
    fn request(&self) {
        self.counters.requested();
    }

    fn arrived(&self, bytes: u64) {
        self.was_held(bytes);
        self.workers.link_speed().arrived(bytes);
    }

    fn was_held(&self, bytes: u64) {
        self.counters.fetched(bytes);
        self.workers.data_arrived(&self.account());
    }
}

/// See [`CachedBlob::file`].
impl AsFd for CachedBlob {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file().as_fd()
    }
}

impl Drop for CachedBlob {
    fn drop(&mut self) {
        // A scrub, which only looks, attaches no source.
        if !self.sources.list().is_empty() {
            self.file.store().note_use();
        }
    }
}

impl fmt::Debug for CachedBlob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedBlob")
            .field("path", &self.path())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
