//! Parses and validates the superblock and the tables of blobs and inodes.

use zerocopy::{FromBytes, little_endian::U32};

use super::layout::{ExtendedBlob, MAGIC, SUPERBLOCK_SIZE, SuperBlock, VERSION};
use crate::{
    Algorithm, Codec, Digest, FormatError, Problem, Structure,
    erofs::{
        layout::MAX_DEVICES,
        reader::{slice, structure},
    },
    rafs::{
        layout::{CHUNK_SIZES, features, flags},
        tables::{MAX_STORED, flags_digest, parse_id, refuse_features},
    },
};

/// The tables of the bootstrap, without the inodes.
#[derive(Debug)]
pub(super) struct Tables<'a> {
    pub(super) chunk_size: u32,
    pub(super) digest: Algorithm,
    pub(super) codec: Codec,
    pub(super) blobs: Vec<BlobEntry>,
    /// The place of each inode, in units of 8 bytes.
    pub(super) inodes: &'a [U32],
}

/// One entry of the blob table.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlobEntry {
    pub(super) id: Digest,
    /// Bytes of the blob as stored; missing from the oldest images.
    pub(super) stored_size: Option<u64>,
}

/// Parses the tables before the inodes in `bytes`.
pub(super) fn parse(bytes: &[u8]) -> Result<Tables<'_>, FormatError> {
    let object = || Structure::Only("superblock");
    let error = |problem: Problem| FormatError::new(object(), 0, problem);
    let sb: SuperBlock = structure(bytes, 0, object)?;
    let (version, size) = (sb.version.get(), sb.size.get());
    if sb.magic != MAGIC || version != VERSION || size != SUPERBLOCK_SIZE {
        let problem = format!(
            "version {version:#x} of {size} bytes, expected {VERSION:#x} of {SUPERBLOCK_SIZE}"
        );
        return Err(error(problem.into()));
    }
    let flags = sb.flags.get();
    let digest = flags_digest(flags).map_err(error)?;
    let codec = match flags {
        bits if bits & flags::COMPRESSOR_GZIP != 0 => {
            return Err(error(Problem::unsupported("flags", bits, "gzip")));
        }
        bits if bits & flags::COMPRESSOR_LZ4 != 0 => Codec::Lz4,
        bits if bits & flags::COMPRESSOR_ZSTD != 0 => Codec::Zstd,
        _ => Codec::None,
    };
    let chunk_size = sb.chunk_size.get();
    if !chunk_size.is_power_of_two() || !CHUNK_SIZES.contains(&chunk_size) {
        return Err(error(format!("chunk size {chunk_size}").into()));
    }
    let at = sb.inode_table_offset.get();
    let size = u64::from(sb.inode_table_rows.get()) * 4;
    let rows = slice(bytes, at, size, || "inode table".into())?;
    let inodes = <[U32]>::ref_from_bytes(rows).expect("a whole number of rows");
    Ok(Tables { chunk_size, digest, codec, blobs: blobs(bytes, &sb)?, inodes })
}

/// Reads the blob table: for each blob two words about prefetching, its id, and a NUL if another
/// follows.
fn blobs(bytes: &[u8], sb: &SuperBlock) -> Result<Vec<BlobEntry>, FormatError> {
    let table = sb.blob_table_offset.get();
    let size = u64::from(sb.blob_table_size.get());
    let mut rest = slice(bytes, table, size, || "blob table".into())?;
    let at = sb.extended_blob_offset.get();
    let size = u64::from(sb.extended_blob_rows.get()) * size_of::<ExtendedBlob>() as u64;
    let extended = slice(bytes, at, size, || "extended blob table".into())?;
    let extended = <[ExtendedBlob]>::ref_from_bytes(extended).expect("a whole number of rows");

    let mut blobs = Vec::new();
    // Less than two words and an id is padding.
    while let Some((_, entry)) = rest.split_at_checked(8).filter(|(_, entry)| !entry.is_empty()) {
        let index = blobs.len();
        let error =
            |problem: Problem| FormatError::new(("blob table entry", index), table, problem);
        if index == MAX_DEVICES {
            let limit = MAX_DEVICES as u64;
            return Err(error(Problem::TooMany { what: "blobs", found: limit + 1, limit }));
        }
        let end = entry.iter().position(|byte| *byte == 0).unwrap_or(entry.len());
        let id = parse_id(&entry[..end])
            .ok_or_else(|| error("the blob id is not 64 lower-case hex digits".into()))?;
        rest = entry.get(end + 1..).unwrap_or_default();
        let stored_size = match extended.get(index) {
            None if extended.is_empty() => None,
            None => return Err(error("the extended blob table does not have it".into())),
            Some(row) => {
                let bits = row.features.get();
                refuse_features(bits).map_err(error)?;
                if bits & features::ZRAN != 0 {
                    return Err(error(Problem::unsupported("features", bits, "zran in RAFS v5")));
                }
                let stored_size = row.stored_size.get();
                if stored_size > MAX_STORED {
                    return Err(error(format!("{stored_size} stored bytes").into()));
                }
                (stored_size != 0).then_some(stored_size)
            }
        };
        blobs.push(BlobEntry { id, stored_size });
    }
    Ok(blobs)
}
