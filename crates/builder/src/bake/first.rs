//! Hot chunks at the beginning of each blob.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::Path,
};

use lazuli_image::{
    BlobIndex, Chunk, ChunkRef,
    codec::Decoder,
    rafs::{Bootstrap, BootstrapOptions},
};

use super::{Hot, rewrite, writer::BlobWriter};
use crate::{build::Built, built_blob::BuiltBlob, error::BuildError};

/// Moves the hot chunks of each blob to its beginning, in the order of `hot`; the others keep their
/// order. Blobs without hot chunks, and blobs that are stored already, do not change.
pub fn hot_first(built: Built, hot: &Hot) -> Result<Built, BuildError> {
    let Built { bootstrap, blobs, mut report } = built;
    let (tree, options) = {
        let bootstrap = Bootstrap::open(&bootstrap[..])?;
        let (chunk_size, digest) = (bootstrap.chunk_size(), bootstrap.digest_algorithm());
        (bootstrap.tree()?, BootstrapOptions { chunk_size, digest })
    };
    let mut places = HashMap::new();
    let mut reordered = Vec::with_capacity(blobs.len());
    for (blob, index) in blobs.into_iter().zip((0..).map(BlobIndex)) {
        let mine = hot.chunks.iter().filter(|chunk| chunk.blob == index);
        let mine: Vec<u32> = mine.map(|chunk| chunk.number).collect();
        let Some(file) = blob.file.clone().filter(|_| !mine.is_empty()) else {
            reordered.push(blob);
            continue;
        };
        let order = order(&blob, &mine);
        let moved = order.iter().zip(0..).map(|(chunk, number)| (chunk.number, number));
        for (old, number) in moved {
            let old = ChunkRef { blob: index, number: old };
            places.insert(old, ChunkRef { blob: index, number });
        }
        reordered.push(reorder(blob, &file, &order, mine.len(), index)?);
    }
    let records: Vec<_> = reordered.iter().map(|blob| blob.record.clone()).collect();
    let place = |chunk: ChunkRef| places.get(&chunk).copied().unwrap_or(chunk);
    let first: Vec<_> = hot.chunks.iter().copied().map(place).collect();
    let bootstrap = rewrite(tree, &records, &options, place, &first)?;
    report.bootstrap_bytes = bootstrap.len() as u64;
    report.stored_bytes = records.iter().map(|record| record.blob.stored_size).sum();
    Ok(Built { bootstrap, blobs: reordered, report })
}

/// The chunks of a blob: the hot ones in their order, then the others in that of the blob.
fn order(blob: &BuiltBlob, hot: &[u32]) -> Vec<Chunk> {
    let blob = &blob.record.blob;
    let is_hot: HashSet<u32> = hot.iter().copied().collect();
    let first = hot.iter().filter_map(|number| blob.chunk(*number));
    let rest = blob.chunks.iter().filter(|chunk| !is_hot.contains(&chunk.number));
    first.chain(rest).copied().collect()
}

/// Rewrites a blob with its chunks in this order; the first `hot` chunks are hot.
fn reorder(
    old: BuiltBlob,
    path: &Path,
    order: &[Chunk],
    hot: usize,
    index: BlobIndex,
) -> Result<BuiltBlob, BuildError> {
    let scratch = old.scratch.clone();
    let failed = |problem| scratch.failed(problem);
    let file = File::open(path).map_err(failed)?;
    let codec = old.record.blob.codec;
    let mut writer = BlobWriter::create(scratch.clone(), &format!("hot{}", index.0), codec)?;
    let (mut stored, mut decoder, mut decoded) = (Vec::new(), Decoder::new(), Vec::new());
    let (hot, rest) = order.split_at(hot);
    let hot = hot.chunks(1);
    let hot_chunks = hot.len();
    for unit in hot.chain(rest.chunk_by(Chunk::shares_unit)) {
        let first = &unit[0];
        stored.resize(first.stored_size as usize, 0);
        file.read_exact_at(&mut stored, first.stored.0).map_err(failed)?;
        let size: u64 = unit.iter().map(|chunk| u64::from(chunk.decoded_size)).sum();
        if size == u64::from(first.unit_size()) {
            writer.add(unit, &stored)?;
            continue;
        }
        // Some chunks of a batch are hot, and others are not.
        let fail = |problem: String| BuildError::Content {
            number: first.number,
            blob: old.record.blob.id,
            problem,
        };
        let decoded = decoder.unit(&first.unit(codec), &stored, &mut decoded);
        let decoded = decoded.map_err(|problem| fail(problem.to_string()))?;
        let part = |chunk: &Chunk| Some((*chunk, chunk.part_of(decoded)?));
        let parts: Option<Vec<_>> = unit.iter().map(part).collect();
        writer.add_anew(&parts.ok_or_else(|| fail("its batch is too short".into()))?)?;
    }
    fs::remove_file(path).map_err(failed)?;
    let hot_bytes = writer.chunks()[..hot_chunks].last().map_or(0, |last| last.stored_end().0);
    writer.finish(hot_bytes)
}
