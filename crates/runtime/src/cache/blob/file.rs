//! The file of a blob: how chunks are written, and made to survive the process, the kernel, and
//! changes by others.

use std::{
    fs::File,
    io,
    num::NonZeroU64,
    os::unix::fs::FileExt as _,
    sync::{
        Arc, Mutex, MutexGuard, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use lazuli_image::{BLOCK_SIZE, Chunk};
use rustix::fs::{Advice, FallocateFlags, SeekFrom, fadvise, fallocate, seek};
use tokio::sync::Notify;

use super::{
    super::{
        ready::{ReadyMap, word_count},
        store::{Found, Store, TICK, Times},
    },
    CachedBlob,
    guard::Hold,
};
use crate::{
    error::ReadError,
    sync::{lock, read, write},
};

/// Decoded bytes that are written before a flush does not wait any longer.
const FLUSH_BYTES: u64 = 64 << 20;

/// How long a flush is put off while something is fetched that a start or a pull waits for: all
/// other programs that wait for the disk, such as containerd, would wait for the flush as well.
const COURTESY: Duration = Duration::from_secs(30);

/// Longest pause between two flushes that fail.
const FLUSH_PAUSE: Duration = Duration::from_secs(60);

/// The files of a blob, with their known state.
#[derive(Debug)]
pub(super) struct BlobFile {
    store: Store,
    /// Held for each change of the data file or the maps.
    state: Mutex<FileState>,
    /// The chunks known to be on the disk. Locked during a flush, so that only one runs at a time.
    durable: Mutex<Durable>,
    /// Decoded bytes written since the last flush began.
    unflushed: AtomicU64,
    /// Whether a flush is scheduled.
    flushing: AtomicBool,
    /// Ends that task's pause.
    flush_now: Notify,
    /// Whether the file was truncated. Read-locked during each write to the file.
    cut_off: RwLock<bool>,
}

/// The state of the data file as this process left it.
#[derive(Debug)]
pub(super) struct FileState {
    /// After the last change of ours. Other times mean that another process has changed the file.
    times: Times,
    /// The number of times that ready chunks stopped being so.
    doubts: u64,
}

impl FileState {
    pub(super) fn doubts(&self) -> u64 {
        self.doubts
    }
}

/// The state of the disk.
#[derive(Debug)]
struct Durable {
    /// Chunks, as words of a [`ReadyMap`].
    words: Vec<u64>,
    /// The times of the data file in the seal, if there is one.
    seal: Option<Times>,
}

impl BlobFile {
    pub(super) fn new(store: Store, found: Found) -> Self {
        BlobFile {
            store,
            state: Mutex::new(FileState { times: found.times, doubts: 0 }),
            durable: Mutex::new(Durable {
                words: found.durable,
                seal: found.sealed.then_some(found.times),
            }),
            unflushed: AtomicU64::new(0),
            flushing: AtomicBool::new(false),
            flush_now: Notify::new(),
            cut_off: RwLock::default(),
        }
    }

    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// Keeps the data file and the maps as they are.
    pub(super) fn lock_state(&self) -> MutexGuard<'_, FileState> {
        lock(&self.state)
    }

    /// Lets the kernel drop clean pages of the data file: `size` bytes from `start`, or all.
    pub(super) fn drop_pages(&self, start: u64, size: Option<NonZeroU64>) {
        // Only advice: dirty pages stay, and when it is not taken, only memory is lost.
        let _ = fadvise(self.store.data(), start, size, Advice::DontNeed);
    }

    /// Returns whether the file has the right bytes of a chunk, and zeros behind it up to the next
    /// block. Blocks.
    pub(super) fn reads_right(&self, chunk: &Chunk) -> bool {
        let size = chunk.decoded_size as usize;
        let mut bytes = vec![0; size.next_multiple_of(BLOCK_SIZE as usize)];
        match self.store.data().read_exact_at(&mut bytes, chunk.decoded.0) {
            Ok(()) => {
                let (content, padding) = bytes.split_at(size);
                chunk.digest.matches(content) && padding.iter().all(|byte| *byte == 0)
            }
            Err(error) => {
                let path = self.store.data_path();
                tracing::warn!(path = %path.display(), at = %chunk.decoded, %error, "cannot read");
                false
            }
        }
    }

    /// Makes the next flush begin at once.
    pub(super) fn flush_now(&self) {
        self.flush_now.notify_one();
    }
}

impl CachedBlob {
    /// Locks the maps, after a look at whether another process has changed the data file. If so,
    /// nothing in it is believed any more.
    pub(super) fn look(self: &Arc<Self>) -> io::Result<MutexGuard<'_, FileState>> {
        let mut state = self.file.lock_state();
        let times = self.file.store.times()?;
        if times != state.times {
            state.times = times;
            state.doubts += 1;
            if self.residency.doubt_all() {
                tracing::warn!(path = %self.path().display(),
                    "another process has changed the file: its chunks are checked again");
                self.guarded.is_incomplete();
                self.check_soon();
            }
        }
        Ok(state)
    }

    /// Changes the data file, without mistaking that for another process's change.
    pub(super) fn change(
        self: &Arc<Self>,
        change: impl FnOnce(&File) -> io::Result<()>,
    ) -> io::Result<MutexGuard<'_, FileState>> {
        let mut state = self.look()?;
        let result = change(self.file.store.data());
        // A failed write may have changed the file too.
        state.times = self.file.store.times()?;
        result.map(|()| state)
    }

    /// Writes the right bytes of a chunk and marks it ready. Blocks.
    pub(super) fn keep(self: &Arc<Self>, at: usize, bytes: &[u8]) -> Result<(), ReadError> {
        let cut_off = read(&self.file.cut_off);
        if *cut_off {
            return Err(ReadError::CutOff { blob: self.id() });
        }
        self.put(at, bytes).map_err(|error| self.write_error(error))?;
        let size = bytes.len() as u64;
        if let Some(cache) = self.cache.upgrade() {
            cache.wrote(size);
        }
        let unflushed = self.file.unflushed.fetch_add(size, Ordering::Relaxed) + size;
        if unflushed >= FLUSH_BYTES || self.residency.is_full() {
            self.file.flush_now();
        }
        self.flush_soon();
        Ok(())
    }

    /// Writes the bytes of a chunk, and zeros up to the next block, and marks the chunk ready.
    fn put(self: &Arc<Self>, at: usize, bytes: &[u8]) -> io::Result<()> {
        let start = self.chunk(at).decoded.0;
        let end = start + bytes.len() as u64;
        let padding = (end.next_multiple_of(BLOCK_SIZE) - end) as usize;
        let state = self.change(|data| {
            // The chunk is missing, so data here is worthless. Punch it out: after a failed
            // writeback, ext4 takes such blocks for written once they are in its cache, but never
            // records that on the disk: data written over them would read as zeros one day.
            if seek(data, SeekFrom::Data(start)).is_ok_and(|found| found < end) {
                let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let _ = fallocate(data, punch, start, end + padding as u64 - start);
            }
            data.write_all_at(bytes, start)?;
            data.write_all_at(&[0; BLOCK_SIZE as usize][..padding], end)
        })?;
        self.residency.asked().note(at..at + 1);
        self.residency.arrived(at);
        self.note(&state, at / 64);
        self.offer(std::iter::once(at));
        Ok(())
    }

    /// Truncates the file unless the blob is complete, at the end of a daemon that leaves readers
    /// behind: they get EIO from then on instead of holes. The cached data of the blob is lost.
    pub fn cut_off(&self) -> io::Result<()> {
        // Waits for writes in progress; a later one would make the file longer again.
        let mut cut_off = write(&self.file.cut_off);
        if self.is_complete() {
            return Ok(());
        }
        *cut_off = true;
        self.file.store.data().set_len(0)
    }

    /// Takes the whole data file for right: this process wrote it, and checked every chunk.
    pub(in crate::cache) fn adopt(self: &Arc<Self>) -> io::Result<()> {
        let count = self.layout.chunks().len();
        {
            let state = self.look()?;
            self.residency.asked().note(0..count);
            (0..count).for_each(|at| self.residency.arrived(at));
            (0..word_count(count)).for_each(|word| self.note(&state, word));
        }
        self.offer(0..count);
        let size = self.layout.chunks().iter().map(|chunk| u64::from(chunk.decoded_size)).sum();
        if let Some(cache) = self.cache.upgrade() {
            cache.wrote(size);
        }
        self.flush_soon();
        Ok(())
    }

    /// Takes those chunks from `file` that are missing. All of it is right.
    pub(in crate::cache) fn fill_from(self: &Arc<Self>, file: &File) -> io::Result<()> {
        let mut content = Vec::new();
        for at in (0..self.layout.chunks().len()).filter(|at| !self.residency.is_ready(*at)) {
            let chunk = self.chunk(at);
            content.resize(chunk.decoded_size as usize, 0);
            file.read_exact_at(&mut content, chunk.decoded.0)?;
            self.keep(at, &content).map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// Makes every further read fail, because the content was not what was stated. Blocks.
    pub(crate) fn refuse(&self) -> io::Result<()> {
        *write(&self.file.cut_off) = true;
        self.residency.keep_only(&[]);
        self.rearm(Hold::UntilReleased)
    }

    /// Makes every further read fail, and removes the content from the disk. Blocks, and with
    /// fanotify until the session has answered.
    pub(crate) fn condemn(&self) -> io::Result<()> {
        // Before the file is cut: a loop device reads zeros behind the end of its file.
        self.refuse()?;
        self.file.store.remove_durable()?;
        self.file.store.data().set_len(0)
    }

    /// Notes a word of the maps for the next process.
    pub(super) fn note(&self, _state: &MutexGuard<'_, FileState>, word: usize) {
        if let Err(error) = self.file.store.note(word, self.residency.known_word(word)) {
            // Costs fetching a chunk again after a crash, or checking one for nothing.
            tracing::debug!(blob = %self.id(), %error, "cannot note a chunk");
        }
    }

    /// Has a flush that is scheduled begin.
    pub(in crate::cache) fn flush_at_once(&self) {
        if self.file.flushing.load(Ordering::Acquire) {
            self.file.flush_now();
        }
    }

    /// Makes sure that a flush follows everything that is known now.
    pub(super) fn flush_soon(self: &Arc<Self>) {
        if self.file.flushing.swap(true, Ordering::AcqRel) {
            return;
        }
        let blob = self.clone();
        self.workers.runtime().spawn(async move {
            let mut pause = blob.settings.flush_after;
            loop {
                let longest = pause.max(COURTESY);
                let patience = blob.workers.after_urgent_fetches(pause, longest);
                tokio::select! {
                    () = patience => {}
                    () = blob.file.flush_now.notified() => {}
                }
                blob.file.flushing.store(false, Ordering::Release);
                let flusher = blob.clone();
                match tokio::task::spawn_blocking(move || flusher.flush()).await {
                    Ok(Err(error)) => {
                        tracing::warn!(blob = %blob.id(), %error, "cannot flush the cache");
                        pause = FLUSH_PAUSE.min(pause * 2 + Duration::from_millis(100));
                        if blob.file.flushing.swap(true, Ordering::AcqRel) {
                            return;
                        }
                    }
                    Ok(Ok(())) | Err(_) => return,
                }
            }
        });
    }

    /// Makes the present content of the file survive a power cut, and seals it if all of it is
    /// ready. Blocks until the disk has it.
    ///
    /// # Errors
    /// The disk did not take it. Chunks that were not on the disk before count as missing from then
    /// on, since the kernel drops pages that it could not write.
    pub fn flush(self: &Arc<Self>) -> io::Result<()> {
        let mut durable = lock(&self.file.durable);
        self.file.unflushed.store(0, Ordering::Relaxed);
        let (words, doubts) = {
            let state = self.look()?;
            let words = self.residency.known();
            let is_checked = self.residency.suspect_chunks() == 0;
            if is_checked && durable.words == words && durable.seal == Some(state.times) {
                drop(state);
                self.show_completeness(&durable);
                return Ok(());
            }
            (words, is_checked.then_some(state.doubts))
        };
        if let Err(error) = self.file.store.sync_data() {
            self.keep_only(&durable.words);
            return Err(error);
        }
        let seal = doubts.map(|doubts| self.seal(doubts)).transpose()?.flatten();
        self.file.store.save_durable(&words, seal.as_ref())?;
        *durable = Durable { words, seal };
        self.show_completeness(&durable);
        Ok(())
    }

    /// The times of the file, if nothing has been doubted since there were `doubts`.
    fn seal(self: &Arc<Self>, doubts: u64) -> io::Result<Option<Times>> {
        let before = self.file.store.times()?;
        if !before.are_settled() {
            thread::sleep(TICK);
        }
        let state = self.look()?;
        Ok((state.doubts == doubts && state.times == before).then_some(before))
    }

    fn show_completeness(&self, durable: &Durable) {
        let all = ReadyMap::new(self.layout.chunks().len(), &durable.words).is_full();
        // Under the lock, since a chunk may become suspect in between.
        let state = self.file.lock_state();
        if all && self.residency.is_full() {
            self.guarded.has_all();
        }
        drop(state);
        if self.guarded.is_open() && self.guarded.has_guards() {
            self.foresight.ends(|at| self.stored_bytes(at));
        }
    }

    /// Gives chunks up: when this returns they are missing, also for the next process.
    pub(super) fn forget(&self, chunks: &[usize]) -> io::Result<()> {
        let mut durable = lock(&self.file.durable);
        let words = {
            let mut state = self.file.lock_state();
            state.doubts += 1;
            self.guarded.is_incomplete();
            for at in chunks.iter().copied() {
                self.residency.gone(at);
                self.foresight.gone(at);
                self.note(&state, at / 64);
            }
            self.withdraw_offers(chunks);
            let known = self.residency.known();
            let both = durable.words.iter().zip(known).map(|(durable, known)| durable & known);
            both.collect::<Vec<_>>()
        };
        if let Err(error) = self.file.store.save_durable(&words, None) {
            // On a full disk: no map at all takes no room, and a power cut then costs the blob.
            tracing::debug!(blob = %self.id(), %error, "the map goes");
            self.file.store.remove_durable()?;
        }
        *durable = Durable { words, seal: None };
        Ok(())
    }

    /// Makes every chunk missing whose bit is not in `words`.
    fn keep_only(&self, words: &[u64]) {
        let mut state = self.file.lock_state();
        state.doubts += 1;
        self.residency.keep_only(words);
        (0..words.len()).for_each(|word| self.note(&state, word));
    }

    /// Waits until the present content is on the disk.
    pub(crate) async fn settled(self: &Arc<Self>) -> Result<(), ReadError> {
        let blob = self.clone();
        let flushed = tokio::task::spawn_blocking(move || blob.flush()).await;
        flushed.unwrap_or(Ok(())).map_err(|error| self.write_error(error))
    }
}
