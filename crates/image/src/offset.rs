//! The two address spaces of a blob.
//!
//! A lazy image has three address spaces: bytes of a file, bytes of a blob as stored, and bytes of
//! a blob once decoded. Confusing them is the classic bug of this field, so the two that belong to
//! blobs are types of their own.

use std::fmt;

/// EROFS block size in bytes. Decoded chunks start on block borders, because the kernel maps whole
/// blocks.
pub const BLOCK_SIZE: u64 = 4096;

/// An offset, in bytes, in a blob as stored: compressed, as fetched over the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stored(pub u64);

/// An offset in a decoded blob, in bytes: the address space of the kernel's reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Decoded(pub u64);

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stored byte {}", self.0)
    }
}

impl fmt::Display for Decoded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "decoded byte {}", self.0)
    }
}

/// Rounds up to the next multiple of [`BLOCK_SIZE`]; `None` on overflow.
pub const fn round_up_to_block(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(BLOCK_SIZE)
}
