//! The CI table and its header, from chunks alone.

use zerocopy::IntoBytes as _;

use super::{
    super::{
        BlobRecord, TailInfo, ci,
        layout::{CI_MAGIC, CI_UNIT_SIZE, CI_V2_ENTRY_SIZE, CiHeader, features},
    },
    packed::validate_packed,
};
use crate::{BLOCK_SIZE, Chunk, FormatError};

pub(super) fn ci_table(chunks: &[Chunk]) -> Result<Vec<u8>, FormatError> {
    ci::table(chunks).map_err(|chunk| {
        let problem = format!("does not fit a CI entry: {chunk:?}");
        FormatError::new(("chunk", chunk.number), chunk.stored.0, problem)
    })
}

/// The feature bits of a blob that this writer makes from `chunks`.
pub(super) fn written_features(chunks: &[Chunk]) -> u32 {
    let is_batched = chunks.iter().any(|chunk| chunk.part.is_some());
    features::WRITTEN | if is_batched { features::WRITTEN_BATCHED } else { 0 }
}

/// The header of the CI table that `tail` describes, with this number of units.
pub(super) fn ci_header(tail: &TailInfo, count: u32) -> CiHeader {
    let [offset, size] = units(tail);
    CiHeader {
        magic: CI_MAGIC.into(),
        features: tail.features.into(),
        compressor: (tail.ci_codec as u32).into(),
        entries: tail.chunk_count.into(),
        offset: tail.ci_offset.into(),
        stored_size: tail.ci_stored_size.into(),
        size: tail.ci_size.into(),
        units_offset: offset.into(),
        units_size: size.into(),
        units: count.into(),
        reserved: [0; 4032],
        magic2: CI_MAGIC.into(),
    }
}

/// Offset and size of the units in a decoded CI table.
pub(super) fn units(tail: &TailInfo) -> [u64; 2] {
    if !tail.has_units() {
        return [0; 2];
    }
    let offset = CI_V2_ENTRY_SIZE * u64::from(tail.chunk_count);
    [offset, tail.ci_size.saturating_sub(offset)]
}

pub(super) fn join_meta_file(ci: Vec<u8>, header: &[u8]) -> Vec<u8> {
    let mut file = ci;
    file.resize(file.len().next_multiple_of(BLOCK_SIZE as usize), 0);
    file.extend_from_slice(header);
    file
}

/// Rebuilds [`Tail::meta_file`](super::Tail::meta_file) of a blob that
/// [`blob_tail`](super::blob_tail) ended from its bootstrap. `None` if another writer may have made
/// the blob: others describe more, and list fewer chunks.
pub fn written_meta_file(record: &BlobRecord) -> Option<Vec<u8>> {
    let BlobRecord { blob, tail } = record;
    if tail.features != written_features(&blob.chunks)
        || tail.chunk_count as usize != blob.chunks.len()
        || validate_packed(&blob.chunks).is_err()
        || tail.toc_digest.is_none()
    {
        return None;
    }
    let ci = ci_table(&blob.chunks).ok()?;
    let [_, units] = units(tail);
    let header = ci_header(tail, (units / CI_UNIT_SIZE) as u32);
    (ci.len() as u64 == tail.ci_size).then(|| join_meta_file(ci, header.as_bytes()))
}
