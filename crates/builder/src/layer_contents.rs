//! Records of layers: their entries and chunks, so that a known layer is not read again.

use std::io::{self, Read as _};

use lazuli_image::{Algorithm, Digest};
use serde::{Deserialize, Serialize};

use crate::entry::{Entry, EntryKind};

/// Magic of a record file. Its number increases with each change of the format or of the meaning of
/// an entry, since nothing else tells versions apart.
const MAGIC: &[u8] = b"lazuli layer 1\n";

/// Bytes of the BLAKE3 digest behind [`MAGIC`], which covers everything after it.
const DIGEST: usize = 32;

/// Maximum size of an unpacked record in bytes, as large as that of a layer of two million files.
const LIMIT: u64 = 1 << 30;

/// Compression of records: they are read as often as they are written.
const LEVEL: i32 = 1;

/// The entries of a layer, and its content as digests of chunks.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct LayerContents {
    chunk_size: u32,
    pub(crate) entries: Vec<Entry>,
    /// By number.
    chunks: Vec<([u8; DIGEST], u32)>,
}

/// The serialised form.
#[derive(Serialize)]
struct Written<'a> {
    chunk_size: u32,
    entries: &'a [Entry],
    chunks: Vec<([u8; DIGEST], u32)>,
}

impl LayerContents {
    /// A record of these entries, whose chunks count through `chunks`: BLAKE3 digest and decoded
    /// size.
    pub(crate) fn new(
        chunk_size: u32,
        entries: Vec<Entry>,
        chunks: Vec<([u8; DIGEST], u32)>,
    ) -> Self {
        LayerContents { chunk_size, entries, chunks }
    }

    /// The bytes of such a record.
    ///
    /// # Errors
    /// Only if there is no memory for a compressor.
    pub(crate) fn write(
        chunk_size: u32,
        entries: &[Entry],
        chunks: Vec<([u8; DIGEST], u32)>,
    ) -> io::Result<Vec<u8>> {
        let written = Written { chunk_size, entries, chunks };
        let packed = zstd::Encoder::new(Vec::new(), LEVEL)?;
        let packed = postcard::to_io(&written, packed).map_err(io::Error::other)?.finish()?;
        let digest = Algorithm::Blake3.digest(&packed);
        Ok([MAGIC, &digest.hash, &packed].concat())
    }

    /// Reads a record by [`ReadLayer::record`](crate::ReadLayer::record); `None` if another version
    /// wrote it, or the bytes are damaged.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (digest, packed) = bytes.strip_prefix(MAGIC)?.split_at_checked(DIGEST)?;
        if !Digest::blake3(digest.try_into().ok()?).matches(packed) {
            return None;
        }
        let mut unpacked = Vec::new();
        let reader = zstd::Decoder::with_buffer(packed).ok()?;
        reader.take(LIMIT).read_to_end(&mut unpacked).ok()?;
        let record: LayerContents = postcard::from_bytes(&unpacked).ok()?;
        record.is_sound().then_some(record)
    }

    /// Returns whether every chunk of a file is in the list.
    fn is_sound(&self) -> bool {
        self.entries.iter().all(|entry| match &entry.kind {
            EntryKind::Regular { chunks, .. } => {
                chunks.iter().all(|chunk| (chunk.number as usize) < self.chunks.len())
            }
            _ => true,
        })
    }

    /// Bytes per chunk.
    pub fn chunk_size(&self) -> u32 {
        self.chunk_size
    }

    /// Returns the digests of the chunks' content, in order.
    pub(crate) fn digests(&self) -> impl Iterator<Item = &[u8; DIGEST]> {
        self.chunks.iter().map(|(hash, _)| hash)
    }

    /// The chunks in order, as [`crate::dedup::SharedChunks::enter`] takes them.
    pub(crate) fn chunks(&self) -> Vec<(Digest, u32)> {
        self.chunks.iter().map(|(hash, size)| (Digest::blake3(*hash), *size)).collect()
    }
}
