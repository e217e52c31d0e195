//! Giving up chunks that nobody has read for long, under a mounted image.
//!
//! A bit that is cleared is seen by everybody who asks. Who has asked already and was let through
//! may still be on the way to the page, and cannot be called back. So chunks are given up only when
//! nobody has asked for them for [`Settings::grace`], and only in a file that the kernel asks
//! about; docs/cache.md has the whole argument.
//!
//! [`Settings::grace`]: super::Settings::grace

use std::{
    collections::BTreeMap,
    fmt, io,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering, fence},
    },
    time::Duration,
};

use lazuli_image::BLOCK_SIZE;
use rustix::fs::{FallocateFlags, fallocate};

use super::{CachedBlob, Lease, clock::Clock, durable::lock};

/// Makes sure that the kernel asks before it reads the blob's file, as far as the file is in use.
pub type Guard = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

/// When each chunk was asked for last.
#[derive(Debug)]
pub(super) struct Asked {
    clock: Arc<Clock>,
    /// What `clock` showed.
    chunks: Box<[AtomicU32]>,
}

impl Asked {
    /// `clock` began when this process began to answer anybody.
    pub(super) fn new(clock: Arc<Clock>, chunks: usize) -> Self {
        Asked { clock, chunks: (0..chunks).map(|_| AtomicU32::new(0)).collect() }
    }

    pub(super) fn now(&self) -> u32 {
        self.clock.now()
    }

    /// Notes that somebody asks. To be called *before* the caller looks whether the chunks are
    /// ready: either the one who gives chunks up sees this, or the caller sees that they are gone.
    pub(super) fn note(&self, chunks: Range<usize>) {
        let now = self.now();
        for chunk in &self.chunks[chunks] {
            if chunk.load(Ordering::Relaxed) != now {
                chunk.store(now, Ordering::Relaxed);
            }
        }
        fence(Ordering::SeqCst);
    }

    fn last(&self, chunk: usize) -> u32 {
        self.chunks[chunk].load(Ordering::Relaxed)
    }
}

/// What stands between a blob's readers and the holes in its file.
pub(super) struct Guarded {
    guards: Mutex<BTreeMap<&'static str, Guard>>,
    /// Whether the kernel may read the file without asking: it has been complete.
    pub(super) is_open: AtomicBool,
    /// When it was last like that, as [`Asked::now`].
    since: AtomicU32,
    /// Whether the blob is not to be complete although everything is there: chunks of it are going
    /// to be given up.
    pub(super) is_held: AtomicBool,
}

impl Guarded {
    pub(super) fn new(is_open: bool) -> Self {
        Guarded {
            guards: Mutex::default(),
            is_open: AtomicBool::new(is_open),
            since: AtomicU32::new(0),
            is_held: AtomicBool::new(false),
        }
    }
}

impl fmt::Debug for Guarded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guarded").field("is_open", &self.is_open).finish_non_exhaustive()
    }
}

/// What was given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Evicted {
    pub(super) chunks: u64,
    /// Decoded bytes.
    pub(super) bytes: u64,
}

impl CachedBlob {
    /// Sets what has to succeed before any chunk of a blob that was complete can be given up:
    /// afterwards the kernel has to ask again before it reads the file. Each `driver` has its own.
    /// Without a guard the file is read only through [`CachedBlob::ensure`].
    pub fn set_guard(&self, driver: &'static str, guard: Guard) {
        lock(&self.guarded.guards).insert(driver, guard);
    }

    /// Whether the kernel lets readers through to the blob's file.
    pub(super) fn has_guard(&self) -> bool {
        !lock(&self.guarded.guards).is_empty()
    }

    /// Has the kernel ask again about a file that was complete. With `hold` it goes on asking when
    /// everything is there, until [`CachedBlob::release`]. Blocks.
    pub(super) fn stand_guard(&self, hold: bool) -> io::Result<()> {
        // One at a time: what one has just seen of the mark another could be changing.
        let guards = lock(&self.guarded.guards);
        loop {
            {
                // Under the lock, or a flush might call the blob complete in between.
                let _touch = lock(&self.touch);
                self.guarded.is_held.fetch_or(hold, Ordering::AcqRel);
                let is_open = self.guarded.is_open.load(Ordering::Acquire);
                if is_open || hold {
                    self.complete.send_replace(false);
                }
                if !is_open {
                    return Ok(());
                }
            }
            guards.values().try_for_each(|guard| guard())?;
            let _touch = lock(&self.touch);
            // A flush may have called the blob complete meanwhile, and then the mark goes again.
            if !*self.complete.borrow() {
                self.guarded.since.store(self.asked.now(), Ordering::Release);
                self.guarded.is_open.store(false, Ordering::Release);
                return Ok(());
            }
        }
    }

    /// Lets a blob be complete again.
    pub(super) fn release(self: &Arc<Self>) {
        if self.guarded.is_held.swap(false, Ordering::AcqRel) {
            self.hurry.notify_one();
            self.flush_soon();
        }
    }

    /// Decoded bytes of the chunks that are in the file, as far as anybody knows.
    pub(super) fn held_bytes(&self) -> u64 {
        let sizes = self.layout.chunks().iter().map(|chunk| u64::from(chunk.decoded_size));
        sizes.enumerate().filter(|(at, _)| self.has(*at)).map(|(_, size)| size).sum()
    }

    /// Chunks that can be given up, with the time when each was last asked for.
    pub(super) fn idle(&self) -> Vec<(u32, usize)> {
        if self.guarded.is_open.load(Ordering::Acquire) {
            return Vec::new();
        }
        let known = |at: &usize| self.ready.is_ready(*at) || self.suspect.is_ready(*at);
        let chunks = (0..self.layout.chunks().len()).filter(known);
        chunks.filter(|at| self.is_old(*at)).map(|at| (self.asked.last(at), at)).collect()
    }

    /// Whether everybody who ever asked for a chunk has long got it.
    fn is_old(&self, at: usize) -> bool {
        let last = self.asked.last(at).max(self.guarded.since.load(Ordering::Acquire));
        // Both ends of the time are rounded.
        let passed = self.asked.now().saturating_sub(last).saturating_sub(1);
        Duration::from_millis(u64::from(passed) * 100) >= self.settings.grace
    }

    /// Bytes that could be given up some time after [`CachedBlob::stand_guard`].
    pub(super) fn open_bytes(&self) -> u64 {
        if self.guarded.is_open.load(Ordering::Acquire) { self.layout.file_size() } else { 0 }
    }

    /// Gives up those of `chunks` that nobody asks for: their bits go first, here and on the disk,
    /// then their bytes. Blocks.
    pub(super) fn evict(self: &Arc<Self>, chunks: &[usize]) -> io::Result<Evicted> {
        let leases = self.take_away(chunks);
        let chunks: Vec<_> = leases.iter().map(Lease::chunk).collect();
        if chunks.is_empty() {
            return Ok(Evicted::default());
        }
        self.forget(&chunks)?;
        let mut evicted = Evicted::default();
        drop(self.change(|data| {
            for at in &chunks {
                let chunk = self.chunk(*at);
                let size = u64::from(chunk.decoded_size).next_multiple_of(BLOCK_SIZE);
                let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(data, punch, chunk.decoded.0, size)?;
                evicted.chunks += 1;
                evicted.bytes += size;
            }
            Ok(())
        })?);
        drop(leases);
        self.flush_soon();
        Ok(evicted)
    }

    /// Clears the bits of chunks that nobody asks for or fetches. Until the leases are dropped, who
    /// asks for one of them waits: it must not be written before it is punched.
    fn take_away(&self, chunks: &[usize]) -> Vec<Lease> {
        let mut leases = Vec::new();
        let mut spared = Vec::new();
        let mut flights = self.flights.lock();
        let _touch = lock(&self.touch);
        // Under the lock: a flush may have completed the blob since its chunks were chosen, and
        // nobody asks about it then.
        if self.guarded.is_open.load(Ordering::Acquire) {
            return leases;
        }
        for at in chunks.iter().copied() {
            let (was_ready, was_suspect) = (self.ready.is_ready(at), self.suspect.is_ready(at));
            if flights.has(at) || !(was_ready || was_suspect) {
                continue;
            }
            let lease = flights.start(at, false);
            self.ready.clear(at);
            // See `Asked::note`.
            fence(Ordering::SeqCst);
            if self.is_old(at) {
                self.suspect.clear(at);
                leases.push(lease);
            } else {
                if was_ready {
                    self.ready.set(at);
                }
                spared.push(lease);
            }
        }
        drop(flights);
        leases
    }
}
