//! Reads the output of [`LayerIndex::write`](super::LayerIndex::write).

use super::{
    BlobRecord, IndexBlob, TailInfo,
    blob::{IndexSections, ci_table_of},
    ci::CiTable,
    layer_index,
    layout::{CI_HEADER_SIZE, MAX_CHUNKS, MAX_CI_V2, features},
};
use crate::{
    Algorithm, Blob, Chunk, Codec, Digest, FormatError, Stored, offset::round_up_to_block,
};

/// The index of an unconverted layer, with the data to restore that layer.
#[derive(Clone, Debug)]
pub struct ReadIndex {
    /// The bootstrap's description of the layer, with chunks that are not placed in units yet.
    pub record: BlobRecord,
    /// For each chunk the place of its first byte in the unpacked layer. They ascend, and chunks
    /// do not overlap.
    pub starts: Vec<u64>,
    /// The unpacked layer without its chunks, compressed with zstd; `None` if not kept.
    pub skeleton: Option<Vec<u8>>,
}

impl ReadIndex {
    /// Parses `bytes`, the index of `layer`, which has `stored_size` bytes.
    ///
    /// # Errors
    /// They are no index, or one of another layer.
    pub fn parse(bytes: &[u8], layer: Digest, stored_size: u64) -> Result<Self, FormatError> {
        let error = |problem: &'static str| FormatError::new(("index of", layer), 0, problem);
        let wrong = |problem: String| FormatError::new(("index of", layer), 0, problem);
        let sections = IndexSections::find(bytes)
            .ok_or_else(|| error("expected a table of contents that leads to its sections"))?;
        let index = IndexBlob { digest: Algorithm::Sha256.digest(bytes), size: bytes.len() as u64 };
        let skeleton = sections.skeleton.map(<[u8]>::to_vec);
        let blob = layer_index::empty(layer, stored_size);
        let Some(header) = sections.header else {
            let record = BlobRecord { blob, tail: TailInfo::without_table(0, 0, Some(index)) };
            return Ok(ReadIndex { record, starts: Vec::new(), skeleton });
        };
        let codec = Codec::from_number(header.compressor.get());
        let tail = TailInfo {
            features: header.features.get(),
            chunk_count: header.entries.get(),
            ci_offset: header.offset.get(),
            ci_stored_size: header.stored_size.get(),
            ci_size: header.size.get(),
            ci_codec: codec.ok_or_else(|| error("its tables have an unknown codec"))?,
            toc_size: 0,
            toc_digest: None,
            index: Some(index),
        };
        let expected = features::WRITTEN | features::CHUNK_INFO_V2 | features::SEPARATE;
        if tail.features & !features::ZRAN != expected
            || tail.ci_offset != 0
            || tail.ci_size > MAX_CI_V2
            || !(1..=MAX_CHUNKS).contains(&tail.chunk_count)
            || sections.digests.len() != tail.chunk_count as usize
        {
            return Err(error("its tables are not those of a layer"));
        }
        let end = tail.ci_stored_size.checked_add(CI_HEADER_SIZE);
        let tables = end.and_then(|end| bytes.get(..usize::try_from(end).ok()?));
        let tables = tables.ok_or_else(|| error("its tables end behind it"))?;
        let table = ci_table_of(tables, &tail)?;
        let table = CiTable::new(&table, &tail).ok_or_else(|| error("its table has a bad size"))?;
        let (chunks, starts) = chunks(&table, sections.digests).map_err(wrong)?;
        let last = chunks.last().map_or(0, |chunk| chunk.decoded_end().0);
        let decoded_size = round_up_to_block(last).ok_or_else(|| error("too big"))?;
        let blob = Blob { decoded_size, chunks: chunks.into(), ..blob };
        Ok(ReadIndex { record: BlobRecord { blob, tail }, starts, skeleton })
    }
}

fn chunks(table: &CiTable<'_>, digests: &[[u8; 32]]) -> Result<(Vec<Chunk>, Vec<u64>), String> {
    let (mut chunks, mut starts) = (Vec::<Chunk>::new(), Vec::new());
    let (mut decoded, mut end) = (0, 0);
    for (number, digest) in (0..).zip(digests) {
        let (own, start) = table.own_place(number)?;
        let (stored, decoded_size) = (own.stored, own.decoded_size);
        let before = chunks.last().map_or(Stored(0), |chunk| chunk.stored);
        if own.decoded.0 < decoded || start < end || stored < before {
            return Err(format!("chunk {number} is not behind the one before it"));
        }
        let ends = (own.decoded.0.checked_add(decoded_size.into()).and_then(round_up_to_block))
            .zip(start.checked_add(decoded_size.into()));
        (decoded, end) = ends.ok_or_else(|| format!("chunk {number} has no end"))?;
        starts.push(start);
        chunks.push(Chunk {
            number,
            digest: Digest::blake3(*digest),
            stored,
            stored_size: own.stored_size,
            decoded: own.decoded,
            decoded_size,
            part: None,
        });
    }
    Ok((chunks, starts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        points::NewPoint,
        rafs::{LayerIndex, Piece, WrittenIndex, layer_index::tests::chunk},
    };

    fn layer() -> Digest {
        Algorithm::Sha256.digest(b"layer")
    }

    fn written(chunks: Vec<Chunk>, pieces: Vec<Piece>) -> WrittenIndex {
        let skeleton = b"skeleton".to_vec();
        LayerIndex { layer: layer(), stored_size: 1000, chunks, pieces, skeleton }.write().unwrap()
    }

    fn gzip() -> WrittenIndex {
        let piece = |stored, decoded, offsets: &[u32]| Piece {
            point: NewPoint { stored: Stored(stored), bits: 3, before: 9, window: vec![1, 2, 3] },
            decoded,
            stored_size: 200,
            decoded_size: 400,
            offsets: offsets.to_vec(),
        };
        let chunks = vec![chunk(0, 20, 0), chunk(1, 90, 4096), chunk(2, 200, 8192)];
        written(chunks, vec![piece(10, 1000, &[0, 200]), piece(160, 1500, &[50])])
    }

    #[test]
    fn written_values_are_read_back() {
        let mut plain = [chunk(0, 512, 0), chunk(1, 1536, 4096)];
        plain.iter_mut().for_each(|chunk| chunk.stored_size = 100);
        for (index, starts) in [
            (gzip(), &[1000, 1200, 1550][..]),
            (written(plain.to_vec(), Vec::new()), &[512, 1536]),
            (written(Vec::new(), Vec::new()), &[]),
        ] {
            let read = ReadIndex::parse(&index.bytes, layer(), 1000).unwrap();
            assert_eq!(read.record, index.record);
            assert_eq!(read.starts, starts);
            assert_eq!(read.skeleton.as_deref(), Some(&b"skeleton"[..]));
        }
    }

    #[test]
    fn truncated_or_changed_bytes_are_refused_or_differ() {
        let index = gzip();
        for size in 0..index.bytes.len() {
            assert!(ReadIndex::parse(&index.bytes[..size], layer(), 1000).is_err(), "{size}");
        }
        for at in 0..index.bytes.len() {
            let mut bytes = index.bytes.clone();
            bytes[at] ^= 0x55;
            if let Ok(read) = ReadIndex::parse(&bytes, layer(), 1000) {
                assert_ne!(read.record.tail.index, index.record.tail.index, "{at}");
            }
        }
    }
}
