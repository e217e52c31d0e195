//! Hot chunks, placed where a few large requests fetch them.
//!
//! ```text
//! trace ─ Hot: chunks of an image that exists, in the order of first touch
//!          ├─ hot_first   the same blobs, each with its hot chunks at the beginning
//!          └─ HotBlob     one blob more, with copies of the hot chunks; the others are unchanged
//! ```
//! Either way the tree stays the same, and so does the digest of every chunk: only the places of
//! chunks change. The new bootstrap also lists the files with hot chunks in its prefetch table, for
//! readers of upstream.

mod first;
mod hot_blob;
pub(crate) mod writer;

use std::collections::{HashMap, HashSet};

use lazuli_image::{
    Blob, BlobIndex, ChunkRef, FormatError, InodeId, Kind, Trace, Tree,
    rafs::{BlobRecord, BootstrapOptions, write_bootstrap_with_prefetch},
};

pub use first::hot_first;
pub use hot_blob::{HotBlob, Optimized, optimize};

use crate::pack::for_each_chunk;

/// The chunks of an image that a trace calls hot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hot {
    /// In the order of first touch, equal content once. The blobs have them.
    pub chunks: Vec<ChunkRef>,
    /// Hot chunks of the trace that the blobs do not have.
    pub unknown: usize,
}

impl Hot {
    /// Looks up the trace's chunks in `blobs`, the blobs of the image in order.
    pub fn of(trace: &Trace, blobs: &[Blob]) -> Self {
        let ids = blobs.iter().zip(0..).map(|(blob, index)| (blob.id, (BlobIndex(index), blob)));
        let ids: HashMap<_, _> = ids.collect();
        let (mut seen, mut unknown, mut chunks) = (HashSet::new(), HashSet::new(), Vec::new());
        for (id, number) in trace.hot() {
            let known = ids.get(&id).and_then(|(index, blob)| Some((*index, blob.chunk(number)?)));
            match known {
                Some((blob, chunk)) if seen.insert(chunk.digest) => {
                    chunks.push(ChunkRef { blob, number });
                }
                Some(_) => {}
                None => {
                    unknown.insert((id, number));
                }
            }
        }
        Hot { chunks, unknown: unknown.len() }
    }
}

/// Writes the bootstrap of `tree` with every chunk at its new `place`; `hot` is the content to
/// prefetch.
fn rewrite(
    mut tree: Tree,
    blobs: &[BlobRecord],
    options: &BootstrapOptions,
    place: impl Fn(ChunkRef) -> ChunkRef,
    hot: &[ChunkRef],
) -> Result<Vec<u8>, FormatError> {
    for_each_chunk(&mut tree, |chunk| *chunk = place(*chunk));
    write_bootstrap_with_prefetch(&tree, blobs, options, &files(&tree, hot))
}

/// The files with these chunks, in their order. Of several files with the same chunk only the first
/// one counts: fetching it brings the chunk for all of them.
fn files(tree: &Tree, hot: &[ChunkRef]) -> Vec<InodeId> {
    let mut owners = HashMap::new();
    for id in (0..tree.len() as u32).map(InodeId) {
        if let Kind::Regular { chunks, .. } = &tree[id].kind {
            for chunk in chunks {
                owners.entry(*chunk).or_insert(id);
            }
        }
    }
    let mut seen = HashSet::new();
    let owners = hot.iter().filter_map(|chunk| owners.get(chunk).copied());
    owners.filter(|file| seen.insert(*file)).collect()
}
