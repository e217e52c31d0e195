//! One blob in the cache.

use std::{
    cell::RefCell,
    collections::BTreeSet,
    fmt,
    fs::File,
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lazuli_image::{Chunk, Decoded, Digest, codec::Decoder};
use tokio::{
    sync::{Notify, futures::Notified, watch},
    time::Instant,
};

use super::{
    Cache, CacheError, Settings,
    account::Owners,
    disk_full::WaitForRoom,
    durable::{Durable, FLUSH_BYTES, Touch},
    evict::{Asked, Guarded},
    layout::Layout,
    readahead::{self, Runs},
    ready::ReadyMap,
    released::Released,
    single_flight::{InFlight, Waiter},
    store::{Store, is_full},
    workers::Workers,
};
use crate::{
    error::ReadError,
    fetch::{self, FetchRequest},
    source::{
        BlobSource,
        tracked_source::{Meter, TrackedSource},
    },
};

/// Sources of one blob that are kept, mirrors included; the oldest is forgotten first.
const SOURCES: usize = 32;

/// Fetches that may end without a chunk before a reader gives up. Only a bug of ours abandons one,
/// and only a chunk that came after minutes is given up at once.
pub(super) const TAKEOVERS: usize = 3;

thread_local! {
    /// Of each worker thread.
    static DECODER: RefCell<Decoder> = RefCell::new(Decoder::new());
}

/// One blob in the cache, as a set of images describes it.
///
/// The file has the decoded bytes of every chunk at the chunk's own address, zeros between chunks,
/// and holes where chunks are missing. Only [`CachedBlob::ensure`] tells which is which.
pub struct CachedBlob {
    pub(super) layout: Layout,
    pub(super) store: Store,
    /// Chunks that are in the file and were checked by this process, or left by one whose seal
    /// fits.
    pub(super) ready: ReadyMap,
    /// Chunks that are in the file as far as the maps say. Nobody reads them before they are
    /// checked.
    pub(super) suspect: ReadyMap,
    /// Held by everybody who changes the data file or the maps.
    pub(super) touch: Mutex<Touch>,
    pub(super) flights: InFlight,
    /// What readers go through.
    runs: Runs,
    sources: RwLock<Vec<Arc<TrackedSource>>>,
    replaced: Notify,
    added: Notify,
    pub(super) settings: Settings,
    pub(super) workers: Arc<Workers>,
    _lock: Arc<File>,
    pub(super) counters: Counters,
    /// What is known to be on the disk. Held during a flush, so that there is one at a time.
    pub(super) durable: Mutex<Durable>,
    /// Decoded bytes written since the last flush began.
    pub(super) unflushed: AtomicU64,
    /// Whether a task is going to flush.
    pub(super) flushing: AtomicBool,
    /// Makes that task hurry.
    pub(super) hurry: Notify,
    /// Whether a task is going to check suspect chunks.
    pub(super) checking: AtomicBool,
    /// Whether the file was cut to nothing. Held for reading by everybody who writes to the file.
    cut_off: RwLock<bool>,
    /// Whether every chunk is ready and on the disk.
    pub(super) complete: watch::Sender<bool>,
    /// Who asked for what when.
    pub(super) asked: Asked,
    /// Whether the kernel asks before it reads the file.
    pub(super) guarded: Guarded,
    released: Arc<Released>,
    /// Chunks that were found wrong and not reported yet.
    pub(super) wrong: Mutex<BTreeSet<usize>>,
    pub(super) cache: Weak<Cache>,
    /// The images in use that have it.
    pub(super) owners: Owners,
    /// Who is told what drivers ask about.
    listeners: RwLock<Vec<Weak<Listener>>>,
    /// Whether there may be any.
    is_heard: AtomicBool,
}

/// Is told of the chunks that a driver asks about.
pub(crate) type Listener = dyn Fn(Range<usize>) + Send + Sync;

/// How a request ended that was sent for readers to come.
pub(crate) type Fetched = Result<(), ReadError>;

#[derive(Debug, Default)]
pub(super) struct Counters {
    bytes_fetched: AtomicU64,
    requests: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    pub(super) bytes_copied: AtomicU64,
    pub(super) checked: AtomicU64,
    pub(super) wrong: AtomicU64,
}

/// What a blob's life was like since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlobStats {
    /// Stored bytes that arrived from sources, also those of answers that broke off.
    pub bytes_fetched: u64,
    /// Reads that sources were asked for, also those that failed.
    pub requests: u64,
    /// Questions that were answered at once.
    pub hits: u64,
    /// Questions that had to wait for a fetch.
    pub misses: u64,
    /// Decoded bytes that were copied from other blobs in the cache.
    pub bytes_copied: u64,
    /// Chunks that are in the cache and right.
    pub chunks_ready: u64,
    /// Chunks that are in the cache as an earlier process left them, and not checked yet.
    pub chunks_suspect: u64,
    /// Chunks that were read back and checked.
    pub chunks_checked: u64,
    /// Of these, the ones that were wrong: somebody, or the disk, has changed them.
    pub chunks_wrong: u64,
    /// Chunks that the image names.
    pub chunks_total: u64,
    /// Bytes of the whole blob as stored.
    pub stored_bytes: u64,
}

impl CachedBlob {
    pub(super) fn open(
        dir: PathBuf,
        layout: Layout,
        cache: &Cache,
    ) -> Result<Arc<Self>, CacheError> {
        let (store, found) = Store::open(dir, &layout, cache)?;
        let chunks = layout.chunks().len();
        let ready = ReadyMap::new(chunks, if found.sealed { &found.durable } else { &[] });
        let suspect = ReadyMap::new(chunks, &found.known);
        (0..chunks).filter(|at| ready.is_ready(*at)).for_each(|at| suspect.clear(at));
        let blob = Arc::new(CachedBlob {
            layout,
            store,
            complete: watch::Sender::new(ready.is_full()),
            asked: Asked::new(cache.clock.clone(), chunks),
            guarded: Guarded::new(ready.is_full()),
            released: cache.released.clone(),
            wrong: Mutex::default(),
            cache: cache.own.clone(),
            owners: Owners::default(),
            listeners: RwLock::default(),
            is_heard: AtomicBool::new(false),
            ready,
            suspect,
            touch: Mutex::new(Touch { times: found.times, doubts: 0 }),
            flights: InFlight::default(),
            runs: Runs::default(),
            sources: RwLock::default(),
            replaced: Notify::new(),
            added: Notify::new(),
            settings: cache.settings.clone(),
            workers: cache.workers.clone(),
            _lock: cache.lock.clone(),
            durable: Mutex::new(Durable {
                words: found.durable,
                seal: found.sealed.then_some(found.times),
            }),
            counters: Counters::default(),
            unflushed: AtomicU64::new(0),
            flushing: AtomicBool::new(false),
            hurry: Notify::new(),
            checking: AtomicBool::new(false),
            cut_off: RwLock::default(),
        });
        blob.tell_others((0..chunks).filter(|at| blob.has(*at)));
        if !blob.suspect.is_empty() {
            blob.check_soon();
            blob.flush_soon();
        }
        Ok(blob)
    }

    /// Returns when every chunk with bytes in `range` is in the file and has been checked. Bytes
    /// between chunks, up to the next block, are zeros. Any number of callers may ask at once;
    /// dropping the future is harmless, what is being fetched arrives for others.
    ///
    /// # Errors
    /// The range could not be brought in; a later call tries again. Parts of it may be ready.
    pub async fn ensure(self: &Arc<Self>, range: Range<Decoded>) -> Result<(), ReadError> {
        if range.end.0 > self.layout.file_size() || range.start > range.end {
            let (blob, size) = (self.id(), self.layout.file_size());
            return Err(ReadError::OutOfRange { blob, range, size });
        }
        if !self.layout.covers(&range) {
            return Err(ReadError::NoChunk { blob: self.id(), range });
        }
        let wanted = self.layout.chunks_in(&range);
        self.hear(wanted.clone());
        if self.ready.all_ready(wanted.clone()) {
            self.counters.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        self.counters.misses.fetch_add(1, Ordering::Relaxed);
        let _reader = self.workers.reader(self.account());
        let mut waiting = WaitForRoom::new(self.settings.deadline);
        let deadline = Instant::now() + self.settings.deadline;
        for _ in 0..TAKEOVERS {
            while let Err(error) = self.join_or_start(wanted.clone(), deadline).await {
                let is_full = matches!(error, ReadError::NoSpace { .. });
                if !is_full || !self.find_room(wanted.clone(), &mut waiting).await {
                    return Err(error);
                }
            }
            // What came long after it was asked for may have been given up again, and flights may
            // be abandoned.
            self.asked.note(wanted.clone());
            if self.ready.all_ready(wanted.clone()) {
                return Ok(());
            }
        }
        Err(ReadError::Interrupted { blob: self.id() })
    }

    /// Waits until nothing of `wanted` is under way any more; flights may have been abandoned.
    pub(super) async fn join_or_start(
        self: &Arc<Self>,
        wanted: Range<usize>,
        deadline: Instant,
    ) -> Result<(), ReadError> {
        for waiter in self.start_missing(wanted, deadline) {
            waiter.wait().await.unwrap_or(Ok(()))?;
        }
        Ok(())
    }

    /// Whether [`CachedBlob::ensure`] would return at once. If so, the range stays there for
    /// [`Settings::grace`] at least.
    pub fn is_ready(&self, range: &Range<Decoded>) -> bool {
        let chunks = self.layout.chunks_in(range);
        self.hear(chunks.clone());
        range.end.0 <= self.layout.file_size() && self.ready.all_ready(chunks)
    }

    /// Notes that the kernel is about to let a thread through to a range. The range stays until the
    /// thread was seen to have left the kernel's wait, even if it is frozen there. 0 is a thread
    /// that the kernel does not name.
    pub fn let_through(self: &Arc<Self>, thread: i32, range: &Range<Decoded>) {
        self.released.note(thread, self, self.layout.chunks_in(range));
    }

    /// Whether the file has every chunk of the range, checked by this process or not.
    pub fn is_filled(&self, range: &Range<Decoded>) -> bool {
        let mut chunks = self.layout.chunks_in(range);
        chunks.all(|at| self.ready.is_ready(at) || self.suspect.is_ready(at))
    }

    /// Joins the flights of the chunks in `wanted` that are not ready, and starts those that are
    /// missing or have to be checked. What is started is tried until `deadline`.
    fn start_missing(self: &Arc<Self>, wanted: Range<usize>, deadline: Instant) -> Vec<Waiter> {
        let chunks = self.layout.chunks();
        let mut waiters = Vec::new();
        let mut requests = Vec::new();
        let mut checks = Vec::new();
        let mut copies = Vec::new();
        let mut ahead = Vec::new();
        {
            let mut flights = self.flights.lock();
            // InFlight first: one that lands in between has set the bit before it left the map.
            // Suspicion before readiness: who checks a chunk makes it ready before it is no longer
            // suspect.
            let is_suspect = |at: usize| self.suspect.is_ready(at) && !self.ready.is_ready(at);
            let is_missing = |at: usize| {
                !flights.has(at) && !self.suspect.is_ready(at) && !self.ready.is_ready(at)
            };
            let suspects: Vec<_> =
                wanted.clone().filter(|at| !flights.has(*at) && is_suspect(*at)).collect();
            let mut missing = Vec::new();
            if let Some(first) = wanted.clone().find(|at| is_missing(*at)) {
                let amplify = self.settings.amplify;
                let wide = fetch::neighbours(chunks, wanted.clone(), amplify, is_missing);
                missing.extend(wide.clone().filter(|at| is_missing(*at)));
                if amplify > 0 {
                    let bytes = missing.iter().map(|at| chunks[*at].stored_share()).sum();
                    let end = self.runs.follow(chunks, first, wide.end, bytes, is_missing);
                    ahead.extend(wide.end..end);
                }
            }
            checks.extend(suspects.into_iter().map(|at| flights.start(at, true)));
            let in_other_blobs = self.take_from_other_blobs(&mut missing);
            copies.extend(
                in_other_blobs.into_iter().map(|at| flights.start(at, wanted.contains(&at))),
            );
            for request in fetch::plan(chunks, &missing) {
                let run = &missing[request];
                let stored = chunks[run[0]].stored..chunks[run[run.len() - 1]].stored_end();
                let start = |at: &usize| flights.start(*at, wanted.contains(at));
                let leases = run.iter().map(start).collect();
                requests.push(FetchRequest {
                    stored,
                    held: None,
                    part: u64::MAX,
                    leases,
                    deadline,
                    is_ahead: false,
                });
            }
            waiters.extend(wanted.filter_map(|at| flights.join(at)));
        }
        self.check(checks);
        self.copy(copies, false);
        for request in requests {
            self.workers.runtime().spawn(fetch::run(self.clone(), request));
        }
        // Nobody waits for it. In one answer with what somebody waits for it would hold that up.
        self.bring(&ahead, readahead::PART, None, false);
        waiters
    }

    /// Tells `listener` which chunks drivers ask about, as long as it lives.
    pub(crate) fn tell(&self, listener: &Arc<Listener>) {
        self.listeners
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Arc::downgrade(listener));
        self.is_heard.store(true, Ordering::Relaxed);
    }

    /// Notes that a driver asks. To be called before it looks what is ready, see [`Asked::note`].
    fn hear(&self, chunks: Range<usize>) {
        self.asked.note(chunks.clone());
        if self.is_heard.load(Ordering::Relaxed) {
            let listeners = self.listeners.read().unwrap_or_else(PoisonError::into_inner);
            let live: Vec<_> = listeners.iter().filter_map(Weak::upgrade).collect();
            if live.len() < listeners.len() {
                drop(listeners);
                let mut all = self.listeners.write().unwrap_or_else(PoisonError::into_inner);
                all.retain(|listener| listener.strong_count() > 0);
                self.is_heard.store(!all.is_empty(), Ordering::Relaxed);
            } else {
                drop(listeners);
            }
            live.iter().for_each(|listener| listener(chunks.clone()));
        }
    }

    /// Decodes the stored bytes of `chunk`, to `buffer` unless they are raw: its unit as far as the
    /// chunk.
    pub(crate) fn decode<'a>(
        &self,
        chunk: &Chunk,
        stored: &'a [u8],
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], ReadError> {
        let unit = self.layout.blob().unit(chunk);
        DECODER
            .with_borrow_mut(|decoder| decoder.unit(&unit, stored, buffer))
            .map_err(|error| self.corrupt(chunk, error.to_string()))
    }

    fn corrupt(&self, chunk: &Chunk, problem: String) -> ReadError {
        let range = chunk.stored..chunk.stored_end();
        ReadError::Corrupt { blob: self.id(), chunk: chunk.number, range, problem }
    }

    /// Takes a chunk out of what its stored bytes [decode](CachedBlob::decode) to, checks it,
    /// writes it and marks it ready. Blocks.
    pub(crate) fn accept(self: &Arc<Self>, at: usize, unit: &[u8]) -> Result<(), ReadError> {
        let chunk = self.chunk(at);
        let bytes = chunk
            .part_of(unit)
            .ok_or_else(|| self.corrupt(chunk, format!("its unit has {} bytes", unit.len())))?;
        let digest = chunk.digest.algorithm.digest(bytes);
        if digest != chunk.digest {
            let problem = format!("digest is {digest}, expected {}", chunk.digest);
            return Err(self.corrupt(chunk, problem));
        }
        self.keep(at, bytes)
    }

    /// Writes the right bytes of a chunk and marks it ready. Blocks.
    pub(super) fn keep(self: &Arc<Self>, at: usize, bytes: &[u8]) -> Result<(), ReadError> {
        let cut_off = self.cut_off.read().unwrap_or_else(PoisonError::into_inner);
        if *cut_off {
            return Err(ReadError::CutOff { blob: self.id() });
        }
        self.put(at, bytes).map_err(|error| self.write_error(error))?;
        let size = bytes.len() as u64;
        if let Some(cache) = self.cache.upgrade() {
            cache.wrote(size);
        }
        let unflushed = self.unflushed.fetch_add(size, Ordering::Relaxed) + size;
        if unflushed >= FLUSH_BYTES || self.ready.is_full() {
            self.hurry.notify_one();
        }
        self.flush_soon();
        Ok(())
    }

    /// Cuts the file to nothing, unless the blob is complete: for the end of a daemon that leaves
    /// readers behind, who get EIO from then on instead of seeing holes. What was cached of the
    /// blob is lost.
    pub fn cut_off(&self) -> io::Result<()> {
        // Waits for writes under way; a later one would make the file longer again.
        let mut cut_off = self.cut_off.write().unwrap_or_else(PoisonError::into_inner);
        if self.is_complete() {
            return Ok(());
        }
        *cut_off = true;
        self.store.data().set_len(0)
    }

    /// Adds a source, which becomes the first that is asked: what was named last most likely has
    /// credentials that still work.
    pub(crate) fn attach(&self, source: Arc<dyn BlobSource>) {
        let mut sources = self.sources.write().unwrap_or_else(PoisonError::into_inner);
        sources.retain(|known| !known.is(&source));
        sources.insert(0, Arc::new(TrackedSource::new(source)));
        sources.truncate(SOURCES);
        drop(sources);
        self.added.notify_waiters();
    }

    /// Asks `source` no more, also for reads that wait.
    pub(crate) fn detach(&self, source: &Arc<dyn BlobSource>) {
        let mut sources = self.sources.write().unwrap_or_else(PoisonError::into_inner);
        sources.retain(|known| !known.is(source));
        drop(sources);
        self.replaced.notify_waiters();
    }

    /// Returns when a source is attached.
    pub(crate) fn added(&self) -> Notified<'_> {
        self.added.notified()
    }

    /// Returns when a source is detached.
    pub(crate) fn replaced(&self) -> Notified<'_> {
        self.replaced.notified()
    }

    /// The most preferred first.
    pub(crate) fn sources(&self) -> Vec<Arc<TrackedSource>> {
        self.sources.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Runs `job` for the blob on a thread that may block. Panics when the job does.
    pub(crate) async fn run<R: Send + 'static>(
        &self,
        background: bool,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> R {
        self.workers.run(self.account(), background, job).await
    }

    /// Whether a reader waits for data of the images that have the blob.
    pub(crate) fn has_readers(&self) -> bool {
        self.workers.has_readers(&self.account())
    }

    /// Whether nothing is being fetched.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.flights.lock().is_empty()
    }

    pub(crate) fn chunk(&self, at: usize) -> &Chunk {
        &self.layout.chunks()[at]
    }

    pub(super) fn write_error(&self, error: io::Error) -> ReadError {
        let path = self.store.data_path();
        if is_full(&error) {
            return ReadError::NoSpace { blob: self.id(), path };
        }
        ReadError::Cache { path, source: Arc::new(error) }
    }

    /// SHA-256 of the blob as stored.
    pub fn id(&self) -> Digest {
        self.layout.blob().id
    }

    /// The file with the decoded bytes, open for reading and writing. It was opened before anybody
    /// could ask for events on the file, so using it raises none.
    pub fn file(&self) -> &File {
        self.store.data()
    }

    /// Where [`CachedBlob::file`] is.
    pub fn path(&self) -> PathBuf {
        self.store.data_path()
    }

    /// Bytes of [`CachedBlob::file`]: all decoded bytes, in whole blocks.
    pub fn file_size(&self) -> u64 {
        self.layout.file_size()
    }

    /// See [`super::Settings::deadline`].
    pub(crate) fn deadline(&self) -> Duration {
        self.settings.deadline
    }

    /// Lets the kernel drop its copies of the file's clean pages.
    pub fn forget_pages(&self) {
        // Advice: when it is not taken, only memory is lost.
        let _ = rustix::fs::fadvise(self.file(), 0, None, rustix::fs::Advice::DontNeed);
    }

    /// Whether every chunk is in the file and on the disk.
    pub fn is_complete(&self) -> bool {
        *self.complete.borrow()
    }

    /// Waits until [`CachedBlob::is_complete`].
    pub async fn completed(&self) {
        // The sender is a part of `self`, so the channel does not close.
        let _ = self.complete.subscribe().wait_for(|complete| *complete).await;
    }

    /// Counters since the blob was opened, and how much of it is there.
    pub fn stats(&self) -> BlobStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        BlobStats {
            bytes_fetched: count(&self.counters.bytes_fetched),
            requests: count(&self.counters.requests),
            hits: count(&self.counters.hits),
            misses: count(&self.counters.misses),
            bytes_copied: count(&self.counters.bytes_copied),
            chunks_ready: self.ready.count() as u64,
            chunks_suspect: self.suspect.count() as u64,
            chunks_checked: count(&self.counters.checked),
            chunks_wrong: count(&self.counters.wrong),
            chunks_total: self.layout.chunks().len() as u64,
            stored_bytes: self.layout.blob().stored_size,
        }
    }
}

/// See [`CachedBlob::file`].
impl AsFd for CachedBlob {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file().as_fd()
    }
}

impl Meter for CachedBlob {
    fn request(&self) {
        self.counters.requests.fetch_add(1, Ordering::Relaxed);
    }

    fn arrived(&self, bytes: u64) {
        self.counters.bytes_fetched.fetch_add(bytes, Ordering::Relaxed);
        self.workers.data_arrived(&self.account());
    }
}

impl Drop for CachedBlob {
    fn drop(&mut self) {
        // Who only looks, as a scrub does, has no source.
        if !self.sources().is_empty() {
            self.store.note_use();
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
