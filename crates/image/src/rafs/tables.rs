//! Parses and validates superblocks and tables.

use std::collections::BTreeSet;

use zerocopy::FromBytes;

use super::{
    BlobRecord, IndexBlob, TailInfo, ci,
    layout::{
        self, BlobEntry, CHUNK_SIZES, ChunkEntry, DEVICE_TABLE_OFFSET, EMBEDDED_ID,
        EXTENDED_OFFSET, ExtendedSuperBlock, MAX_CHUNKS, MAX_CI_V2, MAX_ROWS, V5_LABEL,
        chunk_flags, features, flags,
    },
    v5::layout::is_v5,
};
use crate::{
    Algorithm, BLOCK_SIZE, Blob, BlobIndex, Chunk, ChunkList, Codec, Decoded, Digest, FormatError,
    Points, Stored,
    chunk::MAX_UNIT,
    erofs::{
        Nid,
        layout::{
            BLOCK_BITS, COMPAT_RAFS_V6, DEVICE_SLOT, DEVICE_SLOT_SIZE, DeviceSlot,
            INCOMPAT_CHUNKED_FILE, INCOMPAT_DEVICE_TABLE, MAX_DEVICES, SUPERBLOCK_MAGIC,
            SUPERBLOCK_OFFSET, SuperBlock,
        },
        reader::{Geometry, slice, structure},
    },
};

/// Limits of the format on the size of a blob, in bytes.
pub(super) const MAX_STORED: u64 = 1 << 40;
const MAX_DECODED: u64 = 1 << 44;

/// What upstream's tarfs mode writes where a chunk's digest belongs. No content has this digest.
pub(super) const NO_DIGEST: [u8; 32] = [0; 32];

/// Everything in front of the inodes, checked.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) geometry: Geometry,
    pub(super) root: Nid,
    pub(super) inode_count: u64,
    pub(super) digest: Algorithm,
    pub(super) blobs: Vec<Blob>,
    pub(super) tails: Vec<TailInfo>,
    /// Blobs with chunks that only their CI tables place.
    pub(super) unplaced: Vec<BlobIndex>,
    pub(super) prefetch: Vec<Nid>,
    /// Whether the image was one of RAFS v5.
    pub(super) v5: bool,
}

/// Parses the tables of `bytes`.
pub(super) fn parse(bytes: &[u8]) -> Result<Tables, FormatError> {
    let (mut tables, chunk_table) = parse_blobs(bytes)?;
    chunks(&mut tables, chunk_table, rows(bytes, chunk_table)?)?;
    Ok(tables)
}

/// The rows of the chunk table, which is at this byte and has so many.
pub(super) fn rows(bytes: &[u8], (at, size): (u64, u64)) -> Result<&[u8], FormatError> {
    slice(bytes, at, size, || "chunk table".into())
}

/// How many rows the chunk table of `bytes` has, as it says itself; nothing else of it is looked
/// at.
pub fn chunk_rows(bytes: &[u8]) -> Result<u64, FormatError> {
    let ext: ExtendedSuperBlock =
        structure(bytes, EXTENDED_OFFSET, || "extended superblock".to_owned())?;
    Ok(ext.chunk_table_size.get() / size_of::<ChunkEntry>() as u64)
}

/// Parses all but the chunk table, and says where that is.
pub(super) fn parse_blobs(bytes: &[u8]) -> Result<(Tables, (u64, u64)), FormatError> {
    let sb = superblock(bytes)?;
    let object = || "extended superblock".to_owned();
    let ext: ExtendedSuperBlock = structure(bytes, EXTENDED_OFFSET, object)?;
    let error = |problem: String| FormatError::new(object(), EXTENDED_OFFSET, problem);

    let flags = ext.flags.get();
    let digest = flags_digest(flags).map_err(error)?;
    let chunk_size = ext.chunk_size.get();
    if !chunk_size.is_power_of_two() || !CHUNK_SIZES.contains(&chunk_size) {
        return Err(error(format!("chunk size {chunk_size}")));
    }
    let devices = sb.device_count.get();
    let devices_end = DEVICE_TABLE_OFFSET + u64::from(devices) * DEVICE_SLOT_SIZE;
    let blob_table = (ext.blob_table_offset.get(), u64::from(ext.blob_table_size.get()));
    let chunk_table = (ext.chunk_table_offset.get(), ext.chunk_table_size.get());
    let prefetch_table =
        (ext.prefetch_table_offset.get(), u64::from(ext.prefetch_table_size.get()));
    let rows = |(_, size): (u64, u64), row: usize| size.is_multiple_of(row as u64);
    if !rows(blob_table, size_of::<BlobEntry>())
        || !rows(chunk_table, size_of::<ChunkEntry>())
        || !rows(prefetch_table, 4)
    {
        return Err(error("a table does not have a whole number of rows".into()));
    }
    let chunks = chunk_table.1 / size_of::<ChunkEntry>() as u64;
    if chunks > MAX_ROWS {
        return Err(error(format!("{chunks} chunks, at most {MAX_ROWS} are possible")));
    }
    if blob_table.1 / size_of::<BlobEntry>() as u64 != u64::from(devices) {
        return Err(error(format!("{devices} devices, {} bytes of blob table", blob_table.1)));
    }
    if !blob_table.0.is_multiple_of(BLOCK_SIZE) || !chunk_table.0.is_multiple_of(BLOCK_SIZE) {
        return Err(error("a table does not start on a block border".into()));
    }
    let mut occupied = vec![(0, devices_end), blob_table, chunk_table, prefetch_table];
    occupied.retain(|(_, size)| *size != 0);
    occupied.sort_unstable();
    // The slices below check that every table ends in the file, so these sums cannot overflow then.
    if occupied.windows(2).any(|pair| pair[0].0.saturating_add(pair[0].1) > pair[1].0) {
        return Err(error("tables overlap".into()));
    }

    let v5 = sb.volume_name == V5_LABEL;
    let blob_rows = slice(bytes, blob_table.0, blob_table.1, || "blob table".into())?;
    let mut blobs = Vec::new();
    let mut tails = Vec::new();
    for (index, row) in blob_rows.chunks_exact(size_of::<BlobEntry>()).enumerate() {
        let at = blob_table.0 + (index * size_of::<BlobEntry>()) as u64;
        let entry = BlobEntry::read_from_bytes(row).expect("chunks_exact gives whole rows");
        let slot_at = DEVICE_TABLE_OFFSET + index as u64 * DEVICE_SLOT_SIZE;
        let slot: DeviceSlot = structure(bytes, slot_at, || format!("device slot {index}"))?;
        let found = blob(&entry, index, chunk_size, digest, v5, &slot).map_err(|problem| {
            FormatError::new(format!("blob table entry {index}"), at, problem)
        })?;
        if blobs.iter().any(|other: &Blob| other.id == found.blob.id) {
            let problem = format!("the second blob {}", found.blob.id);
            return Err(FormatError::new(format!("blob table entry {index}"), at, problem));
        }
        blobs.push(found.blob);
        tails.push(found.tail);
    }

    let v2 = tails.iter().filter(|tail| tail.features & features::CHUNK_INFO_V2 != 0);
    // At most 254 numbers, each limited already.
    let v2_size: u64 = v2.map(|tail| tail.ci_size).sum();
    if v2_size > MAX_CI_V2 {
        let problem = format!("{v2_size} bytes of chunk information; the limit is {MAX_CI_V2}");
        return Err(FormatError::new("blob table", blob_table.0, problem));
    }

    let rows = slice(bytes, prefetch_table.0, prefetch_table.1, || "prefetch table".into())?;
    let nids = rows.chunks_exact(4).map(|nid| u32::from_le_bytes([nid[0], nid[1], nid[2], nid[3]]));
    let prefetch = nids.take_while(|nid| *nid != 0).map(|nid| Nid(nid.into())).collect();

    let tables = Tables {
        geometry: Geometry {
            meta: u64::from(sb.meta_block.get()) * BLOCK_SIZE,
            epoch: sb.epoch.get().cast_signed(),
            fixed_nanoseconds: sb.fixed_nanoseconds.get(),
            chunk_size,
        },
        root: Nid(sb.root_nid.get().into()),
        inode_count: sb.inode_count.get(),
        digest,
        blobs,
        tails,
        unplaced: Vec::new(),
        prefetch,
        v5,
    };
    Ok((tables, chunk_table))
}

/// Parses and validates the superblock of EROFS.
pub(super) fn superblock(bytes: &[u8]) -> Result<SuperBlock, FormatError> {
    let object = || "superblock".to_owned();
    let fail = |problem: String| Err(FormatError::new(object(), SUPERBLOCK_OFFSET, problem));
    if is_v5(bytes) {
        return Err(FormatError::new(object(), 0, "RAFS v5, expected v6"));
    }
    let sb: SuperBlock = structure(bytes, SUPERBLOCK_OFFSET, object)?;
    if sb.magic.get() != SUPERBLOCK_MAGIC {
        return fail(format!("magic {:#x}: not an EROFS image", sb.magic));
    }
    if sb.feature_compat.get() & COMPAT_RAFS_V6 == 0 {
        return fail("an EROFS image, but not a RAFS v6 bootstrap".into());
    }
    if sb.block_bits == 9 {
        return fail("tarfs (blocks of 512 bytes, chunks without digests) is not supported".into());
    }
    let expected = INCOMPAT_CHUNKED_FILE | INCOMPAT_DEVICE_TABLE;
    if sb.feature_incompat.get() != expected {
        return fail(format!("features {:#x}, expected {expected:#x}", sb.feature_incompat));
    }
    let fixed = [
        ("block bits", u64::from(sb.block_bits), u64::from(BLOCK_BITS)),
        ("checksum", sb.checksum.get().into(), 0),
        ("extension slots", sb.extension_slots.into(), 0),
        ("shared xattr block", sb.xattr_block.get().into(), 0),
        ("compression algorithms", sb.compression.get().into(), 0),
        ("device slot", sb.device_slot.get().into(), DEVICE_SLOT.into()),
    ];
    for (field, found, expected) in fixed {
        if found != expected {
            return fail(format!("{field} {found}, expected {expected}"));
        }
    }
    if usize::from(sb.device_count.get()) > MAX_DEVICES {
        return fail(format!("{} blobs, at most {MAX_DEVICES} are possible", sb.device_count));
    }
    if sb.root_nid.get() == 0 || sb.inode_count.get() == 0 {
        return fail("no root directory".into());
    }
    if !(bytes.len() as u64).is_multiple_of(BLOCK_SIZE) {
        let problem = format!("{} bytes are not a whole number of blocks", bytes.len());
        return Err(FormatError::new("bootstrap", 0, problem));
    }
    Ok(sb)
}

/// The chunk digest algorithm, if `bits` have nothing that is unsupported or contradictory.
pub(super) fn flags_digest(bits: u64) -> Result<Algorithm, String> {
    for (bit, what) in [
        (flags::TARFS, "tarfs, which has no digests of chunks,"),
        (flags::ENCRYPTION_AES, "encryption"),
        (!flags::KNOWN, "an unknown feature"),
    ] {
        if bits & bit != 0 {
            return Err(format!("flags {bits:#x}: {what} is not supported"));
        }
    }
    let compressors = flags::COMPRESSOR_NONE
        | flags::COMPRESSOR_LZ4
        | flags::COMPRESSOR_GZIP
        | flags::COMPRESSOR_ZSTD;
    if (bits & compressors).count_ones() != 1 {
        return Err(format!("flags {bits:#x} do not name one compressor"));
    }
    match bits & (flags::DIGEST_BLAKE3 | flags::DIGEST_SHA256) {
        flags::DIGEST_BLAKE3 => Ok(Algorithm::Blake3),
        flags::DIGEST_SHA256 => Ok(Algorithm::Sha256),
        _ => Err(format!("flags {bits:#x} do not name one digest")),
    }
}

/// Refuses blobs with features, of the blob table, that are not supported.
pub(super) fn refuse_features(bits: u32) -> Result<(), String> {
    for (bit, what) in [
        (features::TARFS, "tarfs, which has no digests of chunks,"),
        (features::ENCRYPTED, "encryption"),
        (features::EXTERNAL, "external content"),
        (features::SEPARATED_PREFETCH, "a separate prefetch blob"),
        (0xf000, "an unknown feature"),
    ] {
        if bits & bit != 0 {
            return Err(format!("features {bits:#x}: {what} is not supported"));
        }
    }
    Ok(())
}

fn blob(
    entry: &BlobEntry,
    index: usize,
    chunk_size: u32,
    digest: Algorithm,
    v5: bool,
    slot: &DeviceSlot,
) -> Result<BlobRecord, String> {
    let bits = entry.features.get();
    refuse_features(bits)?;
    if bits & features::ALIGNED == 0 {
        return Err(format!("features {bits:#x}: chunks that are not aligned to blocks"));
    }
    let id = if entry.id == EMBEDDED_ID {
        return Err("a bootstrap embedded in its blob does not know the blob's id".to_owned());
    } else {
        parse_id(&entry.id).ok_or("the blob id is not 64 lower-case hex digits")?
    };
    let codec = |number: u32| {
        Codec::from_number(number).ok_or_else(|| format!("compressor {number} is not supported"))
    };
    let blob_codec = codec(entry.compressor.get())?;
    let ci_codec = codec(entry.ci_compressor.get())?;
    let is_separate = bits & features::SEPARATE != 0;
    match blob_codec {
        Codec::Gzip if !is_separate || v5 => {
            return Err("gzip chunks are supported in layers that nobody converted only".into());
        }
        Codec::None | Codec::Lz4 | Codec::Zstd if is_separate || bits & features::ZRAN != 0 => {
            return Err(format!(
                "features {bits:#x}: an index of a blob that is compressed with {blob_codec}"
            ));
        }
        _ => {}
    }
    let count = entry.chunk_count.get();
    let decoded_size = entry.decoded_size.get();
    let ci_size = entry.ci_size.get();
    // Blobs of v5 end with their chunks.
    let ci_size_fits = if v5 { ci_size == 0 } else { ci::size_fits(bits, count, ci_size) };
    let facts = [
        ("index", entry.index.get() as usize == index),
        ("chunk size", entry.chunk_size.get() == chunk_size),
        ("digest", entry.digester.get() == digester(digest)),
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
            return Err(format!("bad {field}"));
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
    Ok(BlobRecord { blob, tail })
}

/// The number of a digest algorithm in the blob table.
pub(super) const fn digester(algorithm: Algorithm) -> u32 {
    match algorithm {
        Algorithm::Blake3 => 0,
        Algorithm::Sha256 => 1,
    }
}

pub(super) fn parse_id(id: &[u8]) -> Option<Digest> {
    Digest::from_hex(Algorithm::Sha256, std::str::from_utf8(id).ok()?)
}

/// Distributes the rows of the chunk table, which lies there, over the blobs.
fn chunks(tables: &mut Tables, (table, _): (u64, u64), rows: &[u8]) -> Result<(), FormatError> {
    let Tables { blobs, tails, digest, geometry, .. } = tables;
    let mut unplaced = BTreeSet::new();
    // Counted first: lists that grow have room for twice of what is in them.
    let mut counts = vec![0; blobs.len()];
    for row in rows.chunks_exact(size_of::<ChunkEntry>()) {
        let entry = ChunkEntry::read_from_bytes(row).expect("chunks_exact gives whole rows");
        if let Some(count) = counts.get_mut(entry.blob.get() as usize) {
            *count += 1;
        }
    }
    let mut lists: Vec<Vec<Chunk>> = counts.into_iter().map(Vec::with_capacity).collect();
    for (index, row) in rows.chunks_exact(size_of::<ChunkEntry>()).enumerate() {
        let entry = ChunkEntry::read_from_bytes(row).expect("chunks_exact gives whole rows");
        let error = |problem: String| {
            let at = table + (index * size_of::<ChunkEntry>()) as u64;
            FormatError::new(format!("chunk table entry {index}"), at, problem)
        };
        let blob_index = entry.blob.get() as usize;
        let Some(blob) = blobs.get(blob_index) else {
            return Err(error(format!("blob {blob_index} does not exist")));
        };
        let tail = &tails[blob_index];
        let flags = entry.flags.get();
        refuse_chunk_flags(flags).map_err(error)?;
        let hash = entry.digest;
        let number = entry.number.get();
        if hash == NO_DIGEST {
            let blob = blob.id;
            return Err(error(format!(
                "chunk {number} of blob {blob} has no digest, so nobody could check its bytes"
            )));
        }
        let in_unit = flags & chunk_flags::BATCH != 0;
        if in_unit && !tail.has_units() {
            return Err(error(format!("flags {flags:#x}: blob {blob_index} has no such units")));
        }
        if is_unplaced(&entry, tail) {
            unplaced.insert(blob_index);
            continue;
        }
        let chunk = Chunk {
            number,
            digest: Digest { algorithm: *digest, hash },
            stored: Stored(entry.stored.get()),
            stored_size: entry.stored_size.get(),
            decoded: Decoded(entry.decoded.get()),
            decoded_size: entry.decoded_size.get(),
            part: in_unit.then(|| layout::from_in_unit(entry.file_offset.get())),
        };
        validate_chunk(&chunk, blob, tail, geometry.chunk_size).map_err(error)?;
        lists[blob_index].push(chunk);
    }
    for (index, (blob, mut chunks)) in blobs.iter_mut().zip(lists).enumerate() {
        chunks.sort_unstable_by_key(|chunk| chunk.number);
        validate_order(blob, &chunks).map_err(|problem| {
            FormatError::new("chunk table", table, format!("blob {index}: {problem}"))
        })?;
        blob.chunks = chunks.into();
    }
    // There are fewer blobs than 256.
    tables.unplaced = unplaced.into_iter().map(|blob| BlobIndex(blob as u8)).collect();
    Ok(())
}

/// Whether the row of a chunk of a blob with this tail leaves out in which unit it is stored, as
/// upstream does. A chunk of a gzip layer cannot be anywhere else.
pub(super) fn is_unplaced(row: &ChunkEntry, tail: &TailInfo) -> bool {
    tail.has_units()
        && row.flags.get() & chunk_flags::BATCH == 0
        && (tail.has_contexts() || row.stored_size.get() == 0)
}

/// Refuses chunks with flags, of the chunk table, that are not supported.
pub(super) fn refuse_chunk_flags(bits: u32) -> Result<(), String> {
    for (bit, what) in
        [(chunk_flags::HOLE, "a hole in place of a chunk"), (chunk_flags::ENCRYPTED, "encryption")]
    {
        if bits & bit != 0 {
            return Err(format!("flags {bits:#x}: {what} is not supported"));
        }
    }
    Ok(())
}

/// Whether `chunks` of `blob` ascend in number and in both offsets.
pub(super) fn validate_order(blob: &Blob, chunks: &[Chunk]) -> Result<(), String> {
    for pair in chunks.windows(2) {
        let (a, b) = (&pair[0], &pair[1]);
        if !blob.is_in_order(a, b) {
            return Err(format!("chunks {} and {} overlap", a.number, b.number));
        }
    }
    Ok(())
}

/// Whether `chunk` can be a chunk of `blob`, whatever its neighbours are.
pub(super) fn validate_chunk(
    chunk: &Chunk,
    blob: &Blob,
    tail: &TailInfo,
    chunk_size: u32,
) -> Result<(), String> {
    // Of gzip layers any stored size may be that of a piece; before chunks are placed nothing is
    // known.
    let (in_context, is_unplaced) = match chunk.part {
        Some(_) => (tail.has_contexts(), false),
        None => (tail.has_contexts(), tail.has_contexts()),
    };
    let stored_sizes = match (is_unplaced, in_context) {
        (true, _) => 0..=u32::MAX,
        (_, true) => 1..=2 * MAX_UNIT,
        _ => 1..=chunk.unit_size(),
    };
    let raw_only = matches!(blob.codec, Codec::None | Codec::Gzip) && !in_context;
    let end = |offset: u64, size: u32| offset.checked_add(size.into());
    let fits = |end: Option<u64>, limit: u64| end.is_some_and(|end| end <= limit);
    let facts = [
        ("number", chunk.number < tail.chunk_count),
        ("decoded size", (1..=chunk_size).contains(&chunk.decoded_size)),
        ("place in its unit", chunk.is_within_unit()),
        ("stored size", stored_sizes.contains(&chunk.stored_size)),
        ("stored size", !raw_only || !chunk.is_compressed()),
        ("decoded offset", chunk.decoded.0.is_multiple_of(BLOCK_SIZE)),
        ("decoded end", fits(end(chunk.decoded.0, chunk.decoded_size), blob.decoded_size)),
        ("stored end", fits(end(chunk.stored.0, chunk.stored_size), blob.stored_size)),
    ];
    match facts.iter().find(|(_, holds)| !holds) {
        Some((field, _)) => Err(format!("bad {field} in {chunk:?}")),
        None => Ok(()),
    }
}
