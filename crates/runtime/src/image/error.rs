//! Errors of images.

use std::{io, path::PathBuf};

use lazuli_builder::BuildError;
use lazuli_image::{Digest, FormatError};
use lazuli_registry::RegistryError;
use lazuli_sys::path_error::PathError;

use super::unpack::UnpackError;

/// Errors of images.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// It could not be fetched.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// It is an ordinary image.
    #[error(
        "{image} is not a lazy image: no layer holds a bootstrap; convert it with `lazuli convert`, or index it with \
         `lazuli index`, and set index.trust = \"repository\"; or, if a lazy image refers to it, list its \
         repository in images.referrers"
    )]
    NotLazy {
        /// The image.
        image: String,
    },
    /// It is more than a lazy image.
    #[error(
        "{image} has ordinary layers on top of a lazy image: containerd can run it; for `lazuli` itself convert it with \
         `lazuli convert` from what it was made of"
    )]
    LayersOnTop {
        /// The image.
        image: String,
    },
    /// Its bootstrap layer is damaged.
    #[error("{image}: {source}")]
    Unpack {
        /// The image.
        image: String,
        /// The problem.
        source: UnpackError,
    },
    /// Its bootstrap breaks the format.
    #[error("{image} has an invalid bootstrap: {source}")]
    Format {
        /// The image.
        image: String,
        /// The problem, and its place.
        source: FormatError,
    },
    /// The table of contents of a layer is not what the image says.
    #[error("{image}: {source} (from {place})")]
    Toc {
        /// The image.
        image: String,
        /// Where it came from.
        place: String,
        /// What is wrong.
        source: FormatError,
    },
    /// Its layers say of something that cannot be read in places.
    #[error("{image} cannot be started by the tables of contents in its layers: {source}")]
    Seekable {
        /// The image.
        image: String,
        /// What is wrong, and where.
        source: BuildError,
    },
    /// A blob of the bootstrap is not in the manifest, so its size and place are unknown.
    #[error("{image}: its bootstrap needs blob {blob}, which its manifest does not list")]
    UnlistedBlob {
        /// The image.
        image: String,
        /// The blob.
        blob: Digest,
    },
    /// Chunk tables that no digest covers name the stored places of its chunks, and they are wrong.
    #[error(
        "{image}: the chunk tables of blob {blob} from {place} do not match its chunks: {problem}; \
         nothing is kept of them, try again"
    )]
    Misplaced {
        /// The image.
        image: String,
        /// The blob.
        blob: Digest,
        /// The place that the tables came from.
        place: String,
        /// The chunk that is not where it should be.
        problem: String,
    },
    /// A file of it on this node is damaged or missing.
    #[error("{path}: {problem}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// The node's disk.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl From<PathError> for ImageError {
    fn from(PathError { path, source }: PathError) -> Self {
        ImageError::Io { path, source }
    }
}
