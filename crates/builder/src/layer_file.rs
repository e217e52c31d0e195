//! A layer's compressed chunks, in the order of the layer, whichever thread compressed them.
//!
//! A layer's file is a prefix of its blob unless one of its chunks belongs to a lower layer that
//! was read later; then [`crate::pack`] copies the others. The lowest layer's file always is a
//! prefix.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Write as _},
    path::PathBuf,
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use lazuli_image::{Algorithm, digest::Hasher};

use crate::{
    dedup::{DistinctId, LOOK},
    error::BuildError,
    scratch::Scratch,
    unit::InUnit,
};

/// Maximum number of batches that wait for an earlier one of their layer. More would only cost
/// memory.
const MAX_WAITING: usize = 8;

/// A chunk in a layer file, and how it is stored there. Chunks of one unit follow each other.
pub(crate) type StoredChunk = (DistinctId, InUnit);

/// The size that a layer file has reached.
#[derive(Debug)]
pub(crate) struct Grown {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
}

/// The file of a layer while the layer is read.
#[derive(Debug)]
pub(crate) struct LayerFile {
    scratch: Scratch,
    state: Mutex<LayerFileState>,
    /// Told whenever batches went from waiting to written.
    written: Condvar,
}

#[derive(Debug)]
struct LayerFileState {
    /// `None` while a thread writes; that thread also writes batches that queue up meanwhile.
    writer: Option<Writer>,
    /// Batches that are done before an earlier one.
    waiting: BTreeMap<u32, (Vec<u8>, Vec<StoredChunk>)>,
}

#[derive(Debug)]
struct Writer {
    /// Number of the next batch.
    next: u32,
    /// Bytes in the file.
    bytes: u64,
    so_far: Finished,
}

/// A finished layer file.
#[derive(Debug)]
pub(crate) struct Finished {
    /// Open at its end; `None` if nothing was written.
    pub(crate) file: Option<File>,
    /// Name of the file.
    pub(crate) path: PathBuf,
    /// SHA-256 of the file.
    pub(crate) hasher: Hasher,
    /// The chunks in the file, back to back.
    pub(crate) chunks: Vec<StoredChunk>,
}

impl LayerFile {
    /// An empty layer file called `name`.
    pub(crate) fn new(scratch: &Scratch, name: &str) -> Self {
        let hasher = Algorithm::Sha256.hasher();
        let path = scratch.join(name);
        let so_far = Finished { file: None, path, hasher, chunks: Vec::new() };
        let writer = Writer { next: 0, bytes: 0, so_far };
        let state = LayerFileState { writer: Some(writer), waiting: BTreeMap::new() };
        LayerFile { scratch: scratch.clone(), state: Mutex::new(state), written: Condvar::new() }
    }

    /// Adds the batch with this number; `bytes` are its chunks back to back. Every batch must be
    /// added, even without new chunks. May wait for earlier batches, until `stop` is set. Returns
    /// the new size of the layer file if this call wrote to it.
    pub(crate) fn add(
        &self,
        batch: u32,
        bytes: &[u8],
        chunks: Vec<StoredChunk>,
        stop: &AtomicBool,
    ) -> Result<Option<Grown>, BuildError> {
        let mut state = self.lock();
        while state.waiting.len() >= MAX_WAITING
            && state.writer.as_ref().is_none_or(|writer| writer.next != batch)
            && !stop.load(Ordering::Relaxed)
        {
            let woken = self.written.wait_timeout(state, LOOK);
            state = woken.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        let Some(mut writer) = state.writer.take_if(|writer| writer.next == batch) else {
            state.waiting.insert(batch, (bytes.to_vec(), chunks));
            return Ok(None);
        };
        drop(state);
        writer.write(bytes, chunks).map_err(|problem| self.scratch.failed(problem))?;
        loop {
            let mut state = self.lock();
            let Some((bytes, chunks)) = state.waiting.remove(&writer.next) else {
                let grown = writer.grown();
                state.writer = Some(writer);
                self.written.notify_all();
                return Ok(Some(grown));
            };
            drop(state);
            self.written.notify_all();
            writer.write(&bytes, chunks).map_err(|problem| self.scratch.failed(problem))?;
        }
    }

    /// Returns the layer file after all batches were added; `None` if one of them failed.
    pub(crate) fn finish(self) -> Option<Finished> {
        let state = self.state.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        state.writer.map(|writer| writer.so_far)
    }

    fn lock(&self) -> MutexGuard<'_, LayerFileState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Writer {
    fn grown(&self) -> Grown {
        Grown { path: self.so_far.path.clone(), bytes: self.bytes }
    }

    fn write(&mut self, bytes: &[u8], chunks: Vec<StoredChunk>) -> io::Result<()> {
        self.next += 1;
        if bytes.is_empty() {
            return Ok(());
        }
        let Finished { file, path, hasher, chunks: written } = &mut self.so_far;
        let file = match file {
            Some(file) => file,
            none => {
                none.insert(File::options().read(true).write(true).create_new(true).open(path)?)
            }
        };
        file.write_all(bytes)?;
        self.bytes += bytes.len() as u64;
        hasher.update(bytes);
        written.extend(chunks);
        Ok(())
    }
}
