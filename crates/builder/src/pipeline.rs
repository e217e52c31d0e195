//! Reads layers and works on their chunks on all cores, with bounded memory.
//!
//! Readers (one layer each) unpack, parse and cut; workers compute digests and compress what is
//! new. Between them is a queue of a few batches, so memory does not depend on the size of the
//! image.

use std::{
    collections::VecDeque,
    panic::resume_unwind,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
};

use lazuli_image::{Algorithm, BlobIndex, Codec};

use crate::{
    Dictionary, Layer, LayerContents, LayerSource,
    chunk::{Batch, Cutter, Stopped},
    dedup::{Chunks, SharedChunks},
    entry::{Entry, EntryKind},
    error::{BuildError, SourceError},
    layer_file::{Grown, LayerFile},
    report::Progress,
    source::{self, ReadError, dir::Role},
    unit::UnitEncoder,
};

/// How to process the content of layers.
pub(crate) struct IngestSettings<'a> {
    pub(crate) chunk_size: u32,
    pub(crate) algorithm: Algorithm,
    pub(crate) threads: usize,
    /// Store for compressed chunks; `None` to compute only digests.
    pub(crate) store: Option<Store<'a>>,
}

/// How chunks are stored.
#[derive(Clone, Copy)]
pub(crate) struct Store<'a> {
    pub(crate) codec: Codec,
    pub(crate) level: i32,
    /// Maximum number of bytes in a batch; 0 for no batches.
    pub(crate) batch_size: u32,
    /// One for each layer.
    pub(crate) layer_files: &'a [LayerFile],
}

/// All layers, read.
pub(crate) struct Ingested {
    /// For every layer its name and entries.
    pub(crate) layers: Vec<(String, Vec<Entry>)>,
    pub(crate) chunks: Chunks,
}

/// Reads all layers. If several are damaged, reports the lowest layer found damaged.
pub(crate) fn ingest(
    layers: Vec<Layer>,
    settings: &IngestSettings<'_>,
    dictionary: &Dictionary,
    progress: &dyn Progress,
) -> Result<Ingested, BuildError> {
    let names: Vec<String> = layers.iter().map(|layer| layer.name.clone()).collect();
    let count = layers.len();
    let (sender, receiver) = sync_channel(settings.threads);
    let shared = Shared {
        settings,
        progress,
        index: SharedChunks::new(count, dictionary),
        todo: Mutex::new(layers.into_iter().enumerate().collect()),
        done: Mutex::new((0..count).map(|_| Vec::new()).collect()),
        buffers: Mutex::default(),
        stop: AtomicBool::new(false),
        failure: Mutex::default(),
    };
    let receiver = Arc::new(Mutex::new(receiver));
    thread::scope(|scope| {
        let reader = |_| {
            let sender = sender.clone();
            scope.spawn(|| shared.read_layers(sender))
        };
        let worker = |_| {
            let receiver = Arc::clone(&receiver);
            scope.spawn(|| shared.work(receiver))
        };
        let mut threads: Vec<_> = (0..settings.threads.min(count)).map(reader).collect();
        threads.extend((0..settings.threads).map(worker));
        // Workers end when the last reader has dropped its sender, and readers when the last worker
        // has dropped its receiver.
        drop((sender, receiver));
        // The end of the scope alone would not wait until the threads have freed their memory.
        for thread in threads {
            thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        }
    });
    if let Some((_, error)) =
        shared.failure.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner())
    {
        return Err(error);
    }
    let entries = shared.done.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    Ok(Ingested { layers: names.into_iter().zip(entries).collect(), chunks: shared.index.finish() })
}

struct Shared<'a> {
    settings: &'a IngestSettings<'a>,
    progress: &'a dyn Progress,
    index: SharedChunks,
    todo: Mutex<VecDeque<(usize, Layer)>>,
    done: Mutex<Vec<Vec<Entry>>>,
    /// Buffers of batches that are done.
    buffers: Mutex<Vec<Vec<u8>>>,
    stop: AtomicBool,
    failure: Mutex<Option<(usize, BuildError)>>,
}

impl Shared<'_> {
    fn read_layers(&self, sender: SyncSender<Batch>) {
        let hand_over = |batch: Batch| {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Stopped);
            }
            sender.send(batch).map_err(|_| Stopped)?;
            Ok(lock(&self.buffers).pop().unwrap_or_default())
        };
        while !self.stop.load(Ordering::Relaxed) {
            let Some((index, layer)) = lock(&self.todo).pop_front() else { break };
            let Layer { name, stored_size, source } = layer;
            let mut cutter = Cutter::new(index as u8, self.settings.chunk_size, &hand_over);
            let on_read = |bytes| self.progress.bytes_read(index, bytes);
            let entries = match source {
                LayerSource::Tar(raw) => source::read_tar(raw, stored_size, &mut cutter, &on_read),
                LayerSource::File(path, raw) => {
                    source::read_file(&path, raw, stored_size, &mut cutter, &on_read)
                }
                LayerSource::Directory(root) => {
                    source::dir::read(&root, Role::Tree, &mut cutter, &on_read)
                }
                LayerSource::Upper(root) => {
                    source::dir::read(&root, Role::Upper, &mut cutter, &on_read)
                }
                LayerSource::Known(record) => self.known(index, *record),
            };
            let flushed =
                |entries| cutter.flush().map(|()| entries).map_err(|Stopped| ReadError::Stopped);
            match entries.and_then(flushed) {
                Ok(entries) => {
                    self.progress.layer_done(index);
                    lock(&self.done)[index] = entries;
                }
                Err(ReadError::Stopped) => {}
                Err(ReadError::Source(problem)) => {
                    self.fail(index, BuildError::Layer { layer: name, problem });
                }
            }
        }
    }

    /// Enters a known layer, which is not read again.
    fn known(&self, layer: usize, record: LayerContents) -> Result<Vec<Entry>, ReadError> {
        let fresh = self.index.enter(layer as u8, 0, &record.chunks(), &self.stop);
        if self.settings.store.is_some() && !fresh.is_empty() {
            return Err(SourceError::NotStored { chunks: fresh.len() }.into());
        }
        let mut entries = record.entries;
        for entry in &mut entries {
            if let EntryKind::Regular { chunks, .. } = &mut entry.kind {
                chunks.iter_mut().for_each(|chunk| chunk.blob = BlobIndex(layer as u8));
            }
        }
        Ok(entries)
    }

    fn work(&self, receiver: Arc<Mutex<Receiver<Batch>>>) {
        let _guard = StopOnPanic(&self.stop);
        let mut worker = match Worker::new(self.settings) {
            Ok(worker) => Some(worker),
            Err(error) => {
                self.fail(0, error);
                None
            }
        };
        loop {
            let received = lock(&receiver).recv();
            let Ok(batch) = received else { break };
            // After a failure batches are only taken off the queue, so that no reader waits
            // forever.
            if let Some(worker) = worker.as_mut().filter(|_| !self.stop.load(Ordering::Relaxed)) {
                match worker.process(&batch, &self.index, &self.stop) {
                    Ok(Some(Grown { path, bytes })) if batch.layer == 0 => {
                        self.progress.lowest_grown(&path, bytes);
                    }
                    Ok(_) => {}
                    Err(error) => self.fail(batch.layer.into(), error),
                }
            }
            lock(&self.buffers).push(batch.data);
        }
    }

    fn fail(&self, layer: usize, error: BuildError) {
        self.stop.store(true, Ordering::Relaxed);
        let mut failure = lock(&self.failure);
        if failure.as_ref().is_none_or(|(lowest, _)| layer < *lowest) {
            *failure = Some((layer, error));
        }
    }
}

/// Stops the other threads when this one panics, so that they don't wait for it.
struct StopOnPanic<'a>(&'a AtomicBool);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// A poisoned lock means that another thread panicked; the scope passes that on.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

struct Worker<'a> {
    settings: &'a IngestSettings<'a>,
    store: Option<(UnitEncoder, Store<'a>)>,
    stored: Vec<u8>,
}

impl<'a> Worker<'a> {
    fn new(settings: &'a IngestSettings<'a>) -> Result<Self, BuildError> {
        let encoder = |store: Store<'a>| Ok((UnitEncoder::new(store.codec, store.level)?, store));
        let store = settings.store.map(encoder).transpose().map_err(BuildError::Compress)?;
        Ok(Worker { settings, store, stored: Vec::new() })
    }

    fn process(
        &mut self,
        batch: &Batch,
        index: &SharedChunks,
        stop: &AtomicBool,
    ) -> Result<Option<Grown>, BuildError> {
        let digest = |chunk: &[u8]| (self.settings.algorithm.digest(chunk), chunk.len() as u32);
        let digests: Vec<_> = batch.chunks().map(digest).collect();
        let fresh = index.enter(batch.layer, batch.first, &digests, stop);
        let Some((encoder, store)) = &mut self.store else { return Ok(None) };
        self.stored.clear();
        let mut written = Vec::with_capacity(fresh.len());
        let mut fresh = &fresh[..];
        let mut chunks = Vec::new();
        for unit in batch.units(store.batch_size as usize) {
            let (here, later) =
                fresh.split_at(fresh.partition_point(|chunk| chunk.position < unit.end));
            fresh = later;
            if here.is_empty() {
                continue;
            }
            chunks.clear();
            chunks.extend(here.iter().map(|chunk| batch.chunk(chunk.position)));
            let places = encoder.encode(&chunks, &mut self.stored);
            written.extend(here.iter().map(|chunk| chunk.id).zip(places));
        }
        store.layer_files[usize::from(batch.layer)].add(batch.number, &self.stored, written, stop)
    }
}
