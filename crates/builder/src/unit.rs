//! Units of compression: a chunk, or a batch of small ones.

use std::io;

use lazuli_image::{Codec, chunk::Part, codec::Encoder};

/// How a chunk is stored: the stored bytes of its unit, and where in it the chunk lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InUnit {
    pub(crate) stored_size: u32,
    pub(crate) part: Option<Part>,
}

/// Compresses units.
#[derive(Debug)]
pub(crate) struct UnitEncoder {
    encoder: Encoder,
    joined: Vec<u8>,
}

impl UnitEncoder {
    pub(crate) fn new(codec: Codec, level: i32) -> io::Result<Self> {
        Ok(UnitEncoder { encoder: Encoder::new(codec, level)?, joined: Vec::new() })
    }

    /// Appends the stored form of a unit of these chunks to `out`. Returns how each chunk is
    /// stored.
    pub(crate) fn encode(&mut self, chunks: &[&[u8]], out: &mut Vec<u8>) -> Vec<InUnit> {
        let unit = match chunks {
            [chunk] => chunk,
            _ => {
                self.joined.clear();
                chunks.iter().for_each(|chunk| self.joined.extend_from_slice(chunk));
                &self.joined[..]
            }
        };
        let stored = self.encoder.encode(unit).unwrap_or(unit);
        out.extend_from_slice(stored);
        // A unit has at most 16 MiB.
        let (stored_size, size) = (stored.len() as u32, unit.len() as u32);
        let mut offset = 0;
        let place = |chunk: &&[u8]| {
            let part = (chunks.len() > 1).then_some(Part { offset, size });
            offset += chunk.len() as u32;
            InUnit { stored_size, part }
        };
        chunks.iter().map(place).collect()
    }
}
