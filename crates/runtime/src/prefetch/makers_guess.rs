//! The guess of converters: the chunks that a start most likely reads.
//!
//! A node that guesses learns from each file which ones follow, a round trip at a time. The
//! converter has all of them at hand: nodes get the guess with the manifest. They ask for its
//! beginning together with the bootstrap, and for all of it when they have that.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::Mutex,
};

use async_trait::async_trait;
use lazuli_image::{Blob, Chunk, Decoded, Digest, Stored, Trace, plan::Planner, rafs::Bootstrap};
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

/// Guesses what the image's start reads, as a node would, in the same order. Spans tell where the
/// first `early::MOST` bytes are stored: a node requests these before it has the bootstrap. The
/// same image gives the same guess if `content` never waits.
pub async fn makers_guess<B: AsRef<[u8]> + Sync>(
    config: &Value,
    bootstrap: &Bootstrap<B>,
    content: &dyn DecodedBlobs,
) -> Trace {
    let blobs = bootstrap.blobs();
    let found = Mutex::new(Found { left: early::MOST, ..Found::default() });
    let files = Files { bootstrap, content };
    let wanted = |pieces: Vec<Piece>| {
        let mut found = lock(&found);
        found.level += 1;
        for (blob, range) in pieces.iter().flat_map(|piece| extents(bootstrap, piece)) {
            found.add(&blobs[blob], &range);
        }
    };
    guess::guess(config, bootstrap, &files, wanted).await;
    let found = std::mem::take(&mut *lock(&found));
    let mut guess = Trace::of_start(found.blobs, found.order);
    guess.locate(Planner::NODE.gap, |id, number| found.early.get(&(*id, number)).cloned());
    guess
}

/// Chunks in the order in which they are wanted.
#[derive(Default)]
struct Found {
    /// The blobs of which something is wanted.
    blobs: Vec<Digest>,
    /// Position of the blob, chunk number, and the step of the guess that has found it.
    order: Vec<(u8, u32, u32)>,
    level: u32,
    known: HashSet<(Digest, u32)>,
    /// The first of them, with their places.
    early: HashMap<(Digest, u32), Range<Stored>>,
    /// Stored bytes that these may still have.
    left: u64,
}

impl Found {
    fn add(&mut self, blob: &Blob, range: &Range<Decoded>) {
        let known = self.blobs.iter().position(|known| *known == blob.id);
        let position = known.unwrap_or_else(|| {
            self.blobs.push(blob.id);
            self.blobs.len() - 1
        });
        // An image has no more.
        let Ok(position) = u8::try_from(position) else { return };
        for chunk in chunks_in(blob, range) {
            let place = (blob.id, chunk.number);
            if !self.known.insert(place) {
                continue;
            }
            self.order.push((position, chunk.number, self.level));
            let left = self.left.checked_sub(chunk.stored_share());
            self.left = left.unwrap_or_default();
            if left.is_some() {
                self.early.insert(place, chunk.stored..chunk.stored_end());
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

    fn is_at_hand(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use lazuli_image::{Codec, Points};

    use super::*;

    #[test]
    fn only_the_first_chunks_have_places() {
        const SIZE: u32 = 1 << 20;
        let chunk = |number: u32| Chunk {
            number,
            digest: Digest::sha256([number as u8; 32]),
            stored: Stored(u64::from(number * SIZE)),
            stored_size: SIZE,
            decoded: Decoded(u64::from(number * SIZE)),
            decoded_size: SIZE,
            part: None,
        };
        let whole = 20 * u64::from(SIZE);
        let blob = Blob {
            id: Digest::sha256([99; 32]),
            codec: Codec::Zstd,
            points: Points::default(),
            stored_size: whole,
            decoded_size: whole,
            chunks: (0..20).map(chunk).collect(),
        };
        let mut found = Found { left: early::MOST, ..Found::default() };
        found.add(&blob, &(Decoded(whole - 1)..Decoded(whole)));
        found.add(&blob, &(Decoded(0)..Decoded(whole)));
        let order: Vec<_> = found.order.iter().map(|(_, number, _)| *number).collect();
        assert_eq!(order, [19].into_iter().chain(0..19).collect::<Vec<_>>());
        let mut early: Vec<_> = found.early.keys().map(|(_, number)| *number).collect();
        early.sort_unstable();
        assert_eq!(early, (0..15).chain([19]).collect::<Vec<_>>());
    }
}
