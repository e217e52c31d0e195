//! The layout of a blob's chunks, checked once.

use std::ops::Range;

use lazuli_image::{
    Algorithm, BLOCK_SIZE, Blob, Chunk, Codec, Decoded, Digest, offset::round_up_to_block,
};

use super::CacheError;

/// Largest chunk of any image, decoded; the format's own limit.
const MAX_CHUNK: u32 = 16 << 20;

/// Maximum stored size of a chunk. Codecs add a fraction of a percent to incompressible data; twice
/// the size is a bound on memory, not a format rule.
const MAX_STORED_CHUNK: u32 = 2 * MAX_CHUNK;

/// Maximum decoded size of a blob: the format's own limit, and just above ext4's largest file.
const MAX_DECODED: u64 = 1 << 44;

/// Bytes of a layout that are hashed together, about.
const SAID: usize = 64 << 10;

/// An image's description of a blob, checked for everything that the cache relies on: chunks
/// ascend, don't overlap in either address space, and lie inside the blob.
#[derive(Debug)]
pub(crate) struct Layout {
    blob: Blob,
    file_size: u64,
    digest: Digest,
    is_one_file: bool,
}

impl Layout {
    pub(crate) fn new(blob: &Blob) -> Result<Self, CacheError> {
        let wrong = |problem: String| CacheError::Layout { blob: blob.id, problem };
        let file_size = round_up_to_block(blob.decoded_size)
            .filter(|size| *size <= MAX_DECODED)
            .ok_or_else(|| wrong(format!("{} decoded bytes are too many", blob.decoded_size)))?;
        let mut before: Option<&Chunk> = None;
        for chunk in &blob.chunks {
            let wrong = |problem: &str| wrong(format!("chunk {}: {problem}", chunk.number));
            let stored_end = chunk.stored.0.checked_add(chunk.stored_size.into());
            let decoded_end = chunk.decoded.0.checked_add(chunk.decoded_size.into());
            let decoded_end = decoded_end.and_then(round_up_to_block);
            if chunk.decoded_size == 0 || chunk.decoded_size > MAX_CHUNK {
                return Err(wrong("decoded size is 0 or above 16 MiB"));
            }
            if chunk.stored_size == 0 || chunk.stored_size > MAX_STORED_CHUNK {
                return Err(wrong("stored size is 0 or above 32 MiB"));
            }
            if chunk.decoded.0 % BLOCK_SIZE != 0 {
                return Err(wrong("decoded bytes do not start on a block border"));
            }
            if !chunk.is_within_unit() {
                return Err(wrong(
                    "ends behind the end of its unit, or the unit has more than 16 MiB",
                ));
            }
            let needs_point = blob.codec == Codec::Gzip && chunk.part.is_some();
            if needs_point && blob.points.at(chunk.stored).is_none() {
                return Err(wrong("no point is known where its unit begins"));
            }
            if !matches!((stored_end, decoded_end), (Some(stored), Some(decoded))
                if stored <= blob.stored_size && decoded <= file_size)
            {
                return Err(wrong("ends behind the end of the blob"));
            }
            if before.is_some_and(|before| !blob.is_in_order(before, chunk)) {
                return Err(wrong("overlaps the chunk before it"));
            }
            before = Some(chunk);
        }
        let (digest, is_one_file) = (digest(blob), blob.is_one_file());
        Ok(Layout { blob: blob.clone(), file_size, digest, is_one_file })
    }

    pub(crate) fn blob(&self) -> &Blob {
        &self.blob
    }

    pub(crate) fn chunks(&self) -> &[Chunk] {
        &self.blob.chunks
    }

    /// Decoded bytes in whole blocks: the size of the cache file.
    pub(crate) fn file_size(&self) -> u64 {
        self.file_size
    }

    /// See [`Blob::is_one_file`].
    pub(crate) fn is_one_file(&self) -> bool {
        self.is_one_file
    }

    /// Digest of the whole description.
    pub(crate) fn digest(&self) -> &Digest {
        &self.digest
    }

    /// Name of the blob's directory in the cache. Images with different descriptions of one blob
    /// never share bytes, so a false description only hurts its own image.
    pub(crate) fn key(&self) -> String {
        format!("{}-{}", self.blob.id.hex(), self.digest.hex())
    }

    /// Returns whether every block of `range` belongs to a chunk. Other blocks are holes of the
    /// file without bytes in any image: the kernel reads them only if a bootstrap refers to chunks
    /// that it does not list.
    pub(crate) fn covers(&self, range: &Range<Decoded>) -> bool {
        let mut covered = range.start.0;
        for chunk in &self.blob.chunks[self.chunks_in(range)] {
            if chunk.decoded.0 > covered {
                return false;
            }
            // Checked when the layout was made: this does not overflow.
            covered = chunk.decoded_end().0.next_multiple_of(BLOCK_SIZE);
        }
        covered >= range.end.0
    }

    /// Positions in [`Layout::chunks`] of the chunks that have bytes in `range`.
    pub(crate) fn chunks_in(&self, range: &Range<Decoded>) -> Range<usize> {
        let chunks = &self.blob.chunks;
        let padded_end = |chunk: &Chunk| chunk.decoded_end().0.next_multiple_of(BLOCK_SIZE);
        let first = chunks.partition_point(|chunk| padded_end(chunk) <= range.start.0);
        let end = chunks.partition_point(|chunk| chunk.decoded < range.end);
        first..end.max(first)
    }
}

fn digest(blob: &Blob) -> Digest {
    let mut hasher = Algorithm::Blake3.hasher();
    // Not all at once, which would be as much again as the chunks; not one by one, since a hasher
    // likes long inputs.
    let mut said = Vec::with_capacity(SAID + 128);
    said.extend_from_slice(b"lazuli chunk layout 1");
    let number = |said: &mut Vec<u8>, number: u64| said.extend_from_slice(&number.to_le_bytes());
    let id = |said: &mut Vec<u8>, digest: &Digest| {
        said.extend_from_slice(digest.algorithm.name().as_bytes());
        said.extend_from_slice(&digest.hash);
    };
    id(&mut said, &blob.id);
    number(&mut said, blob.codec as u64);
    number(&mut said, blob.stored_size);
    number(&mut said, blob.decoded_size);
    number(&mut said, blob.chunks.len() as u64);
    if let Some(points) = blob.points.digest() {
        id(&mut said, &points);
    }
    for chunk in &blob.chunks {
        id(&mut said, &chunk.digest);
        number(&mut said, chunk.number.into());
        number(&mut said, chunk.stored.0);
        number(&mut said, chunk.stored_size.into());
        number(&mut said, chunk.decoded.0);
        number(&mut said, chunk.decoded_size.into());
        if let Some(part) = chunk.part {
            // Unambiguous: the next chunk begins with an algorithm's name.
            said.extend_from_slice(b"batch");
            number(&mut said, part.offset.into());
            number(&mut said, part.size.into());
        }
        if said.len() >= SAID {
            hasher.update(&said);
            said.clear();
        }
    }
    hasher.update(&said);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use lazuli_image::{Points, Stored, chunk::Part, points::NewPoint};

    use super::*;

    type Change = fn(&mut Blob);

    fn blob() -> Blob {
        let chunk = |number, stored, stored_size, decoded, decoded_size| Chunk {
            number,
            digest: Digest::blake3([number as u8; 32]),
            stored: Stored(stored),
            stored_size,
            decoded: Decoded(decoded),
            decoded_size,
            part: None,
        };
        Blob {
            id: Digest::sha256([1; 32]),
            codec: Codec::Zstd,
            points: Points::default(),
            stored_size: 1000,
            decoded_size: 20_480,
            chunks: vec![
                chunk(0, 0, 100, 0, 5000),
                chunk(1, 100, 50, 8192, 50),
                chunk(3, 200, 800, 16384, 4096),
            ]
            .into(),
        }
    }

    #[test]
    fn finds_the_chunks_of_a_range() {
        let layout = Layout::new(&blob()).unwrap();
        for (range, expected) in [
            (0..1, 0..1),
            (4999..5000, 0..1),
            (5000..8192, 0..1),
            (0..20_480, 0..3),
            (4999..8193, 0..2),
            (8242..16_385, 1..3),
            (12_288..16_385, 2..3),
            (20_479..20_480, 2..3),
            (100..100, 0..1),
        ] {
            let decoded = Decoded(range.start)..Decoded(range.end);
            assert_eq!(layout.chunks_in(&decoded), expected, "{range:?}");
        }
    }

    #[test]
    fn bytes_outside_of_chunks_are_known() {
        let layout = Layout::new(&blob()).unwrap();
        // Chunks have 0 to 8192, 8192 to 12288 and 16384 to 20480, up to the next block.
        for (range, expected) in [
            (0..12_288, true),
            (5000..8192, true),
            (0..0, true),
            (16_384..20_480, true),
            (0..12_289, false),
            (12_288..16_384, false),
            (12_288..12_288, true),
            (8192..20_480, false),
        ] {
            let decoded = Decoded(range.start)..Decoded(range.end);
            assert_eq!(layout.covers(&decoded), expected, "{range:?}");
        }
    }

    #[test]
    fn unreliable_file_systems_are_refused() {
        let spoil: [(&str, Change); 13] = [
            ("behind the batch", |blob| blob.chunks[1].part = Some(Part { offset: 1, size: 50 })),
            ("a batch of 17 MiB", |blob| {
                blob.chunks[1].part = Some(Part { offset: 0, size: 17 << 20 })
            }),
            ("overlap in a batch", |blob| {
                blob.chunks[0].part = Some(Part { offset: 0, size: 6000 });
                blob.chunks[1].part = Some(Part { offset: 4999, size: 6000 });
                (blob.chunks[1].stored, blob.chunks[1].stored_size) = (Stored(0), 100);
            }),
            ("no bytes", |blob| blob.chunks[0].decoded_size = 0),
            ("17 MiB", |blob| blob.chunks[2].decoded_size = 17 << 20),
            ("no stored bytes", |blob| blob.chunks[0].stored_size = 0),
            ("33 MiB stored", |blob| blob.chunks[2].stored_size = 33 << 20),
            ("between blocks", |blob| blob.chunks[1].decoded = Decoded(8193)),
            ("overlap decoded", |blob| blob.chunks[1].decoded = Decoded(4096)),
            ("overlap stored", |blob| blob.chunks[1].stored = Stored(99)),
            ("behind stored end", |blob| blob.stored_size = 999),
            ("behind decoded end", |blob| blob.decoded_size = 16_384),
            ("wraps around", |blob| blob.chunks[2].decoded = Decoded(u64::MAX - 4095)),
        ];
        for (what, spoil) in spoil {
            let mut blob = blob();
            spoil(&mut blob);
            assert!(Layout::new(&blob).is_err(), "{what}");
        }
    }

    /// Two chunks behind a point, and one behind another that overlaps.
    fn pieces() -> Blob {
        let mut blob = blob();
        blob.codec = Codec::Gzip;
        let places = [(0, 100, 0), (0, 200, 6000), (150, 300, 0)];
        for (chunk, (stored, end, offset)) in blob.chunks.iter_mut().zip(places) {
            (chunk.stored, chunk.stored_size) = (Stored(stored), (end - stored) as u32);
            chunk.part = Some(Part { offset, size: offset + chunk.decoded_size });
        }
        blob.points = points(7);
        blob
    }

    fn points(before: u8) -> Points {
        let point = |stored| NewPoint { stored: Stored(stored), bits: 1, before, window: vec![1] };
        [point(0), point(150)].into_iter().collect()
    }

    #[test]
    fn pieces_of_a_gzip_layer_overlap_and_begin_at_points() {
        let original = Layout::new(&pieces()).unwrap();
        let spoil: [(&str, Change); 6] = [
            ("no points", |blob| blob.points = Points::default()),
            ("another place", |blob| blob.chunks[2].stored = Stored(151)),
            ("begins before", |blob| {
                blob.points = points(7);
                blob.chunks[0].stored = Stored(150);
            }),
            ("ends before", |blob| blob.chunks[2].stored_size = 20),
            ("overlap in the piece", |blob| {
                blob.chunks[1].part = Some(Part { offset: 4999, size: 6050 });
            }),
            ("zstd", |blob| blob.codec = Codec::Zstd),
        ];
        for (what, spoil) in spoil {
            let mut blob = pieces();
            spoil(&mut blob);
            assert!(Layout::new(&blob).is_err(), "{what}");
        }
        // An image with another description of a point shares no bytes with others.
        let other = Blob { points: points(6), ..pieces() };
        assert_ne!(Layout::new(&other).unwrap().key(), original.key());
    }

    #[test]
    fn any_difference_is_another_layout() {
        let original = Layout::new(&blob()).unwrap().key();
        let changes: [Change; 6] = [
            |blob| blob.chunks[1].part = Some(Part { offset: 0, size: 50 }),
            |blob| blob.codec = Codec::Lz4,
            |blob| blob.chunks[2].digest.hash[31] ^= 1,
            |blob| blob.chunks[1].stored.0 += 1,
            |blob| blob.chunks[2].number = 2,
            |blob| blob.chunks.to_mut().truncate(2),
        ];
        for change in changes {
            let mut blob = blob();
            change(&mut blob);
            assert_ne!(Layout::new(&blob).unwrap().key(), original);
        }
    }
}
