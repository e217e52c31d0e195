//! Decides which blob each chunk belongs to, and writes the blobs.
//!
//! A chunk belongs to the lowest layer that has it, at its first use there. So the blob of a layer depends
//! on this layer and the ones below only, and images on the same base share its blobs.

use std::{
    collections::HashSet,
    fs::File,
    io::Write as _,
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use lazuli_image::{
    Algorithm, BLOCK_SIZE, Blob, BlobIndex, Chunk, ChunkRef, Decoded, InodeId, Kind, Stored, Tree,
    rafs::{BlobRecord, blob_tail},
};

use crate::{
    build::Options,
    dedup::{Chunks, Distinct, DistinctId},
    error::BuildError,
    spool::{Scratch, Spool},
};

/// Bytes copied from the spool at a time.
const BUFFER: usize = 1 << 20;

/// One data blob in a temporary file.
#[derive(Debug)]
pub struct BuiltBlob {
    /// What the bootstrap says about it.
    pub record: BlobRecord,
    /// The blob. Goes when this is dropped.
    pub file: PathBuf,
    /// The content of `<blob id>.blob.meta`, which travels beside the bootstrap.
    pub meta_file: Vec<u8>,
    _scratch: Scratch,
}

/// The chunks of every blob.
pub(crate) struct Packing {
    distinct: Vec<Distinct>,
    /// For every blob, its chunks in order.
    blobs: Vec<Vec<DistinctId>>,
}

impl Packing {
    /// Deals the chunks out to blobs, and turns the [`ChunkRef`]s of `tree` from layers to blobs. A blob
    /// that no file of the tree uses is left out.
    pub(crate) fn new(chunks: Chunks, tree: &mut Tree) -> Self {
        let Chunks { layers, distinct } = chunks;
        let mut owners: Vec<Option<ChunkRef>> = vec![None; distinct.len()];
        let mut owned = vec![Vec::new(); layers.len()];
        for (index, layer) in layers.iter().enumerate() {
            for &id in layer {
                let owner = &mut owners[id.0 as usize];
                if owner.is_none() {
                    let number = owned[index].len() as u32;
                    *owner = Some(ChunkRef { blob: BlobIndex(index as u8), number });
                    owned[index].push(id);
                }
            }
        }
        let mut used = HashSet::new();
        for_each_chunk(tree, |chunk| {
            let id = layers[usize::from(chunk.blob.0)][chunk.number as usize];
            if let Some(owner) = owners[id.0 as usize] {
                used.insert(owner.blob);
                *chunk = owner;
            }
        });
        let mut index = vec![BlobIndex(0); owned.len()];
        let mut blobs = Vec::new();
        for (layer, chunks) in owned.into_iter().enumerate() {
            if used.contains(&BlobIndex(layer as u8)) {
                index[layer] = BlobIndex(blobs.len() as u8);
                blobs.push(chunks);
            }
        }
        for_each_chunk(tree, |chunk| chunk.blob = index[usize::from(chunk.blob.0)]);
        Packing { distinct, blobs }
    }

    /// Writes all blobs, several at a time.
    pub(crate) fn write(
        &self,
        spool: &Spool,
        scratch: &Scratch,
        options: &Options,
    ) -> Result<Vec<BuiltBlob>, BuildError> {
        let next = AtomicUsize::new(0);
        let done: Mutex<Vec<_>> = Mutex::new((0..self.blobs.len()).map(|_| None).collect());
        thread::scope(|scope| {
            for _ in 0..options.threads.min(self.blobs.len()) {
                scope.spawn(|| {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= self.blobs.len() {
                            break;
                        }
                        let blob = self.write_blob(index, spool, scratch, options);
                        let mut done = done.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                        done[index] = Some(blob);
                    }
                });
            }
        });
        let done = done.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        done.into_iter().flatten().collect()
    }

    fn write_blob(
        &self,
        index: usize,
        spool: &Spool,
        scratch: &Scratch,
        options: &Options,
    ) -> Result<BuiltBlob, BuildError> {
        let chunks = self.layout(&self.blobs[index]);
        let path = scratch.join(&format!("blob{index}"));
        let mut file = File::create_new(&path).map_err(|problem| scratch.failed(problem))?;
        let mut hasher = Algorithm::Sha256.hasher();
        let mut buffer = Vec::with_capacity(BUFFER);
        for (at, length) in self.runs(&self.blobs[index]) {
            buffer.resize(length, 0);
            spool.read(&mut buffer, at)?;
            hasher.update(&buffer);
            file.write_all(&buffer).map_err(|problem| scratch.failed(problem))?;
        }
        let tail = blob_tail(&chunks, hasher, options.codec)?;
        file.write_all(&tail.bytes).map_err(|problem| scratch.failed(problem))?;
        let blob = Blob {
            id: tail.id,
            codec: options.codec,
            stored_size: tail.stored_size,
            decoded_size: tail.decoded_size,
            chunks,
        };
        Ok(BuiltBlob {
            record: BlobRecord { blob, tail: tail.info },
            file: path,
            meta_file: tail.meta_file,
            _scratch: scratch.clone(),
        })
    }

    /// Where each chunk of a blob is: stored back to back, decoded from block to block.
    fn layout(&self, ids: &[DistinctId]) -> Vec<Chunk> {
        let (mut stored, mut decoded) = (0, 0);
        let place = |(number, id): (usize, &DistinctId)| {
            let distinct = &self.distinct[id.0 as usize];
            let chunk = Chunk {
                number: number as u32,
                digest: distinct.digest,
                stored: Stored(stored),
                stored_size: distinct.stored_size,
                decoded: Decoded(decoded),
                decoded_size: distinct.decoded_size,
            };
            stored = chunk.stored_end().0;
            decoded = round_up(chunk.decoded_end().0);
            chunk
        };
        ids.iter().enumerate().map(place).collect()
    }

    /// Stretches of the spool that give the chunks in order, each of at most [`BUFFER`] bytes or one chunk.
    fn runs(&self, ids: &[DistinctId]) -> impl Iterator<Item = (u64, usize)> {
        let mut ids = ids.iter().peekable();
        std::iter::from_fn(move || {
            let place = |id: &DistinctId| {
                let distinct = &self.distinct[id.0 as usize];
                (distinct.spooled, distinct.stored_size as usize)
            };
            let (at, mut length) = place(ids.next()?);
            while let Some((next, more)) = ids.peek().map(|id| place(id))
                && next == at + length as u64
                && length + more <= BUFFER
            {
                length += more;
                ids.next();
            }
            Some((at, length))
        })
    }
}

/// Chunk sizes are at most 16 MiB and their number has 24 bits, so this stays below 2⁴⁹.
const fn round_up(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK_SIZE)
}

/// Visits all references to chunks, those of every file once.
fn for_each_chunk(tree: &mut Tree, mut visit: impl FnMut(&mut ChunkRef)) {
    for id in 0..tree.len() as u32 {
        if let Kind::Regular { chunks, .. } = &mut tree[InodeId(id)].kind {
            chunks.iter_mut().for_each(&mut visit);
        }
    }
}
