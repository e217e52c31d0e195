//! RAFS v6: the structures that turn an EROFS image into an index of data blobs.
//!
//! A [`Bootstrap`] is an EROFS image with tables of blobs and chunks; [`write_bootstrap`] makes one
//! from a tree. A data blob is chunks back to back with a [tail](blob_tail) that describes them
//! once more, for readers that want the information without the bootstrap. `docs/format.md` has
//! every byte.

pub mod layout;
pub mod v5;

mod across_blobs;
mod blob;
mod bootstrap;
mod check;
mod ci;
mod disk;
mod dump;
mod embedded;
mod footer;
mod indexed;
mod layer_index;
mod place_chunks;
mod read_index;
mod seekable;
mod tables;
mod writer;

pub use blob::{
    Tail, bare_bootstrap, blob_tail, check_blob, check_ci_entries, check_ci_header, check_ci_table,
    check_ci_units, ci_table_of, layer_tail, meta_file, written_meta_file,
};
pub(crate) use bootstrap::Budget;
pub use bootstrap::{Bootstrap, Chunks, Extent};
pub use check::{Summary, check};
pub use dump::dump;
pub use embedded::set_id;
pub use indexed::IndexedBootstrap;
pub use layer_index::{LayerIndex, Piece, WrittenIndex};
pub use place_chunks::{Placed, place_chunks};
pub use read_index::ReadIndex;
pub use seekable::{seekable_layer, write_seekable};
pub use tables::chunk_rows;
pub use writer::{BootstrapOptions, write_bootstrap, write_bootstrap_with_prefetch};

use crate::{Blob, Codec, Digest};

/// A bootstrap's description of one blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlobRecord {
    /// Its id, sizes and chunks.
    pub blob: Blob,
    /// Its tail.
    pub tail: TailInfo,
}

/// The places of the tables at the end of a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailInfo {
    /// See [`layout::features`].
    pub features: u32,
    /// Chunks in the blob; a bootstrap of others may list fewer.
    pub chunk_count: u32,
    /// First byte of the CI table in the blob.
    pub ci_offset: u64,
    /// Stored bytes of the CI table.
    pub ci_stored_size: u64,
    /// Decoded bytes of the CI table: 16 for each chunk in version 1, 24 in version 2, 40 more for
    /// each unit, and windows; 0 when there are no tables behind the chunks, as in RAFS v5.
    pub ci_size: u64,
    /// How the CI table is compressed.
    pub ci_codec: Codec,
    /// Bytes of the table of contents with its footer; 0 if unknown.
    pub toc_size: u32,
    /// SHA-256 of the table of contents with its footer, if `toc_size` is not 0.
    pub toc_digest: Option<Digest>,
    /// The blob that has all that, if it is another one than that with the chunks.
    pub index: Option<IndexBlob>,
}

/// The index of an unconverted layer, as a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexBlob {
    /// SHA-256 of the blob as stored.
    pub digest: Digest,
    /// Its size in bytes.
    pub size: u64,
}

impl TailInfo {
    /// Describes a blob without a chunk table.
    const fn without_table(features: u32, chunk_count: u32, index: Option<IndexBlob>) -> Self {
        TailInfo {
            features,
            chunk_count,
            ci_offset: 0,
            ci_stored_size: 0,
            ci_size: 0,
            ci_codec: Codec::None,
            toc_size: 0,
            toc_digest: None,
            index,
        }
    }

    /// One past the last byte of the CI table and its header in the blob.
    pub const fn meta_end(&self) -> u64 {
        self.ci_offset + self.ci_stored_size + layout::CI_HEADER_SIZE
    }

    /// Returns whether only the CI table has the places of stored chunks.
    pub(super) const fn has_units(&self) -> bool {
        self.features & (layout::features::BATCH | layout::features::ZRAN) != 0
    }

    /// Returns whether units are pieces of an ordinary layer.
    pub(super) const fn has_contexts(&self) -> bool {
        self.features & layout::features::ZRAN != 0
    }
}
