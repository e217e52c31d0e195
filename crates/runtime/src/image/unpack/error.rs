//! Errors of bootstrap layers, and their limits.

use std::io;

use lazuli_image::FormatError;

/// Larger than the bootstrap of any image that RAFS v6 can describe in practice: 1 GiB holds some
/// ten million files.
pub(in crate::image) const BOOTSTRAP_LIMIT: u64 = 1 << 30;

/// Behind the bootstrap there may be `<blob id>.blob.meta` files, see [`meta`](super::meta).
pub(super) const LAYER_LIMIT: u64 = 2 * BOOTSTRAP_LIMIT;

/// Longer than any header that describes a member of these layers: their names have less than 100
/// bytes.
pub(super) const EXTENSION_LIMIT: u64 = 64 << 10;

/// Why a layer has no usable bootstrap.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The layer did not arrive, is not a compressed tar, or the disk is full.
    #[error("the bootstrap layer cannot be unpacked: {0}")]
    Io(#[from] io::Error),
    /// It holds something else.
    #[error("the bootstrap layer has no image/image.boot: is this a lazy image?")]
    Missing,
    /// It claims to be larger than any bootstrap is.
    #[error("the bootstrap claims {0} bytes; the limit is {BOOTSTRAP_LIMIT}")]
    TooLarge(u64),
    /// Another program writes to its file.
    #[error("the bootstrap was changed while it was read: mount it again")]
    Changed,
    /// A name, or other words about a member, longer than there is reason for.
    #[error("the bootstrap layer has a tar header of {0} bytes; the limit is {EXTENSION_LIMIT}")]
    Extension(u64),
    /// Readers could disagree about what follows.
    #[error("the bootstrap layer has {0}")]
    Ambiguous(&'static str),
    /// It unpacks to more than any bootstrap layer does.
    #[error("the bootstrap layer unpacks to more than {LAYER_LIMIT} bytes, which is the limit")]
    LayerTooLarge,
    /// Readers would not agree which one counts.
    #[error("the bootstrap layer has two bootstraps")]
    Twice,
    /// The node has too many others.
    #[error(
        "the image has {count} chunks, and the node's open images leave room for {left}: unmount \
         some, or convert it with larger chunks"
    )]
    TooManyChunks {
        /// Its chunks.
        count: u64,
        /// The maximum number.
        left: u64,
    },
    /// Not a valid bootstrap.
    #[error(transparent)]
    Format(FormatError),
    /// Another file of it contradicts the bootstrap.
    #[error("{blob}.blob.meta of the bootstrap layer contradicts the bootstrap: {source}")]
    Meta {
        /// The blob.
        blob: String,
        /// Where, and how.
        source: FormatError,
    },
}
