//! How chunks are compressed.

use std::fmt;

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

    /// Decodes `stored` into exactly `decoded.len()` bytes. Never writes or allocates more, whatever `stored` claims.
    pub fn decode(self, stored: &[u8], decoded: &mut [u8]) -> Result<(), DecodeError> {
        let expected = decoded.len();
        let damaged = |reason: String| DecodeError::Damaged { codec: self, reason };
        let actual = match self {
            Codec::None => {
                if stored.len() == expected {
                    decoded.copy_from_slice(stored);
                }
                stored.len()
            }
            Codec::Lz4 => lz4_flex::block::decompress_into(stored, decoded)
                .map_err(|error| damaged(error.to_string()))?,
            Codec::Zstd => zstd::bulk::decompress_to_buffer(stored, decoded)
                .map_err(|error| damaged(error.to_string()))?,
        };
        if actual == expected { Ok(()) } else { Err(DecodeError::Size { codec: self, actual, expected }) }
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
