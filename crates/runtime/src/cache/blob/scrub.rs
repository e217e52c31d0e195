//! Scrub: reads everything back, since a disk may return other bytes than were written to it.

use std::{ops::Range, sync::Arc};

use lazuli_image::Decoded;

use super::CachedBlob;
use crate::sharing::workers::Priority;

/// Decoded bytes that one step checks, about.
const STEP: u64 = 32 << 20;

/// The result of one scrub step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scrubbed {
    /// Chunks that were read back.
    pub chunks: u64,
    /// Their decoded bytes.
    pub bytes: u64,
    /// Those that were wrong, and those that readers have found wrong before; they are missing now.
    pub wrong: Vec<WrongChunk>,
    /// Position of the next step; `None` after the last one.
    pub next: Option<usize>,
}

/// A chunk whose bytes don't match its digest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongChunk {
    /// Its number in the blob.
    pub number: u32,
    /// Its bytes in the cache file.
    pub range: Range<Decoded>,
}

impl CachedBlob {
    /// Reads chunks back from the disk and checks them, some MiB from the position `from` in the
    /// blob's list of chunks on. Yields to readers. Wrong chunks become missing, and are fetched
    /// again on demand; the caller must drop the kernel's pages of them.
    pub async fn scrub(self: &Arc<Self>, from: usize) -> Scrubbed {
        let chunks = self.layout.chunks();
        let mut result = Scrubbed::default();
        let mut at = from.min(chunks.len());
        while at < chunks.len() && result.bytes < STEP {
            if self.has(at) {
                let blob = self.clone();
                self.run(Priority::Background, move || blob.read_anew(at)).await;
                result.chunks += 1;
                result.bytes += u64::from(chunks[at].decoded_size);
            }
            at += 1;
        }
        for at in self.residency.take_wrong(from.min(at)..at) {
            let chunk = self.chunk(at);
            let range = chunk.decoded..chunk.decoded_end();
            result.wrong.push(WrongChunk { number: chunk.number, range });
        }
        result.next = (at < chunks.len()).then_some(at);
        result
    }

    /// Checks a chunk as the disk has it. Blocks.
    fn read_anew(self: &Arc<Self>, at: usize) {
        let chunk = self.chunk(at);
        let size = u64::from(chunk.decoded_size).try_into().ok();
        // Dirty pages stay: they are what the disk will hold.
        self.file.drop_pages(chunk.decoded.0, size);
        self.resolve(at);
        // A scrub does not leave the whole cache in memory.
        self.file.drop_pages(chunk.decoded.0, size);
    }
}
