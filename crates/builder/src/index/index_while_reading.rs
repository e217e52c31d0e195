//! Indexes one layer while its content is handed on.

use lazuli_image::{BlobIndex, Digest, rafs::WrittenIndex};

use super::{
    background_chunks::ChunkSink,
    layer::{self, ChunkContent, IndexLayer, Numbers},
    memory::share,
};
use crate::{error::BuildError, options::Options};

/// A layer that was read once, from its first byte to its last.
#[derive(Clone, Debug)]
pub struct IndexAndDiffId {
    /// Its index, with its skeleton.
    pub index: WrittenIndex,
    /// SHA-256 of its tar.
    pub diff_id: Digest,
}

/// Indexes a layer, and hands the content of its chunks to `sink`, in their order.
///
/// # Errors
/// The layer is damaged, hostile, takes too much memory, or has content that its index could not
/// lead to, or `sink` fails.
pub fn index_while_reading<'a>(
    layer: IndexLayer,
    sink: &'a mut ChunkSink<'a>,
) -> Result<IndexAndDiffId, BuildError> {
    let content = ChunkContent::Taken(Some(sink), share());
    let numbers = Numbers { own: BlobIndex(0), beside: BlobIndex(0) };
    let read = layer::read(layer, numbers, Options::CHUNK_SIZE, content, &|_| {})?;
    Ok(IndexAndDiffId { index: read.index, diff_id: read.diff_id })
}
