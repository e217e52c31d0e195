//! Collects the chunks that files use, and gives them places.

use std::collections::HashMap;

use super::tables::{BlobEntry, Tables};
use crate::{
    Blob, BlobIndex, Chunk, ChunkRef, Codec, Decoded, Digest, FormatError, InodeId, Kind, Points,
    Problem, Stored, Tree,
    offset::round_up_to_block,
    rafs::{
        BlobRecord, TailInfo,
        layout::{ChunkEntry, MAX_ROWS, chunk_flags, features},
        tables::{MAX_STORED, NO_DIGEST, refuse_chunk_flags},
    },
};

/// The blobs of an image with the chunks seen so far.
pub(super) struct Blobs<'a> {
    tables: &'a Tables<'a>,
    blobs: Vec<BlobChunks>,
    /// The number of chunks of all blobs.
    count: u64,
}

/// Chunks of one blob in the order in which they were seen; a chunk's number is its position.
#[derive(Default)]
struct BlobChunks {
    chunks: Vec<Chunk>,
    /// Numbers by first stored byte.
    known: HashMap<u64, u32>,
}

impl<'a> Blobs<'a> {
    pub(super) fn new(tables: &'a Tables<'a>) -> Self {
        let blobs = tables.blobs.iter().map(|_| BlobChunks::default()).collect();
        Blobs { tables, blobs, count: 0 }
    }

    /// Adds a chunk, unless another file has it too.
    pub(super) fn add(&mut self, entry: &ChunkEntry) -> Result<ChunkRef, Problem> {
        let index = entry.blob.get();
        let Some(blob) = self.blobs.get_mut(index as usize) else {
            return Err(format!("blob {index} does not exist").into());
        };
        let (flags, stored) = (entry.flags.get(), entry.stored.get());
        refuse_chunk_flags(flags)?;
        if flags & chunk_flags::BATCH != 0 {
            return Err(format!("flags {flags:#x}: there are no batches in RAFS v5").into());
        }
        if entry.digest == NO_DIGEST {
            return Err("it has no digest, so its bytes cannot be checked".into());
        }
        let mut chunk = Chunk {
            number: blob.chunks.len() as u32,
            digest: Digest { algorithm: self.tables.digest, hash: entry.digest },
            stored: Stored(stored),
            stored_size: entry.stored_size.get(),
            // Later: an image's own places are not on block borders.
            decoded: Decoded(0),
            decoded_size: entry.decoded_size.get(),
            part: None,
        };
        if stored > MAX_STORED || chunk.is_compressed() != (flags & chunk_flags::COMPRESSED != 0) {
            return Err(format!("flags {flags:#x} do not agree with {chunk:?}").into());
        }
        if let Some(&number) = blob.known.get(&stored) {
            chunk.number = number;
            if blob.chunks[number as usize] != chunk {
                return Err(format!("another file has another chunk at {}", chunk.stored).into());
            }
        } else {
            if self.count == MAX_ROWS {
                return Err(format!("more chunks than {MAX_ROWS}, which are possible").into());
            }
            self.count += 1;
            blob.known.insert(stored, chunk.number);
            blob.chunks.push(chunk);
        }
        // There are fewer blobs than 256.
        Ok(ChunkRef { blob: BlobIndex(index as u8), number: chunk.number })
    }

    /// Numbers the chunks of each blob as they are stored, puts them on block borders one behind
    /// the other, leaves out blobs without chunks, and changes the references in `tree`
    /// accordingly.
    pub(super) fn place(self, tree: &mut Tree) -> Result<Vec<BlobRecord>, FormatError> {
        let mut records = Vec::new();
        // New references by old ones: blob, then number.
        let mut places = Vec::new();
        for (BlobChunks { chunks, .. }, entry) in self.blobs.into_iter().zip(&self.tables.blobs) {
            let mut moved = vec![ChunkRef { blob: BlobIndex(0), number: 0 }; chunks.len()];
            if !chunks.is_empty() {
                let blob = BlobIndex(records.len() as u8);
                let record = record(entry, self.tables.codec, chunks, |old, number| {
                    moved[old as usize] = ChunkRef { blob, number };
                })
                .map_err(|problem| FormatError::new(("blob", entry.id), 0, problem))?;
                records.push(record);
            }
            places.push(moved);
        }
        for id in 0..tree.len() {
            if let Kind::Regular { chunks, .. } = &mut tree[InodeId(id as u32)].kind {
                for chunk in chunks {
                    *chunk = places[usize::from(chunk.blob.0)][chunk.number as usize];
                }
            }
        }
        Ok(records)
    }
}

/// The record of a blob of `chunks`; `moved` is told old and new number of each.
fn record(
    entry: &BlobEntry,
    codec: Codec,
    mut chunks: Vec<Chunk>,
    mut moved: impl FnMut(u32, u32),
) -> Result<BlobRecord, Problem> {
    chunks.sort_unstable_by_key(|chunk| chunk.stored);
    let mut decoded = 0;
    for (number, chunk) in (0..).zip(&mut chunks) {
        moved(chunk.number, number);
        chunk.number = number;
        chunk.decoded = Decoded(decoded);
        decoded = round_up_to_block(chunk.decoded_end().0).ok_or("too many decoded bytes")?;
    }
    let end = chunks.last().map_or(0, |chunk| chunk.stored_end().0);
    let chunk_count = chunks.len() as u32;
    let blob = Blob {
        id: entry.id,
        codec,
        points: Points::default(),
        stored_size: entry.stored_size.unwrap_or(end),
        decoded_size: decoded,
        chunks: chunks.into(),
    };
    let tail = TailInfo::without_table(features::ALIGNED, chunk_count, None);
    Ok(BlobRecord { blob, tail })
}
