//! The index of an unconverted layer: a blob that makes the layer readable in places.
//!
//! ```text
//! CI table | CI header |H| digest array |H| skeleton |H| table of contents |H|
//! ```
//! The skeleton is the unpacked layer without the bytes of its chunks, compressed with zstd.
//! Skeleton and chunks together restore the layer. The index of a layer without chunks has only the
//! skeleton.
//!
//! It is written as upstream writes "zran" blobs, so that upstream's readers serve such images,
//! too.

use zerocopy::IntoBytes;

use super::{
    BlobRecord, IndexBlob, TailInfo,
    blob::{self, Section},
    ci::{self, PlaceInPiece},
    layout::{Context, MAX_CHUNKS, features},
};
use crate::{
    Algorithm, Blob, Chunk, Codec, Digest, FormatError, Points, offset::round_up_to_block,
    points::NewPoint,
};

/// The content of a layer's index.
#[derive(Clone, Debug)]
pub struct LayerIndex {
    /// SHA-256 of the layer as stored.
    pub layer: Digest,
    /// Bytes of the layer as stored.
    pub stored_size: u64,
    /// Its chunks in their order. Each is where its own bytes are in the stored layer, and in no
    /// unit.
    pub chunks: Vec<Chunk>,
    /// The pieces of a gzip layer that have chunks, in their order; empty for a plain tar.
    pub pieces: Vec<Piece>,
    /// The bytes of the unpacked layer outside all chunks, compressed with zstd; empty if not kept.
    pub skeleton: Vec<u8>,
}

/// A piece of a gzip layer: what follows a point, as far as there are chunks.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The point at its beginning.
    pub point: NewPoint,
    /// The same place in the unpacked layer.
    pub decoded: u64,
    /// Stored bytes.
    pub stored_size: u32,
    /// Decoded bytes.
    pub decoded_size: u32,
    /// Its chunks: how many there are, and where each begins in the decoded piece.
    pub offsets: Vec<u32>,
}

/// A stored index, with the bootstrap's description of the layer.
#[derive(Clone, Debug)]
pub struct WrittenIndex {
    /// The blob.
    pub bytes: Vec<u8>,
    /// SHA-256 of the part of it that a node needs to read the layer.
    pub tables: Digest,
    /// The layer, with chunks that are [in no unit yet](super::place_chunks).
    pub record: BlobRecord,
}

impl LayerIndex {
    /// Writes the index. The same layer gives the same bytes.
    ///
    /// # Errors
    /// There are too many chunks, or one does not fit a CI entry.
    pub fn write(self) -> Result<WrittenIndex, FormatError> {
        let LayerIndex { layer, stored_size, chunks, pieces, skeleton } = self;
        let error = |problem: &'static str| FormatError::new(("index of", layer), 0, problem);
        let Some(last) = chunks.last() else {
            return Ok(without_chunks(layer, stored_size, &skeleton));
        };
        if last.number >= MAX_CHUNKS {
            return Err(error("too many chunks"));
        }
        let decoded_size =
            round_up_to_block(last.decoded_end().0).ok_or_else(|| error("too big"))?;
        let table = ci_table(&chunks, &pieces)?;
        let is_gzip = !pieces.is_empty();
        let contexts = if is_gzip { features::ZRAN } else { 0 };
        let mut out = Section::default();
        let (stored, ci_codec) = blob::compressed_ci(&table, Codec::Zstd)?;
        let mut info = TailInfo {
            features: features::WRITTEN | features::CHUNK_INFO_V2 | features::SEPARATE | contexts,
            chunk_count: chunks.len() as u32,
            ci_offset: 0,
            ci_stored_size: stored.len() as u64,
            ci_size: table.len() as u64,
            ci_codec,
            toc_size: 0,
            toc_digest: None,
            index: None,
        };
        let mut toc = blob::write_ci(&mut out, &info, &stored, &table, pieces.len() as u32);
        let tables = Algorithm::Sha256.digest(&out.bytes()[..info.meta_end() as usize]);
        toc.push(blob::write_digests(&mut out, &chunks));
        toc.extend(blob::write_skeleton(&mut out, &skeleton));
        blob::write_toc(&mut out, &toc);
        let bytes = out.into_bytes();
        let digest = Algorithm::Sha256.digest(&bytes);
        info.index = Some(IndexBlob { digest, size: bytes.len() as u64 });
        let blob = Blob { decoded_size, chunks: chunks.into(), ..empty(layer, stored_size) };
        Ok(WrittenIndex { bytes, tables, record: BlobRecord { blob, tail: info } })
    }
}

/// The index of a layer that has no chunks. No bootstrap has such a blob.
fn without_chunks(layer: Digest, stored_size: u64, skeleton: &[u8]) -> WrittenIndex {
    let mut out = Section::default();
    let toc: Vec<_> = blob::write_skeleton(&mut out, skeleton).into_iter().collect();
    blob::write_toc(&mut out, &toc);
    let bytes = out.into_bytes();
    let (digest, size) = (Algorithm::Sha256.digest(&bytes), bytes.len() as u64);
    let tables = Algorithm::Sha256.digest(&[]);
    let tail = TailInfo::without_table(0, 0, Some(IndexBlob { digest, size }));
    WrittenIndex { bytes, tables, record: BlobRecord { blob: empty(layer, stored_size), tail } }
}

/// A layer of which no chunk is known.
pub(super) fn empty(layer: Digest, stored_size: u64) -> Blob {
    Blob {
        id: layer,
        codec: Codec::Gzip,
        points: Points::default(),
        stored_size,
        decoded_size: 0,
        chunks: Vec::new().into(),
    }
}

/// Entries, pieces, windows.
fn ci_table(chunks: &[Chunk], pieces: &[Piece]) -> Result<Vec<u8>, FormatError> {
    let mut table = Vec::new();
    let offsets = pieces.iter().zip(0..).flat_map(|(piece, number)| {
        piece.offsets.iter().map(move |offset| PlaceInPiece { unit: number, offset: *offset })
    });
    let mut places = offsets.map(Some).chain(std::iter::repeat(None));
    for chunk in chunks {
        let words = ci::layer_entry(chunk, places.next().flatten());
        let words = words.ok_or_else(|| {
            let problem = format!("does not fit a CI entry: {chunk:?}");
            FormatError::new(("chunk", chunk.number), chunk.stored.0, problem)
        })?;
        words.iter().for_each(|word| table.extend_from_slice(&word.to_le_bytes()));
    }
    let mut windows: Vec<u8> = Vec::new();
    for Piece { point, decoded, stored_size, decoded_size, .. } in pieces {
        let context = Context {
            stored: point.stored.0.into(),
            decoded: (*decoded).into(),
            window: (windows.len() as u64).into(),
            stored_size: (*stored_size).into(),
            decoded_size: (*decoded_size).into(),
            window_size: (point.window.len() as u32).into(),
            before: point.before,
            bits: point.bits,
            reserved: [0; 2],
        };
        table.extend_from_slice(context.as_bytes());
        windows.extend_from_slice(&point.window);
    }
    table.append(&mut windows);
    Ok(table)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{
        BlobIndex, Decoded, Metadata, Stored, Tree,
        rafs::{BootstrapOptions, ci_table_of, layout, place_chunks, write_bootstrap},
    };

    pub(in crate::rafs) fn chunk(number: u32, stored: u64, decoded: u64) -> Chunk {
        Chunk {
            number,
            digest: Algorithm::Blake3.digest(&number.to_le_bytes()),
            stored: Stored(stored),
            stored_size: 50,
            decoded: Decoded(decoded),
            decoded_size: 100,
            part: None,
        }
    }

    fn piece(stored: u64, offsets: &[u32]) -> Piece {
        Piece {
            point: NewPoint { stored: Stored(stored), bits: 3, before: 9, window: vec![1, 2, 3] },
            decoded: 1000,
            stored_size: 200,
            decoded_size: 400,
            offsets: offsets.to_vec(),
        }
    }

    fn index() -> WrittenIndex {
        LayerIndex {
            layer: Algorithm::Sha256.digest(b"layer"),
            stored_size: 1000,
            chunks: vec![chunk(0, 20, 0), chunk(1, 90, 4096), chunk(2, 200, 8192)],
            pieces: vec![piece(10, &[0, 200]), piece(160, &[50])],
            skeleton: b"skeleton".to_vec(),
        }
        .write()
        .unwrap()
    }

    /// Places the chunks of an index whose decoded CI table was changed.
    fn placed(change: impl FnOnce(&mut [u8])) -> Result<super::super::Placed, FormatError> {
        let index = index();
        let (tree, options) = (Tree::new(Metadata::default()), BootstrapOptions::default());
        let bootstrap = write_bootstrap(&tree, std::slice::from_ref(&index.record), &options)?;
        let mut table = ci_table_of(&index.bytes, &index.record.tail)?;
        change(&mut table);
        place_chunks(&bootstrap, &[(BlobIndex(0), table)])
    }

    #[test]
    fn an_index_leads_from_points_to_the_ends_of_chunks() {
        let index = index();
        let placed = placed(|_| {}).unwrap();
        let point = placed.points[0].1.at(Stored(160)).unwrap();
        assert_eq!((point.bits, point.before, point.window().unwrap()), (3, 9, vec![1, 2, 3]));
        let table = ci_table_of(&index.bytes, &index.record.tail).unwrap();
        let table = ci::CiTable::new(&table, &index.record.tail).unwrap();
        let found = [0, 1, 2].map(|number| {
            let entry = table.get(number).unwrap();
            let part = entry.part.unwrap();
            (entry.stored.0, entry.stored_size, part.offset, part.size)
        });
        assert_eq!(found, [(10, 60, 0, 100), (10, 130, 200, 300), (160, 90, 50, 150)]);
    }

    #[test]
    fn impossible_pieces_are_refused() {
        const ENTRIES: usize = 3 * layout::CI_V2_ENTRY_SIZE as usize;
        type Change = fn(&mut [u8]);
        let changes: [(&str, Change); 6] = [
            ("another piece", |table| table[20] = 7),
            ("behind the piece", |table| table[17] = 2),
            ("encryption", |table| table[7] |= 8),
            ("a window outside", |table| table[ENTRIES + 16] = 200),
            ("a byte of 9 bits", |table| table[ENTRIES + 37] = 9),
            ("two points at one byte", |table| {
                table[ENTRIES + 40] = 10;
                table[ENTRIES + 76] = 8;
            }),
        ];
        for (what, change) in changes {
            assert!(placed(change).is_err(), "{what}");
        }
    }
}
