//! How chunks become ready, and how they are made to survive: the process, the kernel, and doubt.

use std::{
    fs::File,
    io, iter,
    os::unix::fs::FileExt as _,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    thread,
    time::Duration,
};

use lazuli_image::BLOCK_SIZE;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};

use super::{
    CachedBlob,
    ready::ReadyMap,
    store::{TICK, Times},
};

/// Decoded bytes that are written before a flush does not wait any longer.
pub(super) const FLUSH_BYTES: u64 = 64 << 20;

/// Longest pause between two flushes that fail.
const FLUSH_PAUSE: Duration = Duration::from_secs(60);

/// The state of the data file as this process left it.
#[derive(Debug)]
pub(super) struct Touch {
    /// After the last change of ours. Other times mean that somebody else has changed the file.
    pub(super) times: Times,
    /// How often something that was ready stopped being so.
    pub(super) doubts: u64,
}

/// What the disk has.
#[derive(Debug)]
pub(super) struct Durable {
    /// Chunks, as words of a [`ReadyMap`].
    pub(super) words: Vec<u64>,
    /// The times of the data file in the seal, if there is one.
    pub(super) seal: Option<Times>,
}

impl CachedBlob {
    /// Locks the maps, after a look at whether somebody else has changed the data file. If so,
    /// nothing in it is believed any more.
    pub(super) fn look(self: &Arc<Self>) -> io::Result<MutexGuard<'_, Touch>> {
        let mut touch = lock(&self.touch);
        let times = self.store.times()?;
        if times != touch.times {
            touch.times = times;
            touch.doubts += 1;
            if !self.ready.is_empty() {
                tracing::warn!(path = %self.path().display(),
                    "somebody else has changed the file: its chunks are checked again");
                self.complete.send_replace(false);
                self.suspect.add(&self.ready.words());
                self.ready.keep_only(&[]);
                self.check_soon();
            }
        }
        Ok(touch)
    }

    /// Changes the data file, without mistaking that for somebody else's change.
    pub(super) fn change(
        self: &Arc<Self>,
        change: impl FnOnce(&File) -> io::Result<()>,
    ) -> io::Result<MutexGuard<'_, Touch>> {
        let mut touch = self.look()?;
        let result = change(self.store.data());
        // Also what failed may have changed the file.
        touch.times = self.store.times()?;
        result.map(|()| touch)
    }

    /// Writes the bytes of a chunk, and zeros up to the next block, and marks the chunk ready.
    pub(super) fn put(self: &Arc<Self>, at: usize, bytes: &[u8]) -> io::Result<()> {
        let start = self.chunk(at).decoded.0;
        let end = start + bytes.len() as u64;
        let padding = (end.next_multiple_of(BLOCK_SIZE) - end) as usize;
        let touch = self.change(|data| {
            // Nothing there is worth keeping. After a failed writeback ext4 takes such blocks for
            // written once they are in its cache, and never notes it on the disk: what is written
            // over them would read as zeros one day.
            if seek(data, SeekFrom::Data(start)).is_ok_and(|found| found < end) {
                let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let _ = fallocate(data, punch, start, end + padding as u64 - start);
            }
            data.write_all_at(bytes, start)?;
            data.write_all_at(&[0; BLOCK_SIZE as usize][..padding], end)
        })?;
        self.asked.note(at..at + 1);
        self.ready.set(at);
        self.note(&touch, at / 64);
        self.tell_others(iter::once(at));
        Ok(())
    }

    /// Notes a word of the maps for the next process.
    pub(super) fn note(&self, _touch: &MutexGuard<'_, Touch>, word: usize) {
        let bits = self.suspect.word(word) | self.ready.word(word);
        if let Err(error) = self.store.note(word, bits) {
            // Costs fetching a chunk again after a crash, or checking one for nothing.
            tracing::debug!(blob = %self.id(), %error, "cannot note a chunk");
        }
    }

    /// Everything that is in the file as far as this process knows, ready or suspect.
    fn known(&self, _touch: &MutexGuard<'_, Touch>) -> Vec<u64> {
        let ready = self.ready.words();
        self.suspect
            .words()
            .into_iter()
            .zip(ready)
            .map(|(suspect, ready)| suspect | ready)
            .collect()
    }

    /// Makes sure that a flush follows everything that is known now.
    pub(super) fn flush_soon(self: &Arc<Self>) {
        if self.flushing.swap(true, Ordering::AcqRel) {
            return;
        }
        let blob = self.clone();
        self.workers.runtime().spawn(async move {
            let mut pause = blob.settings.flush_after;
            loop {
                let _ = tokio::time::timeout(pause, blob.hurry.notified()).await;
                blob.flushing.store(false, Ordering::Release);
                let flusher = blob.clone();
                match tokio::task::spawn_blocking(move || flusher.flush()).await {
                    Ok(Err(error)) => {
                        tracing::warn!(blob = %blob.id(), %error, "cannot flush the cache");
                        pause = FLUSH_PAUSE.min(pause * 2 + Duration::from_millis(100));
                        if blob.flushing.swap(true, Ordering::AcqRel) {
                            return;
                        }
                    }
                    Ok(Ok(())) | Err(_) => return,
                }
            }
        });
    }

    /// Makes everything that is in the file now survive a power cut, and seals it if all of it is
    /// ready. Blocks until the disk has it.
    ///
    /// # Errors
    /// The disk did not take it. What was not on the disk before counts as missing from then on,
    /// since the kernel drops pages that it could not write.
    pub fn flush(self: &Arc<Self>) -> io::Result<()> {
        let mut durable = lock(&self.durable);
        self.unflushed.store(0, Ordering::Relaxed);
        let (words, doubts) = {
            let touch = self.look()?;
            let words = self.known(&touch);
            if self.suspect.is_empty()
                && durable.words == words
                && durable.seal == Some(touch.times)
            {
                drop(touch);
                self.show_completeness(&durable);
                return Ok(());
            }
            (words, self.suspect.is_empty().then_some(touch.doubts))
        };
        if let Err(error) = self.store.sync_data() {
            self.keep_only(&durable.words);
            return Err(error);
        }
        let seal = doubts.map(|doubts| self.seal(doubts)).transpose()?.flatten();
        self.store.save_durable(&words, seal.as_ref())?;
        *durable = Durable { words, seal };
        self.show_completeness(&durable);
        Ok(())
    }

    /// The times of the file, if nothing has been doubted since there were `doubts`.
    fn seal(self: &Arc<Self>, doubts: u64) -> io::Result<Option<Times>> {
        let before = self.store.times()?;
        if !before.are_settled() {
            thread::sleep(TICK);
        }
        let touch = self.look()?;
        Ok((touch.doubts == doubts && touch.times == before).then_some(before))
    }

    fn show_completeness(&self, durable: &Durable) {
        let all = ReadyMap::new(self.layout.chunks().len(), &durable.words).is_full();
        // Under the lock, since a doubt may come in between.
        let _touch = lock(&self.touch);
        let held = self.guarded.is_held.load(Ordering::Acquire);
        if all && self.ready.is_full() && !held {
            self.guarded.is_open.store(true, Ordering::Release);
            self.complete.send_replace(true);
        }
    }

    /// Gives chunks up: when this returns they are missing, also for the next process.
    pub(super) fn forget(&self, chunks: &[usize]) -> io::Result<()> {
        let mut durable = lock(&self.durable);
        let words = {
            let mut touch = lock(&self.touch);
            touch.doubts += 1;
            self.complete.send_replace(false);
            for at in chunks.iter().copied() {
                self.ready.clear(at);
                self.suspect.clear(at);
                self.note(&touch, at / 64);
            }
            self.tell_others_not(chunks);
            let known = self.known(&touch);
            let both = durable.words.iter().zip(known).map(|(durable, known)| durable & known);
            both.collect::<Vec<_>>()
        };
        if let Err(error) = self.store.save_durable(&words, None) {
            // On a full disk: no map at all takes no room, and a power cut then costs the blob.
            tracing::debug!(blob = %self.id(), %error, "the map goes");
            self.store.remove_durable()?;
        }
        *durable = Durable { words, seal: None };
        Ok(())
    }

    /// Forgets every chunk whose bit is not in `words`.
    fn keep_only(&self, words: &[u64]) {
        let mut touch = lock(&self.touch);
        touch.doubts += 1;
        self.ready.keep_only(words);
        self.suspect.keep_only(words);
        (0..words.len()).for_each(|word| self.note(&touch, word));
    }
}

/// Locks what is right at every moment, also when a holder panicked.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
