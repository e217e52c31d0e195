//! The cache's disk budget, and eviction to stay within it.
//!
//! Whole blobs that no image in use has are evicted first, the least recently used first. Then
//! chunks of blobs in use follow, by the time of their latest request, of images above their share
//! first, see `blob::evict`.

use std::{
    collections::{HashMap, HashSet},
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, OnceLock, TryLockError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use lazuli_image::{Algorithm, Digest};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::Notify;

use super::{
    Cache, CacheError,
    blob::{CachedBlob, Hold},
    eviction_order::{Excess, Idle},
    store::Store,
};
use crate::{sharing::Account, sync::lock};

/// Maximum interval between measurements of the cache.
const PERIOD: Duration = Duration::from_secs(5);

/// When the budget is exceeded, it is brought to this part below it, so that not every chunk costs
/// an eviction.
const SLACK: u64 = 20;

/// Least that is freed for a reader on a full disk.
const ROOM: u64 = 16 << 20;

/// Pause after which a full disk is news again.
const REMINDER: Duration = Duration::from_secs(60);

/// How the names of directories begin that are being removed.
const AWAY: &str = ".away-";

/// The state of eviction.
#[derive(Debug, Default)]
pub(super) struct Budget {
    /// Held while something is given up.
    evicting: Mutex<()>,
    /// Since when every blob that is mounted is open, so that the others are known to be unused.
    since: OnceLock<Instant>,
    /// When the disk was full last.
    full: Mutex<Option<Instant>>,
    written: AtomicU64,
    evict_now: Notify,
    is_over: AtomicBool,
    chunks: AtomicU64,
    blobs: AtomicU64,
    bytes: AtomicU64,
}

impl Budget {
    /// Counts evicted bytes.
    pub(super) fn count_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Something that may go.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Unused {
    /// The directory of a blob.
    Blob(PathBuf),
    /// A file beside the cache.
    ExtraFiles(PathBuf),
}

/// Counters of evictions since the cache was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EvictionStats {
    /// Bytes of [`super::Settings::max_bytes`].
    pub max_bytes: Option<u64>,
    /// Whether the cache exceeds the limit because everything in it is in use and recent.
    pub is_over: bool,
    /// Chunks of blobs in use.
    pub chunks: u64,
    /// Blobs that were not in use.
    pub blobs: u64,
    /// Bytes of both, and of files beside the cache.
    pub bytes: u64,
}

impl Cache {
    /// Starts eviction. Call it when every mounted blob is open: others may be evicted.
    pub fn start_evicting(self: &Arc<Self>) {
        if self.budget.since.set(Instant::now()).is_ok() {
            self.workers.runtime().spawn(keep(Arc::downgrade(self), self.budget.clone()));
        }
    }

    /// Counters of eviction.
    pub fn evictions(&self) -> EvictionStats {
        let budget = &self.budget;
        EvictionStats {
            max_bytes: self.settings.max_bytes,
            is_over: budget.is_over.load(Ordering::Relaxed),
            chunks: budget.chunks.load(Ordering::Relaxed),
            blobs: budget.blobs.load(Ordering::Relaxed),
            bytes: budget.bytes.load(Ordering::Relaxed),
        }
    }

    /// Counts written bytes, and schedules a measurement when the cache may exceed its limit.
    pub(super) fn wrote(&self, bytes: u64) {
        let Some(max) = self.settings.max_bytes else { return };
        let written = self.budget.written.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if written > max / SLACK {
            self.budget.evict_now.notify_one();
        }
    }

    /// Gives something up for a reader of `account` that needs `bytes` on a full disk. Blocks, but
    /// not while others do the same.
    pub(super) fn make_room(&self, bytes: u64, account: Account) {
        let before = lock(&self.budget.full).replace(Instant::now());
        if before.is_none_or(|before| before.elapsed() > REMINDER) {
            tracing::warn!(dir = %self.dir.display(), "the disk of the cache is full, readers wait");
        }
        let evicting = match self.budget.evicting.try_lock() {
            Err(TryLockError::WouldBlock) => return,
            Err(TryLockError::Poisoned(evicting)) => evicting.into_inner(),
            Ok(evicting) => evicting,
        };
        let freed = self.free(bytes.max(ROOM), Some(account));
        drop(evicting);
        tracing::debug!(freed, "made room on a full disk");
    }

    /// Keeps the cache within its budget as well as it can. Blocks.
    pub(super) fn enforce(&self) -> Result<(), CacheError> {
        self.clock.now();
        self.released.sweep(self.settings.grace);
        self.budget.written.store(0, Ordering::Relaxed);
        let lacking = self.lacking(0);
        if lacking > 0 && self.budget.since.get().is_some() {
            let evicting = lock(&self.budget.evicting);
            let waits = since_boot() < self.settings.after_boot;
            self.free_unused(lacking, if waits { Vec::new() } else { self.unused_since() });
            drop(evicting);
        }
        let max = self.settings.max_bytes.unwrap_or(u64::MAX);
        let used = if max == u64::MAX { 0 } else { self.usage()?.1 };
        if used > max {
            let evicting = lock(&self.budget.evicting);
            self.free(used - (max - max / SLACK), None);
            drop(evicting);
            let used = self.usage()?.1;
            let is_over = used > max;
            if is_over && !self.budget.is_over.load(Ordering::Relaxed) {
                tracing::warn!(used, max, "the cache exceeds its budget: all of it is in use");
            }
            self.budget.is_over.store(is_over, Ordering::Relaxed);
            return Ok(());
        }
        self.budget.is_over.store(false, Ordering::Relaxed);
        let full = *lock(&self.budget.full);
        if full.is_none_or(|full| full.elapsed() > 2 * self.settings.grace) {
            self.open_blobs().iter().for_each(CachedBlob::release);
        }
        Ok(())
    }

    /// Gives up about `bytes`, for a reader if one needs them, and returns how many it were.
    fn free(&self, bytes: u64, reader: Option<Account>) -> u64 {
        let Some(since) = self.budget.since.get() else { return 0 };
        let mut freed = self.free_unused(bytes, self.unused_since());
        // Before that, a process before this one may have let a reader through that is still on the
        // way.
        if freed < bytes && since.elapsed() >= self.settings.grace {
            freed += self.free_chunks(bytes - freed, reader);
        }
        freed
    }

    /// Removes `blobs`, none of which is open, and unused files beside them, until about `bytes`
    /// are free. Returns how many it were.
    fn free_unused(&self, bytes: u64, blobs: Vec<(SystemTime, PathBuf)>) -> u64 {
        let blobs = blobs.into_iter().map(|(last, dir)| (last, Unused::Blob(dir)));
        let beside = self.unused_extra_files().into_iter();
        let beside = beside.map(|(last, path)| (last, Unused::ExtraFiles(path)));
        let mut all: Vec<_> = blobs.chain(beside).collect();
        all.sort();
        let mut freed = 0;
        for (_, unused) in all {
            if freed >= bytes {
                break;
            }
            freed += match unused {
                Unused::Blob(dir) => self.try_remove(&dir),
                Unused::ExtraFiles(path) => self.remove_extra_file(&path),
            };
        }
        freed
    }

    fn try_remove(&self, dir: &Path) -> u64 {
        let cannot = |error: &io::Error| {
            tracing::warn!(dir = %dir.display(), %error, "cannot remove a blob");
        };
        self.remove(dir).inspect_err(cannot).unwrap_or(0)
    }

    /// Removes the files of `blobs` unless they are open. Returns whether none is left. Blocks.
    pub(crate) fn discard(&self, blobs: &HashSet<Digest>) -> bool {
        let evicting = lock(&self.budget.evicting);
        for dir in self.unused() {
            // Names of directories begin with the digest of the blob.
            let name = dir.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let blob =
                name.split_once('-').and_then(|(hex, _)| Digest::from_hex(Algorithm::Sha256, hex));
            if blob.is_some_and(|blob| blobs.contains(&blob)) {
                self.try_remove(&dir);
            }
        }
        drop(evicting);
        // Those that are open until they are flushed.
        for blob in self.open_blobs().iter().filter(|open| blobs.contains(&open.id())) {
            blob.flush_at_once();
        }
        !blobs.iter().any(|blob| self.has_files_of(blob))
    }

    fn open_blobs(&self) -> Vec<Arc<CachedBlob>> {
        let blobs = lock(&self.blobs);
        blobs.values().filter_map(Weak::upgrade).collect()
    }

    /// Directories of blobs that are not open, the least recently used first.
    fn unused(&self) -> Vec<PathBuf> {
        let mut dirs = self.unused_since();
        dirs.sort();
        dirs.into_iter().map(|(_, dir)| dir).collect()
    }

    /// Directories of blobs that are not open, and when each was used last.
    fn unused_since(&self) -> Vec<(SystemTime, PathBuf)> {
        let open = lock(&self.blobs);
        let is_open = |key: &str| open.get(key).is_some_and(|blob| blob.strong_count() > 0);
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let unused = entries.filter(|entry| !entry.file_name().to_str().is_some_and(is_open));
        let since =
            |entry: fs::DirEntry| Some((Store::last_use(&entry.path()).ok()?, entry.path()));
        unused.filter_map(since).collect()
    }

    /// Removes the files of a blob unless it is open. Returns the bytes that they
    /// occupied.
    fn remove(&self, dir: &Path) -> io::Result<u64> {
        let Some(key) = dir.file_name().and_then(|name| name.to_str()) else { return Ok(0) };
        let away = self.dir.join(format!("{AWAY}{key}"));
        {
            // The lock prevents opening it meanwhile.
            let open = lock(&self.blobs);
            if open.get(key).is_some_and(|blob| blob.strong_count() > 0) {
                return Ok(0);
            }
            if !key.starts_with(AWAY) {
                fs::rename(dir, &away)?;
            }
            self.chunk_index.forget_all(key);
        }
        let away = if key.starts_with(AWAY) { dir } else { &away };
        let bytes = super::occupied(away).0;
        fs::remove_dir_all(away)?;
        tracing::info!(blob = key, bytes, "evicted a blob that is not in use");
        self.budget.blobs.fetch_add(1, Ordering::Relaxed);
        self.budget.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(bytes)
    }

    /// Gives up chunks of blobs in use, those first of images above their share, and that were
    /// asked for longest ago.
    fn free_chunks(&self, bytes: u64, reader: Option<Account>) -> u64 {
        self.released.sweep(self.settings.grace);
        let blobs = self.open_blobs();
        let mut held = HashMap::<_, u64>::new();
        for blob in &blobs {
            *held.entry(blob.account()).or_default() += blob.held_bytes();
        }
        let budget = self.settings.max_bytes.map(|max| max - max / SLACK);
        let mut excess = Excess::of(&held, budget.unwrap_or_else(|| held.values().sum()));
        let for_others = reader.is_some_and(|account| !excess.has(&account));
        let mut picked = HashMap::<usize, Vec<usize>>::new();
        for Idle { blob, at, .. } in excess.choose(self.idle(&blobs), bytes, for_others) {
            picked.entry(blob).or_default().push(at);
        }
        let mut freed = 0;
        for (blob, chunks) in picked {
            match blobs[blob].evict(&chunks) {
                Ok(evicted) => {
                    freed += evicted.bytes;
                    self.budget.chunks.fetch_add(evicted.chunks, Ordering::Relaxed);
                    self.budget.bytes.fetch_add(evicted.bytes, Ordering::Relaxed);
                    tracing::debug!(blob = ?blobs[blob], ?evicted, "evicted chunks");
                }
                Err(error) => tracing::warn!(blob = ?blobs[blob], %error, "cannot evict chunks"),
            }
        }
        // The kernel reads complete blobs without events, so their idle chunks are unknown. Events
        // are turned on now.
        let mut missing = bytes.saturating_sub(freed);
        for blob in blobs {
            let open = blob.open_bytes();
            let may_go = for_others || !excess.is_any() || excess.has(&blob.account());
            if missing > 0 && open > 0 && may_go {
                match blob.rearm(Hold::UntilReleased) {
                    Ok(()) => missing = missing.saturating_sub(open),
                    Err(error) => tracing::warn!(?blob, %error, "cannot watch a complete blob"),
                }
            }
        }
        freed
    }

    /// Chunks of `blobs` that no reader can be on its way to.
    fn idle(&self, blobs: &[Arc<CachedBlob>]) -> Vec<Idle> {
        let strangers = self.released.has_strangers();
        if strangers {
            tracing::debug!("readers are frozen, or just were, since before this process began");
        }
        let awaited = self.released.chunks();
        let is_awaited = |blob: &Arc<CachedBlob>, at: usize| {
            let ranges = awaited.get(&blob.key());
            ranges.is_some_and(|ranges| ranges.iter().any(|range| range.contains(&at)))
        };
        let mut all = Vec::new();
        for (blob, cached) in blobs.iter().enumerate() {
            if strangers && cached.has_guard() {
                continue;
            }
            let account = cached.account();
            let idle = cached.idle().into_iter().filter(|(_, at)| !is_awaited(cached, *at));
            all.extend(idle.map(|(last, at)| {
                let bytes = u64::from(cached.chunk(at).decoded_size);
                Idle { last, blob, at, bytes, account }
            }));
        }
        all
    }
}

/// Time since the machine's boot.
fn since_boot() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::from_secs(now.tv_sec.unsigned_abs())
}

/// Enforces the budget for as long as there is a cache.
async fn keep(cache: Weak<Cache>, budget: Arc<Budget>) {
    loop {
        let Some(strong) = cache.upgrade() else { return };
        let period = PERIOD.min(strong.settings.grace.max(Duration::from_millis(10)));
        let enforced = tokio::task::spawn_blocking(move || strong.enforce()).await;
        if let Ok(Err(error)) = enforced {
            tracing::warn!(%error, "cannot measure the cache");
        }
        let _ = tokio::time::timeout(period, budget.evict_now.notified()).await;
        // When nothing can be given up, measuring again at once changes nothing.
        tokio::time::sleep(period / 10).await;
    }
}

/// Finishes removals that were interrupted when a process died.
pub(super) fn sweep(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(AWAY.as_bytes())
            && let Err(error) = fs::remove_dir_all(entry.path())
        {
            tracing::warn!(path = %entry.path().display(), %error, "cannot remove");
        }
    }
}
