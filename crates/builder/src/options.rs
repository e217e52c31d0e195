//! Options of a conversion.

use std::path::PathBuf;

use lazuli_image::Codec;

use crate::error::BuildError;

/// Maximum number of blobs of an image, and so of layers.
pub(crate) const MAX_BLOBS: usize = 254;

/// How to make an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Bytes per chunk: a power of two from 4 KiB to 16 MiB.
    pub chunk_size: u32,
    /// How chunks are compressed.
    pub codec: Codec,
    /// Level of [`Codec::Zstd`], 1 to 22; ignored by other codecs.
    pub level: i32,
    /// Most bytes of small chunks that are compressed together, a power of two from 4 KiB up to the
    /// chunk size; 0 compresses each on its own, and only such images can be mounted by Nydus
    /// before 2.3.
    pub batch_size: u32,
    /// An existing directory with room for about twice the compressed image.
    pub scratch: PathBuf,
    /// Chunks that are compressed at the same time, and layers that are read at the same time; at
    /// least 1.
    pub threads: usize,
}

impl Options {
    /// 1 MiB, as in other builders of the format, so that images can be compared with theirs.
    /// Smaller chunks compress worse; bigger ones make readers of a few bytes wait longer.
    pub const CHUNK_SIZE: u32 = 1 << 20;

    /// The default zstd level.
    ///
    /// An image is made once and fetched often, so bytes count more than seconds, up to a point.
    /// The 988 MB of a Python image: level 1 gives 380 MB and takes 2.9 seconds of CPU (with all
    /// the rest, but without the kernel), 2 gives 365 MB in 3.4, 3 gives 353 MB in 4.3, 4 gives 350
    /// MB in 5.2. What does not compress costs 0.5 ns a byte at any of them, so nothing is gained
    /// by guessing before. Other builders have 3 too.
    pub const LEVEL: i32 = 3;

    /// The defaults, for this machine, with temporary files in `scratch`.
    pub fn new(scratch: PathBuf) -> Self {
        Options {
            chunk_size: Self::CHUNK_SIZE,
            codec: Codec::Zstd,
            level: Self::LEVEL,
            batch_size: 0,
            scratch,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }

    pub(crate) fn check(&self) -> Result<(), BuildError> {
        check_chunk_size(self.chunk_size)?;
        let fail = |option, value, expected| Err(BuildError::Option { option, value, expected });
        match () {
            () if self.codec == Codec::Zstd && !(1..=22).contains(&self.level) => {
                fail("level", self.level.into(), "1 to 22")
            }
            () if self.batch_size != 0
                && !(self.batch_size.is_power_of_two()
                    && (1 << 12..=self.chunk_size).contains(&self.batch_size)) =>
            {
                let expected = "0, or a power of two from 4096 to the chunk size";
                fail("batch_size", self.batch_size.into(), expected)
            }
            // The entry of a chunk of 16 MiB that does not compress would not fit a CI table of
            // version 2.
            () if self.batch_size != 0 && self.chunk_size == 1 << 24 => {
                fail("chunk_size", self.chunk_size.into(), "at most 8388608 with batches")
            }
            () if self.threads == 0 => fail("threads", 0, "at least 1"),
            () => Ok(()),
        }
    }
}

pub(crate) fn check_chunk_size(chunk_size: u32) -> Result<(), BuildError> {
    if chunk_size.is_power_of_two() && (1 << 12..=1 << 24).contains(&chunk_size) {
        return Ok(());
    }
    let expected = "a power of two from 4096 to 16777216";
    Err(BuildError::Option { option: "chunk_size", value: chunk_size.into(), expected })
}
