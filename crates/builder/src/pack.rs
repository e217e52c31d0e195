//! Decides which blob each chunk belongs to, and writes the blobs.
//!
//! A chunk that a blob of the [`Dictionary`] has stays there. Any other belongs to the lowest layer
//! that has it, at its first use there. So without a dictionary the blob of a layer depends on this
//! layer and the ones below only, and images on the same base share its blobs.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::FileExt as _,
    path::PathBuf,
    sync::Mutex,
    thread,
};

use lazuli_image::{
    Algorithm, BLOCK_SIZE, Blob, BlobIndex, Chunk, ChunkRef, Codec, Decoded, FormatError, InodeId,
    Kind, Points, Stored, Tree,
    codec::Decoder,
    digest::Hasher,
    rafs::{BlobRecord, Tail, blob_tail},
};

use crate::{
    built_blob::BuiltBlob,
    dedup::{Chunks, Distinct, DistinctId, Owner},
    dictionary::{Dictionary, KnownBlob},
    error::BuildError,
    layer_file::{Finished, StoredChunk},
    options::Options,
    scratch::Scratch,
    unit::{InUnit, UnitEncoder},
};

/// Bytes copied from a layer file at a time, or one chunk if that is more.
const BUFFER: u64 = 1 << 20;

/// A blob without its tail.
pub(crate) struct Unsealed {
    /// Open at its end.
    pub(crate) file: File,
    /// Name of the file.
    pub(crate) path: PathBuf,
    /// SHA-256 of the file.
    pub(crate) hasher: Hasher,
    /// The chunks in the file, back to back.
    pub(crate) chunks: Vec<Chunk>,
}

impl Unsealed {
    /// Adds the tail.
    pub(crate) fn seal(self, codec: Codec, scratch: &Scratch) -> Result<BuiltBlob, BuildError> {
        self.seal_with(scratch, |chunks, hasher| blob_tail(chunks, hasher, codec), codec)
    }

    /// Adds the tail that `tail` makes of the chunks.
    pub(crate) fn seal_with(
        self,
        scratch: &Scratch,
        tail: impl FnOnce(&[Chunk], Hasher) -> Result<Tail, FormatError>,
        codec: Codec,
    ) -> Result<BuiltBlob, BuildError> {
        let Unsealed { mut file, path, hasher, chunks } = self;
        let tail = tail(&chunks, hasher)?;
        file.write_all(&tail.bytes).map_err(|problem| scratch.failed(problem))?;
        let blob = Blob {
            id: tail.id,
            codec,
            points: Points::default(),
            stored_size: tail.stored_size,
            decoded_size: tail.decoded_size,
            chunks: chunks.into(),
        };
        Ok(BuiltBlob {
            record: BlobRecord { blob, tail: tail.info },
            file: Some(path),
            meta_file: tail.meta_file,
            hot_bytes: None,
            scratch: scratch.clone(),
        })
    }
}

/// The chunks of every blob.
pub(crate) struct Packing {
    distinct: Vec<Distinct>,
    /// The blobs of the dictionary in use. They come first.
    known: Vec<KnownBlob>,
    blobs: Vec<Packed>,
}

/// A blob before it has its tail.
struct Packed {
    /// The chunks that belong in the blob, in order.
    chunks: Vec<DistinctId>,
    /// The chunks written so far: the same, and perhaps some that belong to lower layers.
    layer_file: Finished,
}

impl Packing {
    /// Assigns chunks to blobs, and redirects the [`ChunkRef`]s of `tree` from layers to blobs.
    /// Blobs that no file of the tree uses are left out. `layer_files` has one per layer.
    pub(crate) fn new(
        chunks: Chunks,
        layer_files: Vec<Finished>,
        dictionary: Dictionary,
        tree: &mut Tree,
    ) -> Self {
        let Chunks { layers, distinct } = chunks;
        let known = dictionary.into_blobs();
        // At first each blob of the dictionary and each layer has a number, then those in use.
        let blob_of = |layer: usize| BlobIndex((known.len() + layer) as u8);
        let place = |chunk: &Distinct| match chunk.owner {
            Owner::Dictionary { blob, number } => ChunkRef { blob: BlobIndex(blob), number },
            Owner::Layer { layer, .. } => ChunkRef { blob: blob_of(layer.into()), number: 0 },
        };
        let mut places: Vec<_> = distinct.iter().map(place).collect();
        let mut owned = vec![Vec::new(); layers.len()];
        for (layer, ids) in layers.iter().enumerate() {
            for (number, &id) in ids.iter().enumerate() {
                let here = Owner::Layer { layer: layer as u8, number: number as u32 };
                if distinct[id.0 as usize].owner == here {
                    places[id.0 as usize].number = owned[layer].len() as u32;
                    owned[layer].push(id);
                }
            }
        }
        let mut used = HashSet::new();
        for_each_chunk(tree, |chunk| {
            let id = layers[usize::from(chunk.blob.0)][chunk.number as usize];
            *chunk = places[id.0 as usize];
            used.insert(chunk.blob);
        });
        let mut index = vec![BlobIndex(0); known.len() + layers.len()];
        let mut numbers = (0..).map(BlobIndex);
        let mut is_used = |blob: BlobIndex| {
            let used = used.contains(&blob);
            if used {
                index[usize::from(blob.0)] = numbers.next().unwrap_or(blob);
            }
            used
        };
        let mut blobs = Vec::new();
        let layer_blobs: Vec<_> = (0..layers.len()).map(blob_of).collect();
        let known = known.into_iter().zip((0..).map(BlobIndex)).filter(|(_, blob)| is_used(*blob));
        let known: Vec<_> = known.map(|(known, _)| known).collect();
        for ((chunks, layer_file), blob) in owned.into_iter().zip(layer_files).zip(layer_blobs) {
            if is_used(blob) {
                blobs.push(Packed { chunks, layer_file });
            }
        }
        for_each_chunk(tree, |chunk| chunk.blob = index[usize::from(chunk.blob.0)]);
        Packing { distinct, known, blobs }
    }

    /// The packing of a single layer: the blobs of the dictionary that are in use, and its own
    /// without a tail, if it has one.
    pub(crate) fn of_one_layer(
        self,
        scratch: &Scratch,
        options: &Options,
    ) -> Result<(Vec<BlobRecord>, Option<Unsealed>), BuildError> {
        let known = self.known.into_iter().map(|known| known.record).collect();
        let own = self.blobs.into_iter().next();
        let own = own.map(|own| own.unsealed(&self.distinct, scratch, options));
        Ok((known, own.transpose()?))
    }

    /// Finishes all blobs, several at a time.
    pub(crate) fn write(
        self,
        scratch: &Scratch,
        options: &Options,
    ) -> Result<Vec<BuiltBlob>, BuildError> {
        let Packing { distinct, known, blobs } = self;
        let count = blobs.len();
        let todo = Mutex::new(blobs.into_iter().enumerate());
        let done: Mutex<Vec<_>> = Mutex::new((0..count).map(|_| None).collect());
        let next = || todo.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).next();
        thread::scope(|scope| {
            for _ in 0..options.threads.min(count) {
                scope.spawn(|| {
                    while let Some((index, packed)) = next() {
                        let blob = packed.finish(&distinct, scratch, options);
                        let mut done = done.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                        done[index] = Some(blob);
                    }
                });
            }
        });
        let done = done.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        let known = known.into_iter().map(|known| Ok(known.into_built(scratch)));
        known.chain(done.into_iter().flatten()).collect()
    }
}

impl Packed {
    fn finish(
        self,
        distinct: &[Distinct],
        scratch: &Scratch,
        options: &Options,
    ) -> Result<BuiltBlob, BuildError> {
        self.unsealed(distinct, scratch, options)?.seal(options.codec, scratch)
    }

    fn unsealed(
        self,
        distinct: &[Distinct],
        scratch: &Scratch,
        options: &Options,
    ) -> Result<Unsealed, BuildError> {
        let failed = |problem| scratch.failed(problem);
        let layer_file = match self.layer_file {
            layer_file if layer_file.chunks.len() == self.chunks.len() => layer_file,
            layer_file => only(&self.chunks, layer_file, distinct, options).map_err(failed)?,
        };
        let Finished { file, path, hasher, chunks } = layer_file;
        let chunks = layout(&chunks, distinct);
        let file = file.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        Ok(Unsealed { file, path, hasher, chunks })
    }
}

/// Computes the place of each chunk of a blob: stored unit by unit, decoded from block to block.
fn layout(written: &[StoredChunk], distinct: &[Distinct]) -> Vec<Chunk> {
    let (mut stored, mut stored_end, mut decoded) = (0, 0, 0);
    let place = |(number, &(id, InUnit { stored_size, part })): (usize, &StoredChunk)| {
        let Distinct { digest, decoded_size, .. } = distinct[id.0 as usize];
        if part.is_none_or(|part| part.offset == 0) {
            stored = stored_end;
        }
        let chunk = Chunk {
            number: number as u32,
            digest,
            stored: Stored(stored),
            stored_size,
            decoded: Decoded(decoded),
            decoded_size,
            part,
        };
        stored_end = chunk.stored_end().0;
        decoded = round_up(chunk.decoded_end().0);
        chunk
    };
    written.iter().enumerate().map(place).collect()
}

/// Copies the `wanted` chunks of a layer file, which has them in this order, to a new one. A batch
/// that loses chunks becomes a smaller batch.
fn only(
    wanted: &[DistinctId],
    layer_file: Finished,
    distinct: &[Distinct],
    options: &Options,
) -> io::Result<Finished> {
    let Finished { file: old, path, chunks: written, .. } = layer_file;
    let old = old.ok_or(io::ErrorKind::NotFound)?;
    // The new file takes the name; the old one exists until it is closed.
    fs::remove_file(&path)?;
    let mut file = File::create_new(&path)?;
    let mut hasher = Algorithm::Sha256.hasher();
    let mut chunks = Vec::with_capacity(wanted.len());
    let mut write = |bytes: &[u8]| -> io::Result<()> {
        hasher.update(bytes);
        file.write_all(bytes)
    };
    let read = |start: u64, end: u64| -> io::Result<Vec<u8>> {
        let mut buffer = vec![0; (end - start) as usize];
        old.read_exact_at(&mut buffer, start)?;
        Ok(buffer)
    };
    let (mut decoder, mut decoded) = (Decoder::new(), Vec::new());
    let mut encoder = UnitEncoder::new(options.codec, options.level)?;
    let mut wanted = wanted.iter().peekable();
    // A stretch of whole units that are wanted and not yet copied.
    let (mut start, mut end) = (0, 0);
    for unit in layout(&written, distinct).chunk_by(Chunk::shares_unit) {
        let members = unit.iter().map(|chunk| (chunk, written[chunk.number as usize]));
        let here: Vec<_> =
            members.filter(|(_, (id, _))| wanted.next_if_eq(&id).is_some()).collect();
        let next = unit[0].stored_end().0;
        if here.len() == unit.len() {
            chunks.extend(here.into_iter().map(|(_, written)| written));
            if next - start > BUFFER && end > start {
                write(&read(start, end)?)?;
                start = end;
            }
            end = next;
            continue;
        }
        write(&read(start, end)?)?;
        start = next;
        if !here.is_empty() {
            let stored = read(end, next)?;
            let decoded = decoder.unit(&unit[0].unit(options.codec), &stored, &mut decoded);
            let decoded = decoded.map_err(io::Error::other)?;
            let parts = here.iter().filter_map(|(chunk, _)| chunk.part_of(decoded));
            let mut stored = Vec::new();
            let places = encoder.encode(&parts.collect::<Vec<_>>(), &mut stored);
            write(&stored)?;
            chunks.extend(here.iter().map(|(_, (id, _))| *id).zip(places));
        }
        end = next;
    }
    write(&read(start, end)?)?;
    Ok(Finished { file: Some(file), path, hasher, chunks })
}

/// Chunk sizes are at most 16 MiB and their number has 24 bits, so this stays below 2⁴⁹.
const fn round_up(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK_SIZE)
}

/// Visits all references to chunks, those of every file once.
pub(crate) fn for_each_chunk(tree: &mut Tree, mut visit: impl FnMut(&mut ChunkRef)) {
    for id in 0..tree.len() as u32 {
        if let Kind::Regular { chunks, .. } = &mut tree[InodeId(id)].kind {
            chunks.iter_mut().for_each(&mut visit);
        }
    }
}
