//! The first pull of a layer: fetched whole, and read once.
//!
//! ```text
//! ranges, several at a time ─▶ stored SHA-256 ─▶ inflate ─▶ SHA-256 of the tar ─▶ tar ─┬─▶ cache
//!                                                                                      └─▶ index
//! ```
//! Nothing is unpacked, and memory is bounded by the ranges on their way. The layer counts if both
//! digests are those that manifest and configuration have; else nothing of it is kept.

use std::{
    io::{self, Read},
    sync::{Arc, mpsc},
};

use bytes::{Buf as _, Bytes};
use futures_util::stream::{self, StreamExt as _};
use lazuli_builder::{
    BuildError,
    index::{IndexLayer, KnownLayer, TakenLayer, take},
};
use lazuli_image::{Algorithm, Decoded, Digest, Hasher, Stored, oci::Descriptor};
use lazuli_registry::{RegistryError, Repository};

use super::store::{IndexStore, LayerRecord};
use crate::{
    cache::{Cache, CacheError},
    image::prefix::{PrefixError, blob_of},
};

/// Stored bytes of one request.
const PART: u64 = 2 << 20;

/// Requests for one layer at the same time, and parts that wait to be read.
const PARALLEL: usize = 4;
const WAITING: usize = 2;

/// Decoded bytes after which free disk space is looked at again.
const LOOK: u64 = 64 << 20;

/// Why a layer was not pulled.
#[derive(Debug, thiserror::Error)]
pub(super) enum PullError {
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    #[error("its tar has the digest {got}, and the image's configuration says {expected}")]
    DiffId { got: Digest, expected: Digest },
    #[error("there is too little room on the disk")]
    NoRoom,
    #[error("its index cannot be kept: {0}")]
    Store(io::Error),
    #[error("layers of other repositories take all turns")]
    Busy,
    #[error("the worker is ending")]
    Ended,
}

/// What it takes to pull layers.
pub(super) struct Pull {
    pub(super) repository: Arc<dyn Repository>,
    pub(super) cache: Arc<Cache>,
    pub(super) store: Arc<IndexStore>,
}

impl Pull {
    /// Pulls a layer whose tar has to have the digest `diff_id`.
    pub(super) async fn layer(self, layer: &Descriptor, diff_id: Digest) -> Result<(), PullError> {
        let Pull { repository, cache, store } = self;
        let (digest, size) = (layer.digest, layer.size);
        let (parts, arriving) = mpsc::sync_channel(WAITING);
        let source = Arriving { arriving, part: Bytes::new(), hasher: Some(Hashed::new(digest)) };
        let index = move || read(&cache, &store, digest, size, diff_id, source);
        let indexing = tokio::task::spawn_blocking(index);
        let ranges = (0..size).step_by(PART as usize).map(|at| at..size.min(at + PART));
        let mut requests = stream::iter(ranges)
            .map(|range| {
                let repository = repository.clone();
                async move {
                    let range = Stored(range.start)..Stored(range.end);
                    repository.read(&digest, size, range, &|_| {}).await
                }
            })
            .buffered(PARALLEL);
        let mut failed = None;
        while let Some(part) = requests.next().await {
            let part = match part {
                Ok(part) => Ok(part),
                Err(error) => {
                    let problem = io::Error::other(error.to_string());
                    failed = Some(error);
                    Err(problem)
                }
            };
            let parts = parts.clone();
            let is_failed = part.is_err();
            // The reader may be slow, and is on a thread of its own.
            let sent = tokio::task::spawn_blocking(move || parts.send(part).is_ok()).await;
            if is_failed || !sent.unwrap_or(false) {
                break;
            }
        }
        drop(parts);
        let indexed = indexing.await.unwrap_or(Err(PullError::Ended));
        match failed {
            Some(error) => Err(error.into()),
            None => indexed,
        }
    }
}

/// Reads a layer once, and keeps it if it is what it should be. Blocks.
fn read(
    cache: &Arc<Cache>,
    store: &IndexStore,
    digest: Digest,
    size: u64,
    diff_id: Digest,
    source: Arriving,
) -> Result<(), PullError> {
    // Layers unpack to two or three times as much.
    if !cache.has_room_for_the_rest(size.saturating_mul(3)) {
        return Err(PullError::NoRoom);
    }
    let incoming = cache.incoming()?;
    let mut written = 0;
    let mut sink = |at: Decoded, content: &[u8]| {
        let before = written / LOOK;
        written += content.len() as u64;
        if written / LOOK > before && !cache.has_room_for_the_rest(LOOK) {
            return Err(io::Error::other(PullError::NoRoom));
        }
        incoming.write(at, content)
    };
    let layer = IndexLayer { digest, stored_size: size, source: Box::new(source) };
    let TakenLayer { index, diff_id: got } = take(layer, &mut sink)?;
    if got != diff_id {
        return Err(PullError::DiffId { got, expected: diff_id });
    }
    let known = KnownLayer { digest, stored_size: size, diff_id, index: index.bytes.clone() };
    if let Some(blob) = blob_of(known)? {
        cache.import(incoming, &blob)?;
    }
    let index = store.keep_index(&index.bytes).map_err(PullError::Store)?;
    let record = LayerRecord { diff_id, index, is_proven: true };
    store.note_layer(&digest, &record).map_err(PullError::Store)
}

/// The SHA-256 of what is read.
struct Hashed {
    hasher: Hasher,
    expected: Digest,
}

impl Hashed {
    fn new(expected: Digest) -> Self {
        Hashed { hasher: Algorithm::Sha256.hasher(), expected }
    }
}

/// A layer as it arrives. Its end fails if it is another one.
struct Arriving {
    arriving: mpsc::Receiver<io::Result<Bytes>>,
    part: Bytes,
    /// Until the end.
    hasher: Option<Hashed>,
}

impl Read for Arriving {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.part.is_empty() && self.hasher.is_some() {
            match self.arriving.recv() {
                Ok(part) => {
                    self.part = part?;
                    if let Some(hashed) = &mut self.hasher {
                        hashed.hasher.update(&self.part);
                    }
                }
                Err(mpsc::RecvError) => {
                    let Some(Hashed { hasher, expected }) = self.hasher.take() else { break };
                    let got = hasher.finish();
                    if got != expected {
                        let problem = format!("it has the digest {got}, expected {expected}");
                        return Err(io::Error::other(problem));
                    }
                }
            }
        }
        let count = buffer.len().min(self.part.len());
        self.part.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}
