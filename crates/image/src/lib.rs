//! The format of lazy images.
//!
//! This crate holds the vocabulary that every other crate speaks: [digests](digest), the two
//! address spaces of a blob ([`Stored`] and [`Decoded`]), [chunks](chunk), [codecs](codec), the
//! [file tree](tree), and the on-disk format ([`erofs`], [`rafs`]). It is pure: no I/O, no unsafe
//! code, and everything that it parses is treated as hostile.
#![forbid(unsafe_code)]

pub mod chunk;
pub mod codec;
pub mod compare;
pub mod digest;
pub mod erofs;
pub mod error;
pub mod ext4;
pub mod gzip;
mod leb128;
pub mod lesson;
pub mod oci;
pub mod offset;
pub mod path;
pub mod plan;
pub mod points;
pub mod rafs;
pub mod seekable;
pub mod trace;
pub mod tree;
pub mod units;

pub use chunk::{Blob, BlobIndex, Chunk, ChunkList, ChunkRef};
pub use codec::Codec;
pub use digest::{Algorithm, Digest, Hasher, InvalidDigest};
pub use error::{FormatError, Problem, Structure};
pub use lesson::Lesson;
pub use offset::{BLOCK_SIZE, Decoded, Stored};
pub use path::Name;
pub use points::Points;
pub use trace::Trace;
pub use tree::{Inode, InodeId, Kind, Metadata, Mtime, Tree};
