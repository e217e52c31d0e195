//! Chunk compression.

use std::{fmt, io};

use zstd::{
    bulk::{Compressor, Decompressor},
    stream::raw::{Decoder as Frames, InBuffer, Operation as _, OutBuffer},
};

use crate::{gzip::Inflater, points::Point};

/// A chunk compression method. The discriminants are those of the RAFS v6 blob table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// Stored as is.
    None = 0,
    /// A raw LZ4 block without a size prefix.
    Lz4 = 1,
    /// Pieces of one ordinary gzip file: each begins at a [point](crate::points).
    Gzip = 2,
    /// One zstd frame per chunk; the default.
    Zstd = 3,
    /// Pieces of one ordinary zstd file: each begins with a frame. Only in images that nodes make
    /// of [seekable layers](crate::seekable).
    ZstdLayer = 4,
}

/// Compresses chunks. Keeps its working memory, so that one encoder per thread is cheap to use
/// often.
pub struct Encoder {
    codec: Codec,
    zstd: Option<Compressor<'static>>,
    buffer: Vec<u8>,
}

impl Encoder {
    /// An encoder; `level` is a zstd level (1 to 22; images have 3 by default) and means nothing to
    /// other codecs.
    pub fn new(codec: Codec, level: i32) -> io::Result<Self> {
        let zstd = match codec {
            Codec::Zstd => Some(Compressor::new(level)?),
            Codec::None | Codec::Lz4 | Codec::Gzip | Codec::ZstdLayer => None,
        };
        Ok(Encoder { codec, zstd, buffer: Vec::new() })
    }

    /// How it compresses.
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// Compresses `decoded`. Returns `None` when the result is not smaller; the chunk is then
    /// stored raw.
    pub fn encode(&mut self, decoded: &[u8]) -> Option<&[u8]> {
        // zstd stops at the end of the buffer, and output that does not fit in one byte less than
        // the input is of no use. LZ4 insists on room for the worst case.
        let room = match self.codec {
            // Chunks of unconverted layers are never compressed here.
            Codec::None | Codec::Gzip | Codec::ZstdLayer => return None,
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

/// How to decode a unit: its codec, the point it begins at, and its decoded size.
#[derive(Clone, Copy, Debug)]
pub struct Unit<'a> {
    codec: Codec,
    start: Option<Point<'a>>,
    size: u32,
}

impl<'a> Unit<'a> {
    /// A unit that `codec` compressed from its first byte on, and that decodes to `size` bytes.
    pub(crate) fn whole(codec: Codec, size: u32) -> Self {
        Unit { codec, start: None, size }
    }

    /// The first `size` bytes that follow a point. Without one nothing can be decoded.
    pub(crate) fn at_point(start: Option<Point<'a>>, size: u32) -> Self {
        Unit { codec: Codec::Gzip, start, size }
    }

    /// The first `size` bytes of the frames with which the stored bytes begin.
    pub(crate) fn of_frames(size: u32) -> Self {
        Unit { codec: Codec::ZstdLayer, start: None, size }
    }

    fn damaged(&self, reason: impl Into<String>) -> DecodeError {
        DecodeError::Damaged { codec: self.codec, reason: reason.into() }
    }
}

/// Decodes chunks. Keeps its working memory: one per thread saves an allocation of 128 KiB or more
/// per chunk.
#[derive(Default)]
pub struct Decoder {
    zstd: Option<Decompressor<'static>>,
    frames: Option<Frames<'static>>,
    gzip: Option<Inflater>,
}

impl Decoder {
    /// A decoder for any codec.
    pub fn new() -> Self {
        Decoder::default()
    }

    /// Decodes `stored`, compressed from its first byte on, into exactly `decoded.len()` bytes.
    pub fn decode(
        &mut self,
        codec: Codec,
        stored: &[u8],
        decoded: &mut [u8],
    ) -> Result<(), DecodeError> {
        self.fill(&Unit { codec, start: None, size: decoded.len() as u32 }, stored, decoded)
    }

    /// Decodes `stored` into exactly `decoded.len()` bytes. Never writes or allocates more,
    /// whatever `stored` claims.
    fn fill(
        &mut self,
        unit: &Unit<'_>,
        stored: &[u8],
        decoded: &mut [u8],
    ) -> Result<(), DecodeError> {
        let expected = decoded.len();
        let actual = match (unit.codec, unit.start) {
            (Codec::None, _) => {
                if stored.len() == expected {
                    decoded.copy_from_slice(stored);
                }
                stored.len()
            }
            (Codec::Lz4, _) => lz4_flex::block::decompress_into(stored, decoded)
                .map_err(|error| unit.damaged(error.to_string()))?,
            (Codec::Zstd, _) => {
                let zstd = match &mut self.zstd {
                    Some(zstd) => zstd,
                    empty => empty.insert(
                        Decompressor::new().map_err(|error| unit.damaged(error.to_string()))?,
                    ),
                };
                zstd.decompress_to_buffer(stored, decoded)
                    .map_err(|error| unit.damaged(error.to_string()))?
            }
            (Codec::ZstdLayer, _) => {
                let damaged = |error: io::Error| unit.damaged(error.to_string());
                let frames = match &mut self.frames {
                    Some(frames) => frames,
                    none => none.insert(Frames::new().map_err(damaged)?),
                };
                first_of_frames(frames, stored, decoded).map_err(damaged)?
            }
            (Codec::Gzip, Some(point)) => {
                let gzip = self.gzip.get_or_insert_default();
                gzip.decode(&point, stored, decoded).map_err(|reason| unit.damaged(reason))?
            }
            (Codec::Gzip, None) => {
                return Err(unit.damaged("no point is known where it begins"));
            }
        };
        let codec = unit.codec;
        if actual == expected { Ok(()) } else { Err(DecodeError::Size { codec, actual, expected }) }
    }

    /// Decodes `stored`, the stored bytes of a chunk, up to the end of that chunk in its unit, see
    /// [`Chunk::part_of`](crate::Chunk::part_of). Raw bytes are returned in place; others are
    /// decoded into `buffer`.
    pub fn unit<'a>(
        &mut self,
        unit: &Unit<'_>,
        stored: &'a [u8],
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], DecodeError> {
        let (codec, actual, expected) = (unit.codec, stored.len(), unit.size as usize);
        if codec != Codec::None {
            buffer.resize(expected, 0);
            self.fill(unit, stored, buffer)?;
            return Ok(buffer);
        }
        if actual == expected {
            Ok(stored)
        } else {
            Err(DecodeError::Size { codec, actual, expected })
        }
    }
}

/// Fills `decoded` with the first bytes of the frames with which `stored` begins, one after the
/// other. Returns their number. The window of a frame may be large, but only decoded bytes
/// touch it.
fn first_of_frames(
    frames: &mut Frames<'static>,
    stored: &[u8],
    decoded: &mut [u8],
) -> io::Result<usize> {
    frames.reinit()?;
    let (mut from, mut to) = (InBuffer::around(stored), OutBuffer::around(decoded));
    while to.pos() < to.capacity() {
        let before = (from.pos(), to.pos());
        frames.run(&mut from, &mut to)?;
        if before == (from.pos(), to.pos()) {
            break;
        }
    }
    Ok(to.pos())
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
        /// The codec.
        codec: Codec,
        /// The codec's message.
        reason: String,
    },
    /// The decoded size differs from the size in the image.
    #[error("{codec} data decodes to {actual} bytes, expected {expected}")]
    Size {
        /// The codec.
        codec: Codec,
        /// Bytes that came out.
        actual: usize,
        /// Bytes that the image promised.
        expected: usize,
    },
}

impl Codec {
    /// The codec with this number in a RAFS v6 table, which may be another writer's.
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Codec::None),
            1 => Some(Codec::Lz4),
            2 => Some(Codec::Gzip),
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
            Codec::Gzip => "gzip",
            Codec::Zstd | Codec::ZstdLayer => "zstd",
        })
    }
}
