//! Completes bootstraps that leave out the stored places of chunks which share a unit.
//!
//! Upstream's do: the places of chunks in a batch, or in a piece of a gzip layer, are only in the
//! CI table of the blob. Lazuli uses the chunk table, which has the digests. So where such a
//! bootstrap arrives, the places are written into its chunk table, as they are in bootstraps with
//! batches made here, and the decoder state for them goes into a table of points.

use zerocopy::{FromBytes, IntoBytes};

use super::{
    ci::CiTable,
    layout::{self, ChunkEntry, chunk_flags},
    tables::{is_unplaced, parse_blobs, rows},
};
use crate::{BlobIndex, FormatError, Points, Structure};

/// The chunk table of a bootstrap with everything placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Its offset in the bootstrap.
    pub at: u64,
    /// The table, of the same size as before.
    pub table: Vec<u8>,
    /// The points at which decoders can begin in gzip layers.
    pub points: Vec<(BlobIndex, Points)>,
}

/// Returns the chunk table of the bootstrap `bytes`, completed with the places of all chunks that
/// it leaves out and that are in one of `cis`, the decoded CI tables of some of its blobs. Other
/// fields of `cis` are ignored.
pub fn place_chunks(bytes: &[u8], cis: &[(BlobIndex, Vec<u8>)]) -> Result<Placed, FormatError> {
    let (tables, chunk_table) = parse_blobs(bytes)?;
    let error = |object: Structure, problem: String| FormatError::new(object, 0, problem);
    let mut known: Vec<Option<CiTable<'_>>> = tables.blobs.iter().map(|_| None).collect();
    for (BlobIndex(index), ci) in cis {
        if let Some(tail) = tables.tails.get(usize::from(*index)) {
            let table = CiTable::new(ci, tail).ok_or_else(|| {
                let problem = format!("{} bytes, expected {}", ci.len(), tail.ci_size);
                error(("CI table of blob", u64::from(*index)).into(), problem)
            })?;
            known[usize::from(*index)] = Some(table);
        }
    }
    let mut table = rows(bytes, chunk_table)?.to_vec();
    for (number, row) in table.chunks_exact_mut(size_of::<ChunkEntry>()).enumerate() {
        let mut entry = ChunkEntry::read_from_bytes(row).expect("chunks_exact gives whole rows");
        let blob = entry.blob.get() as usize;
        let Some(Some(ci)) = known.get(blob) else { continue };
        if !is_unplaced(&entry, &tables.tails[blob]) {
            continue;
        }
        let object = || Structure::from(("chunk table entry", number));
        let place = ci.get(entry.number.get()).map_err(|problem| error(object(), problem))?;
        let (Some(part), true) = (
            place.part,
            place.decoded.0 == entry.decoded.get()
                && place.decoded_size == entry.decoded_size.get(),
        ) else {
            let problem = format!("the chunk information of blob {blob} says {place:?}");
            return Err(error(object(), problem));
        };
        entry.flags = (chunk_flags::COMPRESSED | chunk_flags::BATCH).into();
        entry.stored = place.stored.0.into();
        entry.stored_size = place.stored_size.into();
        entry.file_offset = layout::in_unit(part).into();
        row.copy_from_slice(entry.as_bytes());
    }
    let mut points = Vec::new();
    for (index, ci) in known.iter().enumerate() {
        if let Some(ci) = ci.as_ref().filter(|_| tables.tails[index].has_contexts()) {
            let found = ci.points();
            let found =
                found.map_err(|problem| error(("CI table of blob", index).into(), problem))?;
            // There are fewer blobs than 256.
            points.push((BlobIndex(index as u8), found));
        }
    }
    Ok(Placed { at: chunk_table.0, table, points })
}
