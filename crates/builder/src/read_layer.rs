//! A layer that was just read.

use std::io;

use crate::{
    dedup::{Chunks, DistinctId},
    entry::Entry,
    layer_contents::LayerContents,
};

/// A layer that was just read, see [`crate::build_with`].
#[derive(Debug)]
pub struct ReadLayer<'a> {
    pub(crate) chunk_size: u32,
    pub(crate) layer: usize,
    pub(crate) entries: &'a [Entry],
    pub(crate) chunks: &'a Chunks,
}

impl ReadLayer<'_> {
    /// The position among the layers given to the builder.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Its record as bytes, for [`LayerContents::from_bytes`].
    ///
    /// # Errors
    /// Only if there is no memory for a compressor.
    pub fn record(&self) -> io::Result<Vec<u8>> {
        let distinct = |id: &DistinctId| {
            let chunk = &self.chunks.distinct[id.0 as usize];
            (chunk.digest.hash, chunk.decoded_size)
        };
        let chunks = self.chunks.layers[self.layer].iter().map(distinct).collect();
        LayerContents::write(self.chunk_size, self.entries, chunks)
    }
}
