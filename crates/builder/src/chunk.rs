//! Cuts file content into chunks, many small ones to a batch.

use std::{
    io::{self, Read},
    ops::Range,
};

use lazuli_image::{BlobIndex, ChunkRef};

/// Minimum size of a full batch in bytes: the amount that one hand-over between threads carries.
const BATCH: usize = 1 << 20;

/// Maximum number of chunks of a batch, for trees of tiny files.
const BATCH_CHUNKS: usize = 4096;

/// Chunk numbers have 24 bits, and the last one is reserved.
const MAX_CHUNKS: u32 = (1 << 24) - 1;

/// Consecutive chunks of one layer.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Index of the layer.
    pub(crate) layer: u8,
    /// Number of the batch in the layer.
    pub(crate) number: u32,
    /// Number of the first chunk in the layer.
    pub(crate) first: u32,
    /// The chunks' bytes, back to back, and room behind them: a buffer keeps its length when it is
    /// used again, so that it is filled with zeros only once.
    pub(crate) data: Vec<u8>,
    /// The end of each chunk in `data`.
    pub(crate) ends: Vec<usize>,
}

impl Batch {
    /// The chunk at a position.
    pub(crate) fn chunk(&self, position: usize) -> &[u8] {
        let start = position.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.data[start..self.ends[position]]
    }

    /// The chunks in order.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.ends.len()).map(|position| self.chunk(position))
    }

    /// Returns the chunks that are compressed as one: consecutive small ones, until they have
    /// `most` bytes; any other is on its own. Depends on the layer alone, so that equal layers give
    /// equal blobs, whatever else is stored elsewhere.
    pub(crate) fn units(&self, most: usize) -> Vec<Range<usize>> {
        let mut units: Vec<Range<usize>> = Vec::new();
        let mut room = 0;
        for (position, chunk) in self.chunks().enumerate() {
            let is_small = chunk.len() <= most / 2;
            match units.last_mut() {
                Some(unit) if is_small && chunk.len() <= room => {
                    unit.end += 1;
                    room -= chunk.len();
                }
                _ => {
                    units.push(position..position + 1);
                    room = if is_small { most - chunk.len() } else { 0 };
                }
            }
        }
        units
    }
}

/// Bytes that a batch may hold for this chunk size.
pub(crate) fn batch_capacity(chunk_size: u32) -> usize {
    BATCH.max(chunk_size as usize)
}

/// Why content was not cut.
#[derive(Debug)]
pub(crate) enum CutError {
    /// The source could not be read.
    Read(io::Error),
    /// The layer has too many chunks.
    TooMany,
    /// Another thread failed first.
    Stopped,
}

/// Another thread failed: stop quietly, it has the reason.
#[derive(Debug)]
pub(crate) struct Stopped;

/// Cuts the files of one layer, in order.
pub(crate) struct Cutter<'a> {
    batch: Batch,
    chunk_size: u32,
    hand_over: &'a dyn Fn(Batch) -> Result<Vec<u8>, Stopped>,
}

impl<'a> Cutter<'a> {
    /// `hand_over` takes full batches and gives a buffer for the next: a used or an empty one.
    pub(crate) fn new(
        layer: u8,
        chunk_size: u32,
        hand_over: &'a dyn Fn(Batch) -> Result<Vec<u8>, Stopped>,
    ) -> Self {
        let batch = Batch { layer, number: 0, first: 0, data: Vec::new(), ends: Vec::new() };
        Cutter { batch, chunk_size, hand_over }
    }

    /// Cuts a file of exactly `size` bytes.
    pub(crate) fn cut(
        &mut self,
        size: u64,
        content: &mut dyn Read,
    ) -> Result<Vec<ChunkRef>, CutError> {
        let mut chunks = Vec::new();
        let mut left = size;
        while left > 0 {
            let length = left.min(self.chunk_size.into()) as usize;
            let full = self.filled() + length > batch_capacity(self.chunk_size);
            if full || self.batch.ends.len() == BATCH_CHUNKS {
                self.flush().map_err(|Stopped| CutError::Stopped)?;
            }
            let number = self.batch.first + self.batch.ends.len() as u32;
            if number >= MAX_CHUNKS {
                return Err(CutError::TooMany);
            }
            if self.batch.data.is_empty() {
                self.batch.data = vec![0; batch_capacity(self.chunk_size)];
            }
            let start = self.filled();
            let place = &mut self.batch.data[start..start + length];
            content.read_exact(place).map_err(CutError::Read)?;
            self.batch.ends.push(start + length);
            chunks.push(ChunkRef { blob: BlobIndex(self.batch.layer), number });
            left -= length as u64;
        }
        chunks.shrink_to_fit();
        Ok(chunks)
    }

    /// Bytes in the batch.
    fn filled(&self) -> usize {
        self.batch.ends.last().copied().unwrap_or(0)
    }

    /// Hands over the last, partial batch.
    pub(crate) fn flush(&mut self) -> Result<(), Stopped> {
        if self.batch.ends.is_empty() {
            return Ok(());
        }
        let first = self.batch.first + self.batch.ends.len() as u32;
        let next = Batch {
            layer: self.batch.layer,
            number: self.batch.number + 1,
            first,
            data: Vec::new(),
            ends: Vec::new(),
        };
        let full = std::mem::replace(&mut self.batch, next);
        self.batch.data = (self.hand_over)(full)?;
        Ok(())
    }
}
