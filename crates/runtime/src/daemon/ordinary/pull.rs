//! The first pull of a layer: fetched whole, and read once.
//!
//! ```text
//! ranges, several at a time ─▶ stored SHA-256 ─▶ inflate ─▶ SHA-256 of the tar ─▶ tar ─┬─▶ cache
//!          └─▶ spool                                                                   └─▶ index
//! ```
//! Nothing is unpacked. Memory is bounded by the ranges in flight and by the builder's limit for
//! trees and indexes. The layer counts if both digests are those that manifest and configuration
//! have, of which an artifact's has none; else nothing of it is kept. A range that does not arrive
//! is asked for again; a pull that was broken off goes on behind its spool.

use std::{
    io::{self, Read},
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

use bytes::{Buf as _, Bytes};
use futures_util::stream::{self, StreamExt as _};
use lazuli_image::{Decoded, Digest, Stored};
use lazuli_registry::{RegistryError, Repository};

use super::{
    claimed_layer::ClaimedLayer,
    pulls::PullFor,
    spool::Spool,
    store::IndexStore,
    whole_layer::{self, LayerError},
};
use crate::{
    cache::Cache, image::from_indexes::blob_of, sharing::workers::UrgentFetch, sync::lock,
};

/// Stored bytes of one request.
const PART: u64 = 2 << 20;

/// Requests for one layer at the same time, and parts that wait to be read.
const PARALLEL: usize = 4;
const WAITING: usize = 2;

/// Requests for the same part before the pull is given up, and the pause after the first, which
/// doubles: 7.5 seconds together.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(500);

/// Decoded bytes after which free disk space is checked again.
const LOOK: u64 = 64 << 20;

/// The context of pulls.
pub(super) struct Pull {
    pub(super) repository: Arc<dyn Repository>,
    pub(super) cache: Arc<Cache>,
    pub(super) store: Arc<IndexStore>,
    /// See [`key_of`](super::begin::key_of).
    pub(super) repository_key: String,
    pub(super) by: PullFor,
    /// Counts stored bytes of the layer that are here.
    pub(super) fetched: Arc<AtomicU64>,
}

impl Pull {
    /// Pulls a layer, which must be what is claimed of it.
    pub(super) async fn layer(self, layer: &ClaimedLayer) -> Result<(), LayerError> {
        let mut spool = self.spool(layer);
        let held = spool.as_ref().map_or(0, Spool::held);
        if held > 0 {
            let size = layer.descriptor.size;
            tracing::info!(layer = %layer.digest(), held, size, "the pull goes on");
        }
        let mut pulled = self.fetch(layer, &mut spool).await;
        let is_wrong = matches!(pulled, Err(LayerError::Build(_) | LayerError::DiffId { .. }));
        // A power cut may have damaged the spool.
        if held > 0 && is_wrong && clear(&mut spool) {
            pulled = self.fetch(layer, &mut spool).await;
        }
        let goes_on = matches!(pulled, Err(LayerError::Registry(_)));
        if !goes_on && let Some(spool) = spool {
            spool.remove();
        }
        pulled
    }

    /// The layer's spool; `None` for a layer that takes a single request.
    fn spool(&self, layer: &ClaimedLayer) -> Option<Spool> {
        let size = layer.descriptor.size;
        if size <= PART {
            return None;
        }
        let path = self.store.spool(&self.repository_key, &layer.key());
        let opened = Spool::open(path, size);
        let failed = |error: &io::Error| {
            tracing::warn!(layer = %layer.digest(), %error, "its pull cannot be continued");
        };
        opened.inspect_err(failed).ok().flatten()
    }

    async fn fetch(
        &self,
        layer: &ClaimedLayer,
        spool: &mut Option<Spool>,
    ) -> Result<(), LayerError> {
        let held = spool.as_ref().map_or(0, Spool::held);
        self.fetched.store(held, Ordering::Relaxed);
        let before = spool.as_ref().map(Spool::read_held).transpose();
        let before: Box<dyn Read + Send> = match before.map_err(LayerError::Store)? {
            Some(before) => Box::new(before),
            None => Box::new(io::empty()),
        };
        let (parts, arriving) = mpsc::sync_channel(WAITING);
        let source = before.chain(Arriving { arriving, part: Bytes::new() });
        let (cache, store, by) = (self.cache.clone(), self.store.clone(), self.by.clone());
        let read = {
            let layer = layer.clone();
            move || read(&cache, &store, &layer, &by, source)
        };
        let urgent = self.cache.urgent_fetch();
        let indexing = tokio::task::spawn_blocking(read);
        let fetched = self.send_parts(layer, held, spool, parts, &urgent).await;
        let indexed = indexing.await.unwrap_or(Err(LayerError::Ended));
        fetched?;
        indexed
    }

    /// Fetches the part behind the first `held` bytes, and passes it to the reader.
    async fn send_parts(
        &self,
        layer: &ClaimedLayer,
        held: u64,
        spool: &mut Option<Spool>,
        parts: mpsc::SyncSender<io::Result<Bytes>>,
        urgent: &UrgentFetch<'_>,
    ) -> Result<(), RegistryError> {
        let (digest, size) = (layer.digest(), layer.descriptor.size);
        let ranges = (held..size).step_by(PART as usize).map(|at| at..size.min(at + PART));
        let fetch = |range| part(self.repository.clone(), digest, size, range);
        let mut requests = stream::iter(ranges).map(fetch).buffered(PARALLEL);
        while let Some(part) = requests.next().await {
            urgent.data_arrived();
            let (part, failed) = match part {
                Ok(part) => {
                    self.fetched.fetch_add(part.len() as u64, Ordering::Relaxed);
                    (Ok(part), None)
                }
                Err(error) => (Err(io::Error::other(error.to_string())), Some(error)),
            };
            let (parts, own) = (parts.clone(), spool.take());
            // The reader may be slow, and is on a thread of its own.
            let sent = tokio::task::spawn_blocking(move || {
                let own = match &part {
                    Ok(part) => own.and_then(|spool| append(spool, part)),
                    Err(_) => own,
                };
                (own, parts.send(part).is_ok())
            });
            let (own, is_sent) = sent.await.unwrap_or((None, false));
            *spool = own;
            if let Some(error) = failed {
                return Err(error);
            }
            if !is_sent {
                break;
            }
        }
        Ok(())
    }
}

/// Appends a part to a spool. After an error the pull continues, but could not be resumed.
fn append(mut spool: Spool, part: &[u8]) -> Option<Spool> {
    match spool.append(part) {
        Ok(()) => Some(spool),
        Err(error) => {
            tracing::debug!(%error, "the pull cannot be continued");
            spool.remove();
            None
        }
    }
}

/// Truncates a spool.
fn clear(spool: &mut Option<Spool>) -> bool {
    spool.as_mut().is_some_and(|spool| spool.clear().is_ok())
}

/// Fetches one part of a layer, and retries transient failures.
async fn part(
    repository: Arc<dyn Repository>,
    layer: Digest,
    size: u64,
    range: Range<u64>,
) -> Result<Bytes, RegistryError> {
    let mut pause = PAUSE;
    let mut tries = 1;
    loop {
        let stored = Stored(range.start)..Stored(range.end);
        match repository.read(&layer, size, stored, &|_| {}).await {
            Err(error) if tries < TRIES && error.is_transient() => {
                tracing::debug!(%layer, ?range, %error, "asked for again");
                tokio::time::sleep(pause).await;
                (tries, pause) = (tries + 1, pause * 2);
            }
            other => return other,
        }
    }
}

/// Reads a layer once, and keeps it if its digests are right. Blocks.
fn read(
    cache: &Arc<Cache>,
    store: &IndexStore,
    layer: &ClaimedLayer,
    by: &PullFor,
    source: impl Read + Send + 'static,
) -> Result<(), LayerError> {
    let has_room = |bytes| match by {
        PullFor::Containerd => cache.has_room_for_the_rest(bytes),
        PullFor::Command(_) => cache.has_room_on_request(bytes),
    };
    // Tars unpack to two or three times as much.
    let unpacked = if layer.file.is_some() { 1 } else { 3 };
    if !has_room(layer.descriptor.size.saturating_mul(unpacked)) {
        return Err(LayerError::NoRoom);
    }
    let incoming = cache.incoming()?;
    let mut written = 0;
    let is_full = AtomicBool::new(false);
    let mut sink = |at: Decoded, content: &[u8]| {
        let before = written / LOOK;
        written += content.len() as u64;
        let kept = if written / LOOK > before && !has_room(LOOK) {
            Err(io::ErrorKind::StorageFull.into())
        } else {
            incoming.write(at, content)
        };
        let full = kept.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::StorageFull);
        is_full.store(full, Ordering::Relaxed);
        kept
    };
    // The builder's error would mean that the layer is wrong, and worth a second pull.
    let wrong_or_full =
        |error| if is_full.load(Ordering::Relaxed) { LayerError::NoRoom } else { error };
    let known = whole_layer::read(layer, source, &mut sink).map_err(wrong_or_full)?;
    if let Some(blob) = blob_of(known.clone())? {
        let blob = cache.import(incoming, &blob)?;
        if layer.file.is_some() {
            // It need not be hashed once more.
            store.note_file(&blob.description(), true).map_err(LayerError::Store)?;
        }
        if let PullFor::Command(open) = by {
            lock(open).push(blob);
        }
    }
    whole_layer::keep(store, &layer.key(), &known)
}

/// A layer as it arrives.
struct Arriving {
    arriving: mpsc::Receiver<io::Result<Bytes>>,
    part: Bytes,
}

impl Read for Arriving {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.part.is_empty() {
            match self.arriving.recv() {
                Ok(part) => self.part = part?,
                Err(mpsc::RecvError) => return Ok(0),
            }
        }
        let count = buffer.len().min(self.part.len());
        self.part.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}
