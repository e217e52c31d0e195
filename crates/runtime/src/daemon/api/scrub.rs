//! Requests to read the cache back, step by step.

use std::path::PathBuf;

use lazuli_image::Digest;
use serde::{Deserialize, Serialize};

use crate::cache::Scrubbed;

/// The content of the cache.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ScrubPlan {
    /// Blobs that an image on this node describes.
    pub blobs: Vec<ScrubBlob>,
    /// Blobs without a description, which can be neither checked nor used.
    pub unused: Vec<UnusedBlob>,
    /// Images whose metadata on this node is unusable, and why.
    pub damaged: Vec<String>,
}

/// A blob in the cache, as one image describes it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScrubBlob {
    /// SHA-256 of the blob as stored.
    pub blob: Digest,
    /// Bytes that it occupies on the disk.
    pub bytes: u64,
    /// Manifests of the images that have it; never empty.
    pub images: Vec<Digest>,
    /// Position in the blob table of the first of these.
    pub position: usize,
    /// Mount points of these images.
    pub mountpoints: Vec<PathBuf>,
}

/// A blob that no image on this node describes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct UnusedBlob {
    /// Its directory below `cache/blobs`.
    pub directory: String,
    /// Bytes that it occupies on the disk.
    pub bytes: u64,
}

/// The result of one step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ScrubStep {
    /// Chunks that were read back.
    pub chunks: u64,
    /// Their decoded bytes.
    pub bytes: u64,
    /// Those that were wrong. They are missing now, and fetched when they are read.
    pub wrong: Vec<ScrubbedChunk>,
    /// The chunk at which the next step begins, if there is more of the blob.
    pub next: Option<usize>,
}

/// A chunk whose bytes don't match its digest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScrubbedChunk {
    /// Its number in the blob.
    pub chunk: u32,
    /// Its first byte in the decoded blob.
    pub start: u64,
    /// The byte behind its last one.
    pub end: u64,
}

impl From<Scrubbed> for ScrubStep {
    fn from(step: Scrubbed) -> Self {
        let Scrubbed { chunks, bytes, wrong, next } = step;
        let wrong = wrong.into_iter().map(|wrong| ScrubbedChunk {
            chunk: wrong.number,
            start: wrong.range.start.0,
            end: wrong.range.end.0,
        });
        ScrubStep { chunks, bytes, wrong: wrong.collect(), next }
    }
}
