//! Progress and figures of a conversion.

use std::{path::Path, time::Duration};

/// Receives the progress of a conversion. Called from several threads.
pub trait Progress: Sync {
    /// `bytes` more stored bytes of the layer with this index were read.
    fn bytes_read(&self, layer: usize, bytes: u64);
    /// All of the layer with this index is read.
    fn layer_done(&self, layer: usize);
    /// The first `bytes` bytes of `file` are final: the beginning of the lowest layer's blob. The
    /// file exists until the image is dropped; the blob is left out if no file of the image uses
    /// it. Calls may arrive out of order.
    fn lowest_grown(&self, _file: &Path, _bytes: u64) {}
}

/// Does not listen.
impl Progress for () {
    fn bytes_read(&self, _layer: usize, _bytes: u64) {}
    fn layer_done(&self, _layer: usize) {}
}

/// Figures of a conversion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Layers.
    pub layers: usize,
    /// The number of layers that were read now. The others were read before.
    pub read_layers: usize,
    /// Inodes in the tree; hard links count once.
    pub inodes: usize,
    /// Bytes of file content in all layers, also of files that upper layers hide.
    pub content_bytes: u64,
    /// Chunks of all layers before deduplication.
    pub chunks: u64,
    /// Chunks that differ from each other.
    pub distinct_chunks: u64,
    /// Bytes of [`Report::distinct_chunks`] as content.
    pub distinct_bytes: u64,
    /// Bytes of all blobs of the image as stored, with their tables.
    pub stored_bytes: u64,
    /// Blobs of the image.
    pub blobs: usize,
    /// The number of these blobs that were stored already.
    pub known_blobs: usize,
    /// Bytes of them as stored.
    pub known_bytes: u64,
    /// Bytes of the bootstrap, not compressed.
    pub bootstrap_bytes: u64,
    /// Extended attributes dropped because Linux has no namespace for them.
    pub dropped_xattrs: u64,
    /// The time that it took.
    pub elapsed: Duration,
}
