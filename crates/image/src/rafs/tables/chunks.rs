//! The chunk table.

use std::collections::BTreeSet;

use zerocopy::FromBytes as _;

use super::super::{
    TailInfo,
    layout::{self, ChunkEntry, chunk_flags},
};
use crate::{
    Algorithm, BLOCK_SIZE, Blob, BlobIndex, Chunk, Codec, Decoded, Digest, FormatError, Problem,
    Stored, chunk::MAX_UNIT,
};

/// Stands for a digest in the chunks of upstream's tarfs mode. No content has this digest.
pub(in crate::rafs) const NO_DIGEST: [u8; 32] = [0; 32];

/// Distributes the `rows` of the chunk table, which begins at byte `table`, over the blobs. A chunk
/// has at most `largest` bytes. Returns the blobs with chunks that only their CI tables place.
pub(super) fn distribute(
    blobs: &mut [Blob],
    tails: &[TailInfo],
    digests: &[Algorithm],
    largest: u32,
    table: u64,
    rows: &[u8],
) -> Result<Vec<BlobIndex>, FormatError> {
    let mut unplaced = BTreeSet::new();
    // Count first: lists that grow reserve up to twice their size.
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
        let error = |problem: Problem| {
            let at = table + (index * size_of::<ChunkEntry>()) as u64;
            FormatError::new(("chunk table entry", index), at, problem)
        };
        let blob_index = entry.blob.get() as usize;
        let Some(blob) = blobs.get(blob_index) else {
            return Err(error(format!("blob {blob_index} does not exist").into()));
        };
        let tail = &tails[blob_index];
        let flags = entry.flags.get();
        refuse_chunk_flags(flags).map_err(error)?;
        let hash = entry.digest;
        let number = entry.number.get();
        if hash == NO_DIGEST {
            let blob = blob.id;
            let problem = "has no digest, so its bytes cannot be checked";
            return Err(error(format!("chunk {number} of blob {blob} {problem}").into()));
        }
        let in_unit = flags & chunk_flags::BATCH != 0;
        if in_unit && !tail.has_units() {
            let problem = format!("flags {flags:#x}: blob {blob_index} has no such units");
            return Err(error(problem.into()));
        }
        if is_unplaced(&entry, tail) {
            unplaced.insert(blob_index);
            continue;
        }
        let chunk = Chunk {
            number,
            digest: Digest { algorithm: digests[blob_index], hash },
            stored: Stored(entry.stored.get()),
            stored_size: entry.stored_size.get(),
            decoded: Decoded(entry.decoded.get()),
            decoded_size: entry.decoded_size.get(),
            part: in_unit.then(|| layout::from_in_unit(entry.file_offset.get())),
        };
        validate_chunk(&chunk, blob, tail, largest).map_err(error)?;
        lists[blob_index].push(chunk);
    }
    for (index, (blob, mut chunks)) in blobs.iter_mut().zip(lists).enumerate() {
        chunks.sort_unstable_by_key(|chunk| chunk.number);
        validate_order(blob, &chunks)
            .map_err(|problem| problem.of(format_args!("blob {index}")))
            .map_err(|problem| FormatError::new("chunk table", table, problem))?;
        blob.chunks = chunks.into();
    }
    // There are fewer blobs than 256.
    Ok(unplaced.into_iter().map(|blob| BlobIndex(blob as u8)).collect())
}

/// Returns whether a row leaves out the unit of its chunk, as upstream's writer does. A chunk of a
/// gzip layer is always in a unit.
pub(in crate::rafs) fn is_unplaced(row: &ChunkEntry, tail: &TailInfo) -> bool {
    tail.has_units()
        && row.flags.get() & chunk_flags::BATCH == 0
        && (tail.has_contexts() || row.stored_size.get() == 0)
}

/// Refuses chunks with flags, of the chunk table, that are not supported.
pub(in crate::rafs) fn refuse_chunk_flags(bits: u32) -> Result<(), Problem> {
    for (bit, what) in
        [(chunk_flags::HOLE, "a hole in place of a chunk"), (chunk_flags::ENCRYPTED, "encryption")]
    {
        if bits & bit != 0 {
            return Err(Problem::unsupported("flags", bits, what));
        }
    }
    Ok(())
}

/// Checks that `chunks` of `blob` ascend in number and in both offsets.
pub(in crate::rafs) fn validate_order(blob: &Blob, chunks: &[Chunk]) -> Result<(), Problem> {
    for pair in chunks.windows(2) {
        let (a, b) = (&pair[0], &pair[1]);
        if !blob.is_in_order(a, b) {
            return Err(Problem::Overlap(format!("chunks {} and {}", a.number, b.number).into()));
        }
    }
    Ok(())
}

/// Checks `chunk`, of at most `largest` bytes, against the limits of `blob`, independently of its
/// neighbours.
pub(in crate::rafs) fn validate_chunk(
    chunk: &Chunk,
    blob: &Blob,
    tail: &TailInfo,
    largest: u32,
) -> Result<(), Problem> {
    // In a gzip layer any stored size may be that of a piece; before chunks are placed nothing is
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
        ("decoded size", (1..=largest).contains(&chunk.decoded_size)),
        ("place in its unit", chunk.is_within_unit()),
        ("stored size", stored_sizes.contains(&chunk.stored_size)),
        ("stored size", !raw_only || !chunk.is_compressed()),
        ("decoded offset", chunk.decoded.0.is_multiple_of(BLOCK_SIZE)),
        ("decoded end", fits(end(chunk.decoded.0, chunk.decoded_size), blob.decoded_size)),
        ("stored end", fits(end(chunk.stored.0, chunk.stored_size), blob.stored_size)),
    ];
    match facts.iter().find(|(_, holds)| !holds) {
        Some((field, _)) => Err(format!("bad {field} in {chunk:?}").into()),
        None => Ok(()),
    }
}
