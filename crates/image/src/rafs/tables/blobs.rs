//! The blob table.

use zerocopy::FromBytes as _;

use super::{
    super::{
        BlobRecord, IndexBlob, TailInfo, ci,
        layout::{
            BlobEntry, DEVICE_TABLE_OFFSET, EMBEDDED_ID, MAX_CHUNKS, MAX_CI_V2, Origin, features,
        },
    },
    chunks::NO_DIGEST,
};
use crate::{
    Algorithm, BLOCK_SIZE, Blob, ChunkList, Codec, Digest, FormatError, Points, Problem,
    erofs::{
        layout::{DEVICE_SLOT_SIZE, DeviceSlot},
        reader::{slice, structure},
    },
};

/// Limits of the format on the size of a blob, in bytes.
pub(in crate::rafs) const MAX_STORED: u64 = 1 << 40;
const MAX_DECODED: u64 = 1 << 44;

/// Fields of the superblocks that concern every blob.
#[derive(Clone, Copy)]
pub(super) struct Common {
    pub(super) chunk_size: u32,
    pub(super) digest: Algorithm,
    pub(super) origin: Origin,
}

/// Parses the blob table at this offset, with this number of entries. Each record comes with the
/// algorithm of the blob's chunk digests.
pub(super) fn parse(
    bytes: &[u8],
    (table, size): (u64, u64),
    common: Common,
) -> Result<Vec<(BlobRecord, Algorithm)>, FormatError> {
    let rows = slice(bytes, table, size, || "blob table".into())?;
    let mut records: Vec<(BlobRecord, Algorithm)> = Vec::new();
    for (index, row) in rows.chunks_exact(size_of::<BlobEntry>()).enumerate() {
        let at = table + (index * size_of::<BlobEntry>()) as u64;
        let entry = BlobEntry::read_from_bytes(row).expect("chunks_exact gives whole rows");
        let slot_at = DEVICE_TABLE_OFFSET + index as u64 * DEVICE_SLOT_SIZE;
        let slot: DeviceSlot = structure(bytes, slot_at, || ("device slot", index).into())?;
        let found = blob(&entry, index, common, &slot)
            .map_err(|problem| FormatError::new(("blob table entry", index), at, problem))?;
        let id = found.0.blob.id;
        if records.iter().any(|(other, _)| other.blob.id == id) {
            let problem = format!("the second blob {id}");
            return Err(FormatError::new(("blob table entry", index), at, problem));
        }
        records.push(found);
    }
    let tails = records.iter().map(|(record, _)| &record.tail);
    let v2 = tails.filter(|tail| tail.features & features::CHUNK_INFO_V2 != 0);
    // At most 254 numbers, each limited already.
    let v2_size: u64 = v2.map(|tail| tail.ci_size).sum();
    if v2_size > MAX_CI_V2 {
        let problem = format!("{v2_size} bytes of chunk information; the limit is {MAX_CI_V2}");
        return Err(FormatError::new("blob table", table, problem));
    }
    Ok(records)
}

/// Refuses blobs with features, of the blob table, that are not supported.
pub(in crate::rafs) fn refuse_features(bits: u32) -> Result<(), Problem> {
    for (bit, what) in [
        (features::TARFS, "tarfs, which has no digests of chunks,"),
        (features::ENCRYPTED, "encryption"),
        (features::EXTERNAL, "external content"),
        (features::SEPARATED_PREFETCH, "a separate prefetch blob"),
        (0xf000, "an unknown feature"),
    ] {
        if bits & bit != 0 {
            return Err(Problem::unsupported("features", bits, what));
        }
    }
    Ok(())
}

fn blob(
    entry: &BlobEntry,
    index: usize,
    Common { chunk_size, digest, origin }: Common,
    slot: &DeviceSlot,
) -> Result<(BlobRecord, Algorithm), Problem> {
    let bits = entry.features.get();
    refuse_features(bits)?;
    if bits & features::ALIGNED == 0 {
        return Err(format!("features {bits:#x}: chunks that are not aligned to blocks").into());
    }
    let id = if entry.id == EMBEDDED_ID {
        return Err("a bootstrap embedded in its blob does not know the blob's id".into());
    } else {
        parse_id(&entry.id).ok_or("the blob id is not 64 lower-case hex digits")?
    };
    let codec = |number: u32| {
        let problem = || Problem::Unsupported(format!("compressor {number}").into());
        Codec::from_number(number).ok_or_else(problem)
    };
    let is_seekable = origin == Origin::Seekable;
    let blob_codec = match entry.compressor.get() {
        number if is_seekable && number == Codec::ZstdLayer as u32 => Codec::ZstdLayer,
        number => codec(number)?,
    };
    let ci_codec = codec(entry.ci_compressor.get())?;
    let is_separate = bits & features::SEPARATE != 0;
    match blob_codec {
        Codec::Gzip if !is_separate && !is_seekable || origin == Origin::V5 => {
            return Err("gzip chunks are supported in unconverted layers only".into());
        }
        Codec::None | Codec::Lz4 | Codec::Zstd if is_separate || bits & features::ZRAN != 0 => {
            let problem = "an index of a blob that is compressed with";
            return Err(format!("features {bits:#x}: {problem} {blob_codec}").into());
        }
        _ => {}
    }
    let count = entry.chunk_count.get();
    let decoded_size = entry.decoded_size.get();
    let ci_size = entry.ci_size.get();
    let ci_size_fits = match origin {
        // Blobs of v5 end with their chunks.
        Origin::V5 => ci_size == 0,
        // Layers with their own table of contents have no index.
        Origin::Seekable if !is_separate => ci_size == 0,
        Origin::V6 | Origin::Seekable => ci::size_fits(bits, count, ci_size),
    };
    let own_digest = match entry.digester.get() {
        0 => Some(Algorithm::Blake3),
        1 => Some(Algorithm::Sha256),
        _ => None,
    };
    let own_digest = own_digest.filter(|own| is_seekable || *own == digest).ok_or("bad digest")?;
    let facts = [
        ("index", entry.index.get() as usize == index),
        ("chunk size", entry.chunk_size.get() == chunk_size),
        ("cipher", entry.cipher.get() == 0),
        ("device tag", slot.tag == entry.id),
        ("number of chunks", (1..=MAX_CHUNKS).contains(&count)),
        ("stored size", (1..=MAX_STORED).contains(&entry.stored_size.get())),
        ("decoded size", (1..=MAX_DECODED).contains(&decoded_size)),
        ("decoded size", decoded_size.is_multiple_of(BLOCK_SIZE)),
        ("device size", u64::from(slot.blocks.get()) == decoded_size / BLOCK_SIZE),
        ("chunk information size", ci_size_fits),
        ("chunk information size", entry.ci_stored_size.get() <= ci_size),
        ("chunk information offset", entry.ci_offset.get() <= MAX_STORED),
        ("chunk information compressor", ci_codec != Codec::Gzip),
        ("size of its index", !is_separate || entry.meta_size.get() <= MAX_STORED),
    ];
    for (field, holds) in facts {
        if !holds {
            return Err(format!("bad {field}").into());
        }
    }
    let toc_size = entry.toc_size.get();
    let tail = TailInfo {
        features: bits,
        chunk_count: count,
        ci_offset: entry.ci_offset.get(),
        ci_stored_size: entry.ci_stored_size.get(),
        ci_size,
        ci_codec,
        toc_size,
        toc_digest: (toc_size != 0).then(|| Digest::sha256(entry.toc_digest)),
        index: (is_separate && entry.meta_digest != NO_DIGEST).then(|| IndexBlob {
            digest: Digest::sha256(entry.meta_digest),
            size: entry.meta_size.get(),
        }),
    };
    let stored_size = entry.stored_size.get();
    let chunks = ChunkList::default();
    let points = Points::default();
    let blob = Blob { id, codec: blob_codec, points, stored_size, decoded_size, chunks };
    Ok((BlobRecord { blob, tail }, own_digest))
}

/// The number of a digest algorithm in the blob table.
pub(in crate::rafs) const fn digester(algorithm: Algorithm) -> u32 {
    match algorithm {
        Algorithm::Blake3 => 0,
        Algorithm::Sha256 => 1,
    }
}

pub(in crate::rafs) fn parse_id(id: &[u8]) -> Option<Digest> {
    Digest::from_hex(Algorithm::Sha256, std::str::from_utf8(id).ok()?)
}
