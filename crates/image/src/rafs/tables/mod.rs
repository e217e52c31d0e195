//! Parses and validates superblocks and tables.

mod blobs;
mod chunks;
mod superblock;

use super::{
    TailInfo,
    layout::{
        BlobEntry, CHUNK_SIZES, ChunkEntry, DEVICE_TABLE_OFFSET, EXTENDED_OFFSET,
        ExtendedSuperBlock, MAX_ROWS, Origin,
    },
};
use crate::{
    Algorithm, BLOCK_SIZE, Blob, BlobIndex, FormatError, Problem, Structure,
    chunk::MAX_UNIT,
    erofs::{
        Nid,
        layout::DEVICE_SLOT_SIZE,
        reader::{Geometry, slice, structure},
    },
};

use self::blobs::Common;
pub(super) use self::{
    blobs::{MAX_STORED, digester, parse_id, refuse_features},
    chunks::{NO_DIGEST, is_unplaced, refuse_chunk_flags, validate_chunk, validate_order},
    superblock::{flags_digest, superblock},
};

/// Everything in front of the inodes, checked.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) geometry: Geometry,
    pub(super) root: Nid,
    pub(super) inode_count: u64,
    pub(super) digest: Algorithm,
    /// What computes the digests of chunks, for each blob.
    pub(super) digests: Vec<Algorithm>,
    pub(super) blobs: Vec<Blob>,
    pub(super) tails: Vec<TailInfo>,
    /// Blobs with chunks that only their CI tables place.
    pub(super) unplaced: Vec<BlobIndex>,
    pub(super) prefetch: Vec<Nid>,
    /// The source of the bootstrap.
    pub(super) origin: Origin,
}

/// Parses the tables of `bytes`.
pub(super) fn parse(bytes: &[u8]) -> Result<Tables, FormatError> {
    let (mut tables, chunk_table) = parse_blobs(bytes)?;
    let Tables { blobs, tails, digests, geometry, origin, .. } = &mut tables;
    let rows = rows(bytes, chunk_table)?;
    let largest = largest_chunk(*origin, geometry.chunk_size);
    tables.unplaced = chunks::distribute(blobs, tails, digests, largest, chunk_table.0, rows)?;
    Ok(tables)
}

/// The largest chunk in bytes of an image with this chunk size.
pub(super) const fn largest_chunk(origin: Origin, chunk_size: u32) -> u32 {
    match origin {
        Origin::Seekable => MAX_UNIT,
        Origin::V5 | Origin::V6 => chunk_size,
    }
}

/// The rows of the chunk table, by its offset and size.
pub(super) fn rows(bytes: &[u8], (at, size): (u64, u64)) -> Result<&[u8], FormatError> {
    slice(bytes, at, size, || "chunk table".into())
}

/// Returns the number of rows that the superblock gives for the chunk table of `bytes`. Nothing
/// else is checked.
pub fn chunk_rows(bytes: &[u8]) -> Result<u64, FormatError> {
    let ext: ExtendedSuperBlock =
        structure(bytes, EXTENDED_OFFSET, || "extended superblock".into())?;
    Ok(ext.chunk_table_size.get() / size_of::<ChunkEntry>() as u64)
}

/// Parses everything but the chunk table. Returns the place of that table as well.
pub(super) fn parse_blobs(bytes: &[u8]) -> Result<(Tables, (u64, u64)), FormatError> {
    let sb = superblock(bytes)?;
    let object = || Structure::Only("extended superblock");
    let ext: ExtendedSuperBlock = structure(bytes, EXTENDED_OFFSET, object)?;
    let error = |problem: Problem| FormatError::new(object(), EXTENDED_OFFSET, problem);

    let flags = ext.flags.get();
    let digest = flags_digest(flags).map_err(error)?;
    let chunk_size = ext.chunk_size.get();
    if !chunk_size.is_power_of_two() || !CHUNK_SIZES.contains(&chunk_size) {
        return Err(error(format!("chunk size {chunk_size}").into()));
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
        return Err(error(Problem::TooMany { what: "chunks", found: chunks, limit: MAX_ROWS }));
    }
    if blob_table.1 / size_of::<BlobEntry>() as u64 != u64::from(devices) {
        let problem = format!("{devices} devices, {} bytes of blob table", blob_table.1);
        return Err(error(problem.into()));
    }
    if !blob_table.0.is_multiple_of(BLOCK_SIZE) || !chunk_table.0.is_multiple_of(BLOCK_SIZE) {
        return Err(error("a table does not start on a block border".into()));
    }
    let mut occupied = vec![(0, devices_end), blob_table, chunk_table, prefetch_table];
    occupied.retain(|(_, size)| *size != 0);
    occupied.sort_unstable();
    // The slices below check that every table ends in the file, so these sums cannot overflow then.
    if occupied.windows(2).any(|pair| pair[0].0.saturating_add(pair[0].1) > pair[1].0) {
        return Err(error(Problem::Overlap("tables".into())));
    }

    let origin = Origin::of_label(&sb.volume_name);
    let image = Common { chunk_size, digest, origin };
    let records = blobs::parse(bytes, blob_table, image)?;
    let digests = records.iter().map(|(_, digest)| *digest).collect();
    let (blobs, tails) = records.into_iter().map(|(record, _)| (record.blob, record.tail)).unzip();

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
        digests,
        blobs,
        tails,
        unplaced: Vec::new(),
        prefetch,
        origin,
    };
    Ok((tables, chunk_table))
}
