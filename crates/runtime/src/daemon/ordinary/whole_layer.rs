//! Layers that this node reads whole: their digests are computed, not believed.

use std::io::{self, Read};

use lazuli_builder::{
    BuildError,
    index::{BackgroundHash, ChunkSink, IndexLayer, KnownLayer, index_while_reading},
};
use lazuli_image::Digest;
use lazuli_registry::RegistryError;

use super::{
    claimed_layer::ClaimedLayer,
    store::{IndexStore, LayerRecord},
};
use crate::{cache::CacheError, image::from_indexes::PrefixError};

/// Why a layer was not read, or was rejected.
#[derive(Debug, thiserror::Error)]
pub(super) enum LayerError {
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
    #[error("there is too little room on the disk, or in cache.max_bytes")]
    NoRoom,
    #[error("its index cannot be kept: {0}")]
    Store(io::Error),
    #[error("no thread for its digest: {0}")]
    Thread(io::Error),
    #[error("containerd's content store: {0}")]
    Content(io::Error),
    #[error("layers of other repositories take all slots")]
    Busy,
    #[error("the worker is ending")]
    Ended,
}

/// Reads a layer from its first byte to its last, and indexes it. Its stored bytes and its tar have
/// to be those that are claimed. Blocks.
pub(super) fn read<'a>(
    layer: &ClaimedLayer,
    source: impl Read + Send + 'static,
    sink: &'a mut ChunkSink<'a>,
) -> Result<KnownLayer, LayerError> {
    let (digest, stored_size) = (layer.digest(), layer.descriptor.size);
    let checked = Checked::new(source, digest).map_err(LayerError::Thread)?;
    let (file, source) = (layer.file.clone(), Box::new(checked));
    let taken = index_while_reading(IndexLayer { digest, stored_size, file, source }, sink)?;
    let diff_id = taken.diff_id;
    if let Some(expected) = layer.diff_id.filter(|claimed| *claimed != diff_id) {
        return Err(LayerError::DiffId { got: diff_id, expected });
    }
    Ok(layer.with_index(diff_id, taken.index.bytes))
}

/// Keeps the index of a layer that was read whole, under its key.
pub(super) fn keep(store: &IndexStore, key: &Digest, layer: &KnownLayer) -> Result<(), LayerError> {
    let index = store.keep_index(&layer.index).map_err(LayerError::Store)?;
    let record = LayerRecord { diff_id: layer.diff_id, index, is_proven: true };
    store.note_layer(key, &record).map_err(LayerError::Store)
}

/// A reader that fails at its end if the content has another digest.
struct Checked<R> {
    inner: R,
    /// Until the end.
    hash: Option<BackgroundHash>,
    expected: Digest,
}

impl<R> Checked<R> {
    fn new(inner: R, expected: Digest) -> io::Result<Self> {
        Ok(Checked { inner, hash: Some(BackgroundHash::new()?), expected })
    }
}

impl<R: Read> Read for Checked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let count = self.inner.read(buffer)?;
        match (&mut self.hash, count) {
            (Some(hash), 1..) => hash.update(&buffer[..count]),
            (_, 1..) => return Err(io::Error::other("it has bytes behind its end")),
            (None, 0) => {}
            (Some(_), 0) => {
                let got = self.hash.take().map(BackgroundHash::finish);
                if got != Some(self.expected) {
                    let (got, expected) = (got.unwrap_or(self.expected), self.expected);
                    let problem = format!("it has the digest {got}, expected {expected}");
                    return Err(io::Error::other(problem));
                }
            }
        }
        Ok(count)
    }
}
