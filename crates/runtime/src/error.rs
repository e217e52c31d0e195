//! Errors of reads.

use std::{io, ops::Range, path::PathBuf, sync::Arc};

use lazuli_image::{Decoded, Digest, Stored};

use crate::source::SourceError;

/// Why bytes of a blob are not in the cache. Retries have happened; this is final for the reader
/// that asked, and a later read tries again from the start.
///
/// Clones are cheap: all readers that wait for the same chunk get the same error.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ReadError {
    /// Every source that delivered had bytes that are not the chunk that the image names.
    #[error("blob {blob}, chunk {chunk} ({} to {}): {problem}", range.start, range.end)]
    Corrupt {
        /// The blob.
        blob: Digest,
        /// Number of the chunk in the blob.
        chunk: u32,
        /// The chunk's bytes as stored.
        range: Range<Stored>,
        /// The problem with them.
        problem: String,
    },
    /// The disk of the cache is full.
    #[error("no space in the cache for blob {blob} ({})", path.display())]
    NoSpace {
        /// The blob.
        blob: Digest,
        /// The file that could not grow.
        path: PathBuf,
    },
    /// The blob has no such bytes.
    #[error("blob {blob} has {size} bytes, asked for {} to {}", range.start, range.end)]
    OutOfRange {
        /// The blob.
        blob: Digest,
        /// The requested range.
        range: Range<Decoded>,
        /// Decoded bytes of the blob, in whole blocks.
        size: u64,
    },
    /// The image lists no chunk for some of these bytes, so their content is unknown.
    #[error("blob {blob}: the image has no chunk for all of {} to {}", range.start, range.end)]
    NoChunk {
        /// The blob.
        blob: Digest,
        /// The requested range.
        range: Range<Decoded>,
    },
    /// No source delivered.
    #[error("blob {blob}, {} to {}", range.start, range.end)]
    Source {
        /// The blob.
        blob: Digest,
        /// The requested range.
        range: Range<Stored>,
        /// Why the source that was tried last did not deliver.
        source: SourceError,
    },
    /// The cache file could not be written.
    #[error("cannot write {}", path.display())]
    Cache {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: Arc<io::Error>,
    },
    /// The blob was given up, see [`CachedBlob::cut_off`](crate::CachedBlob::cut_off).
    #[error("blob {blob} is not served any more")]
    CutOff {
        /// The blob.
        blob: Digest,
    },
    /// The tasks that fetched the chunk ended without a result, again and again.
    #[error("fetching blob {blob} was interrupted")]
    Interrupted {
        /// The blob.
        blob: Digest,
    },
}
