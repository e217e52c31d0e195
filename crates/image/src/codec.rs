//! How chunks are compressed.

use std::{fmt, io};

use zstd::bulk::{Compressor, Decompressor};

use crate::Chunk;

/// A chunk compression method. The discriminants are those of the RAFS v6 blob table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// Stored as is.
    None = 0,
    /// A raw LZ4 block without a size prefix.
    Lz4 = 1,
    /// One zstd frame per chunk; the default.
    Zstd = 3,
}

/// Compresses chunks. Keeps its working memory, so that one encoder per thread is cheap to use often.
pub struct Encoder {
    codec: Codec,
    zstd: Option<Compressor<'static>>,
    buffer: Vec<u8>,
}

impl Encoder {
    /// An encoder; `level` is a zstd level (1 to 22; images have 3 by default) and means nothing to other codecs.
    pub fn new(codec: Codec, level: i32) -> io::Result<Self> {
        let zstd = match codec {
            Codec::Zstd => Some(Compressor::new(level)?),
            Codec::None | Codec::Lz4 => None,
        };
        Ok(Encoder { codec, zstd, buffer: Vec::new() })
    }

    /// How it compresses.
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// The compressed form of `decoded`, or `None` when it is not smaller: then the chunk is stored raw.
    pub fn encode(&mut self, decoded: &[u8]) -> Option<&[u8]> {
        // zstd stops at the end of the buffer, and output that does not fit in one byte less than the
        // input is of no use. LZ4 insists on room for the worst case.
        let room = match self.codec {
            Codec::None => return None,
            Codec::Zstd => decoded.len().checked_sub(1)?,
            Codec::Lz4 => lz4_flex::block::get_maximum_output_size(decoded.len()),
        };
        // Never shorter again: growing would fill with zeros each time.
        if self.buffer.len() < room {
            self.buffer.resize(room, 0);
        }
        let room = &mut self.buffer[..room];
        let size = match &mut self.zstd {
            Some(zstd) => zstd.compress_to_buffer(decoded, room).ok()?,
            None => lz4_flex::block::compress_into(decoded, room).ok()?,
        };
        (size < decoded.len()).then(|| &self.buffer[..size])
    }
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").field("codec", &self.codec).finish_non_exhaustive()
    }
}

/// Decodes chunks. Keeps its working memory: one per thread saves an allocation of 128 KiB or more per chunk.
#[derive(Default)]
pub struct Decoder {
    zstd: Option<Decompressor<'static>>,
}

impl Decoder {
    /// A decoder for any codec.
    pub fn new() -> Self {
        Decoder::default()
    }

    /// Decodes `stored` into exactly `decoded.len()` bytes. Never writes or allocates more, whatever `stored` claims.
    pub fn decode(
        &mut self,
        codec: Codec,
        stored: &[u8],
        decoded: &mut [u8],
    ) -> Result<(), DecodeError> {
        let expected = decoded.len();
        let damaged = |reason: String| DecodeError::Damaged { codec, reason };
        let actual = match codec {
            Codec::None => {
                if stored.len() == expected {
                    decoded.copy_from_slice(stored);
                }
                stored.len()
            }
            Codec::Lz4 => lz4_flex::block::decompress_into(stored, decoded)
                .map_err(|error| damaged(error.to_string()))?,
            Codec::Zstd => {
                let zstd = match &mut self.zstd {
                    Some(zstd) => zstd,
                    empty => empty
                        .insert(Decompressor::new().map_err(|error| damaged(error.to_string()))?),
                };
                zstd.decompress_to_buffer(stored, decoded)
                    .map_err(|error| damaged(error.to_string()))?
            }
        };
        if actual == expected { Ok(()) } else { Err(DecodeError::Size { codec, actual, expected }) }
    }

    /// What `stored`, the stored bytes of `chunk`, decode to: the chunk, or the batch with the chunk in it, see
    /// [`Chunk::part_of`]. `codec` is that of the blob. Raw bytes stay where they are; others are decoded to `buffer`.
    pub fn unit<'a>(
        &mut self,
        codec: Codec,
        chunk: &Chunk,
        stored: &'a [u8],
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], DecodeError> {
        let expected = chunk.unit_size() as usize;
        if chunk.is_compressed() {
            buffer.resize(expected, 0);
            self.decode(codec, stored, buffer)?;
            return Ok(buffer);
        }
        let (codec, actual) = (Codec::None, stored.len());
        if actual == expected {
            Ok(stored)
        } else {
            Err(DecodeError::Size { codec, actual, expected })
        }
    }
}

impl fmt::Debug for Decoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decoder").finish_non_exhaustive()
    }
}

/// Why stored bytes did not decode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The codec refused them.
    #[error("{codec} data is damaged: {reason}")]
    Damaged {
        /// Which codec.
        codec: Codec,
        /// What it said.
        reason: String,
    },
    /// They decode to another size than the image says.
    #[error("{codec} data decodes to {actual} bytes, expected {expected}")]
    Size {
        /// Which codec.
        codec: Codec,
        /// Bytes that came out.
        actual: usize,
        /// Bytes that the image promised.
        expected: usize,
    },
}

impl Codec {
    /// The codec with this number in a RAFS v6 table.
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Codec::None),
            1 => Some(Codec::Lz4),
            3 => Some(Codec::Zstd),
            _ => None,
        }
    }

    /// Like [`Decoder::decode`], for one chunk only.
    pub fn decode(self, stored: &[u8], decoded: &mut [u8]) -> Result<(), DecodeError> {
        Decoder::new().decode(self, stored, decoded)
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Codec::None => "none",
            Codec::Lz4 => "lz4_block",
            Codec::Zstd => "zstd",
        })
    }
}
