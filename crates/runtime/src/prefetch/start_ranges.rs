//! The guess for converters: where the bytes that a start most likely reads are stored.
//!
//! A node that guesses learns from each file which ones follow, a round trip at a time. The
//! converter has all of them at hand: nodes get their places with the manifest, and ask for them
//! together with the bootstrap.

use std::{collections::HashSet, ops::Range, sync::Mutex};

use async_trait::async_trait;
use lazuli_image::{
    Blob, Chunk, Decoded, Stored, Trace, oci::MAX_START_RANGES, plan::Planner, rafs::Bootstrap,
};
use serde_json::Value;

use super::guess::{self, Content, Piece, extents};
use crate::{source::early, sync::lock};

/// Reads the blobs of an image that is being made.
#[async_trait]
pub trait DecodedBlobs: Send + Sync {
    /// Decodes adjacent chunks of a blob, which is named by its position in the image; `None` on
    /// failure.
    async fn decode(&self, blob: usize, chunks: &[Chunk]) -> Option<Vec<Vec<u8>>>;
}

/// Guesses which stored bytes of each blob the image's start reads; in all, at most as many as a
/// node asks for before it has the bootstrap. The same image gives the same ranges if `content`
/// never waits.
pub async fn start_ranges<B: AsRef<[u8]> + Sync>(
    config: &Value,
    bootstrap: &Bootstrap<B>,
    content: &dyn DecodedBlobs,
) -> Vec<Vec<Range<Stored>>> {
    let blobs = bootstrap.blobs();
    let found = Mutex::new(Found { left: early::MOST, ..Found::default() });
    let files = Files { bootstrap, content };
    let wanted = |pieces: Vec<Piece>| {
        let mut found = lock(&found);
        for (blob, range) in pieces.iter().flat_map(|piece| extents(bootstrap, piece)) {
            found.add(blob, &blobs[blob], &range);
        }
    };
    guess::guess(config, bootstrap, &files, wanted).await;
    let order = std::mem::take(&mut lock(&found).order);
    let touched = (0..).zip(order).map(|(at, (blob, number))| (blob, number, at));
    let mut trace = Trace::of_start(blobs.iter().map(|blob| blob.id).collect(), touched);
    trace.locate(Planner::NODE.gap, |id, number| {
        let chunk = blobs.iter().find(|blob| blob.id == *id)?.chunk(number)?;
        Some(chunk.stored..chunk.stored_end())
    });
    let mut left = early::MOST;
    let mut ranges = vec![Vec::new(); blobs.len()];
    for (id, range) in trace.spans().take(MAX_START_RANGES) {
        let Some(blob) = blobs.iter().position(|blob| blob.id == id) else { continue };
        let Some(rest) = left.checked_sub(range.end.0 - range.start.0) else { break };
        left = rest;
        ranges[blob].push(range);
    }
    ranges
}

/// Chunks in the order in which they are wanted.
#[derive(Default)]
struct Found {
    order: Vec<(u8, u32)>,
    known: HashSet<(usize, u32)>,
    /// Stored bytes that still fit.
    left: u64,
}

impl Found {
    fn add(&mut self, position: usize, blob: &Blob, range: &Range<Decoded>) {
        for chunk in chunks_in(blob, range) {
            let Ok(short) = u8::try_from(position) else { return };
            if self.left > 0 && self.known.insert((position, chunk.number)) {
                self.left = self.left.saturating_sub(chunk.stored_share());
                self.order.push((short, chunk.number));
            }
        }
    }
}

/// The chunks with decoded bytes of a range.
fn chunks_in<'a>(blob: &'a Blob, range: &Range<Decoded>) -> &'a [Chunk] {
    let first = blob.chunks.partition_point(|chunk| chunk.decoded_end() <= range.start);
    let end = blob.chunks.partition_point(|chunk| chunk.decoded < range.end);
    blob.chunks.get(first..end).unwrap_or_default()
}

struct Files<'a, B> {
    bootstrap: &'a Bootstrap<B>,
    content: &'a dyn DecodedBlobs,
}

#[async_trait]
impl<B: AsRef<[u8]> + Sync> Content for Files<'_, B> {
    async fn read(&self, piece: &Piece) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for (position, range) in extents(self.bootstrap, piece) {
            let chunks = chunks_in(&self.bootstrap.blobs()[position], &range);
            let decoded = self.content.decode(position, chunks).await?;
            for (chunk, decoded) in chunks.iter().zip(decoded) {
                let from = range.start.0.saturating_sub(chunk.decoded.0) as usize;
                let to = decoded.len().min((range.end.0 - chunk.decoded.0) as usize);
                bytes.extend_from_slice(decoded.get(from..to)?);
            }
        }
        Some(bytes)
    }
}
