//! Writes an image's metadata as an ext4 file system, for kernels without EROFS.
//!
//! The file system lies on a device that is the metadata, followed by each decoded blob, each of
//! them in whole blocks; the device mapper can make such a device. Chunks lie on block borders of
//! the decoded blob, so extents of files point at them. Files share blocks where they share chunks:
//! the file system says so by a feature that keeps kernels from writing to it. It has no journal
//! and no checksums, and the same bootstrap always gives the same bytes.
//!
//! Memory is some 12 bytes for each inode, 8 for each name and each run of blocks of the blobs, and
//! one directory or file at a time. Time and output of damaged bootstraps are bounded by the size
//! of the bootstrap and of its blobs.

mod dir;
mod extents;
mod geometry;
mod hash;
mod layout;
mod node;
mod walk;
mod writer;
mod xattr;

use std::io;

use crate::{FormatError, rafs::Bootstrap};

/// The parts of the device, in their order. Sizes are in blocks of [`crate::BLOCK_SIZE`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The metadata, that is what [`Plan::write`] writes; at least 5.
    pub metadata: u64,
    /// The blobs in the order of [`Bootstrap::blobs`]: decoded sizes, rounded up.
    pub blobs: Vec<u64>,
}

/// Why there is no ext4 file system for a bootstrap.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The bootstrap breaks its own format.
    #[error(transparent)]
    Broken(#[from] FormatError),
    /// A file, directory or link has something that ext4 cannot hold.
    #[error("ext4 cannot hold `{path}`: {why}")]
    Unfit {
        /// One of its paths, with escapes for what is not ASCII.
        path: String,
        /// What it has.
        why: Unfit,
    },
    /// The blobs have more than 2²⁸ blocks (1 TiB), or the device 2³² or more.
    #[error("an image of {0} blocks is too large for ext4: more than 2^28 (1 TiB)")]
    TooLarge(u64),
}

/// Something that ext4 cannot hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// Extended attributes are neither in the inode nor in one block.
    #[error("its extended attributes take {size} bytes, more than a block")]
    Attributes {
        /// What they take in ext4's encoding.
        size: usize,
    },
    /// The name of an extended attribute has a prefix that ext4 has no number for.
    #[error("the extended attribute `{0}`")]
    AttributeName(String),
    /// An ACL that Linux would not show again, because its value is none or lacks entries.
    #[error("`{0}` is not a sound ACL")]
    Acl(String),
    /// The time is before 1901-12-13 or after 2446-05-10, in seconds since 1970.
    #[error("the time {0}")]
    Time(i64),
    /// A file has 2³² blocks or more; its size in bytes.
    #[error("a file of {0} bytes")]
    Size(u64),
    /// A directory takes more than 131,072 blocks (512 MiB); their number.
    #[error("a directory of {0} blocks")]
    Directory(usize),
}

/// An ext4 file system in which everything has its place.
#[derive(Debug)]
pub struct Plan<'a, B> {
    source: node::Source<'a, B>,
    /// For each inode its first block of metadata, counted from the first one's.
    starts: Vec<u32>,
    /// Whether a directory has an index.
    is_indexed: bool,
    /// Blocks of blobs that files use, counted from the first blob's, as first and end; sorted and
    /// apart from each other.
    used: Vec<(u32, u32)>,
    geometry: geometry::Geometry,
}

/// Decides on the place of everything. Reads the whole bootstrap once.
pub fn plan<B: AsRef<[u8]>>(bootstrap: &Bootstrap<B>) -> Result<Plan<'_, B>, Refused> {
    let source = node::Source::new(bootstrap)?;
    let mut starts = vec![0; source.inodes.len()];
    let mut end = 0_u64;
    let mut is_indexed = false;
    let mut used: Vec<(u32, u32)> = Vec::new();
    for position in source.inodes.placement() {
        let node = source.node(position).map_err(|failure| source.refused(position, failure))?;
        if let Some(start) = starts.get_mut(position) {
            *start = u32::try_from(end).map_err(|_| Refused::TooLarge(end))?;
        }
        end += u64::from(node.block_count());
        is_indexed |= node.is_indexed();
        for run in node.runs() {
            match used.last_mut() {
                Some((_, end)) if *end == run.start => *end += run.len,
                _ => used.push((run.start, run.start + run.len)),
            }
        }
    }
    used.sort_unstable();
    used.dedup_by(|next, kept| {
        let touches = next.0 <= kept.1;
        if touches {
            kept.1 = kept.1.max(next.1);
        }
        touches
    });
    let geometry = geometry::Geometry::new(source.inodes.last_number(), end, source.data_blocks)
        .map_err(Refused::TooLarge)?;
    Ok(Plan { source, starts, is_indexed, used, geometry })
}

impl<B: AsRef<[u8]>> Plan<'_, B> {
    /// The sizes of the device's parts.
    pub fn layout(&self) -> Layout {
        Layout { metadata: self.geometry.metadata(), blobs: self.source.blob_blocks().collect() }
    }

    /// Writes the metadata from begin to end, [`Layout::metadata`] blocks. `uuid` names the file
    /// system; it should not be zero, which `e2fsck` takes for none. Writes are as small as an
    /// inode: `out` needs a buffer.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(&self, uuid: [u8; 16], out: &mut impl io::Write) -> io::Result<()> {
        writer::write(self, uuid, out)
    }
}
