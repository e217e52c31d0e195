//! Makes an index of an unconverted image, so that it can be read in places.
//!
//! ```text
//! layer ─ gunzip ─ tar ─┬─ entries ─ overlay ─ tree ──────────┬─ bootstrap
//!            │          └─ chunks ──────────┐                 │
//!            └─ points, thin windows ───────┴─ index ─────────┘
//! ```
//! The chunks are in the layers. What the index cannot lead to (sparse files, and files in a gzip
//! layer that is one block for too long) is stored once more, in a blob beside it.

mod assemble;
mod background_chunks;
mod background_hash;
mod gunzip;
mod index_while_reading;
mod inflate;
mod layer;
mod memory;
mod seekable;
mod skeleton;
mod unpacked;
mod window;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use lazuli_image::{
    Algorithm, BlobIndex, Digest,
    rafs::{BlobRecord, BootstrapOptions, WrittenIndex, write_bootstrap},
};

use self::layer::{ChunkContent, Indexed, Numbers};
pub use self::{
    assemble::{KnownLayer, assemble, assemble_one},
    background_chunks::ChunkSink,
    background_hash::BackgroundHash,
    index_while_reading::{IndexAndDiffId, index_while_reading},
    layer::IndexLayer,
    seekable::{LayerToc, SeekableImage, assemble_seekable, assemble_seekable_one},
    skeleton::{diff_id, tar_size},
};
#[cfg(fuzzing)]
pub(crate) use self::{inflate::compare::assert_like_zlib, window::Thinner};
use crate::{
    BootstrapLayer,
    bootstrap_layer::pack_bootstrap,
    build::{check_blobs, stack},
    built_blob::BuiltBlob,
    error::{BuildError, SourceError},
    options::{MAX_BLOBS, Options},
    pack::for_each_chunk,
    report::Progress,
    scratch::Scratch,
};

/// Maximum number of layers of an image that a node makes of tables of contents: as many as can be
/// indexed, which takes two blobs for each.
const MAX_LAYERS: usize = MAX_BLOBS / 2;

/// The index of an image.
#[derive(Debug)]
pub struct ImageIndex {
    /// The metadata file.
    pub bootstrap: Vec<u8>,
    /// The indexes of the layers, in their order; equal layers have one.
    pub layers: Vec<WrittenIndex>,
    /// Blobs of content that the indexes cannot lead to.
    pub beside: Vec<BuiltBlob>,
    /// For each layer the SHA-256 of its tar.
    pub diff_ids: Vec<Digest>,
    /// Inodes in the tree; hard links count once.
    pub inodes: usize,
}

impl ImageIndex {
    /// The bootstrap, packed with the tables of blobs beside the layers. Those of the layers are in
    /// their indexes.
    pub fn bootstrap_layer(&self) -> BootstrapLayer {
        let metas = self.beside.iter().map(|blob| (blob.record.blob.id, &blob.meta_file[..]));
        pack_bootstrap(&self.bootstrap, metas)
    }
}

/// Indexes the image that consists of `layers`, lowest first. Equal images give equal bytes.
/// `scratch` is a directory for blobs beside the layers.
///
/// # Errors
/// A layer is damaged, hostile, cannot be read, or is of a kind that cannot be read in places.
pub fn index(
    layers: Vec<IndexLayer>,
    scratch: &Path,
    threads: usize,
    progress: &dyn Progress,
) -> Result<ImageIndex, BuildError> {
    check_forms(layers.iter().map(|layer| (layer.digest, layer.file.is_some())))?;
    let names: Vec<_> = layers.iter().map(|layer| layer.digest.to_string()).collect();
    let scratch = Scratch::new(scratch)?;
    let read = read_all(layers, &scratch, threads, progress)?;
    join(read, names)
}

/// Checks whether one image can have these layers, by the digest of each, and whether it is one
/// file.
///
/// # Errors
/// They are too many, or one of them is there as a file and as a tar.
pub fn check_forms(layers: impl Iterator<Item = (Digest, bool)>) -> Result<(), BuildError> {
    let (mut forms, mut blobs) = (HashMap::new(), 0);
    for (layer, is_file) in layers {
        blobs += if is_file { 1 } else { 2 };
        if *forms.entry(layer).or_insert(is_file) != is_file {
            let problem = "it is there as a file and as a tar, which one index cannot be of";
            let problem = SourceError::Archive { offset: 0, problem: problem.to_owned() };
            return Err(BuildError::Layer { layer: layer.to_string(), problem });
        }
    }
    check_blobs("blobs of layers (two for each tar)", blobs)
}

/// Makes one image of layers that were read.
fn join(read: Vec<Indexed>, names: Vec<String>) -> Result<ImageIndex, BuildError> {
    let diff_ids = read.iter().map(|layer| layer.diff_id).collect();
    let (mut entries, mut indexes, mut besides) = (Vec::new(), Vec::new(), Vec::new());
    for ((layer, name), number) in read.into_iter().zip(names).zip(0..) {
        entries.push((name, layer.entries));
        indexes.push((BlobIndex(number), layer.index));
        besides.extend(layer.beside);
    }
    let (mut tree, _) = stack(entries)?;
    let mut used = BTreeSet::new();
    for_each_chunk(&mut tree, |chunk| {
        used.insert(chunk.blob);
    });
    // Nodes don't need blobs that no file of the image uses.
    besides.retain(|(blob, _)| used.contains(blob));
    let of_layers = indexes.iter().map(|(blob, index)| (*blob, index.record.clone()));
    let of_besides = besides.iter().map(|(blob, beside)| (*blob, beside.record.clone()));
    let (mut records, mut places) = (Vec::<BlobRecord>::new(), HashMap::new());
    for (blob, record) in of_layers.chain(of_besides).filter(|(blob, _)| used.contains(blob)) {
        // Layers that are equal, or have equal content beside them, have one blob.
        let known = records.iter().position(|known| known.blob.id == record.blob.id);
        places.insert(blob, BlobIndex(known.unwrap_or(records.len()) as u8));
        records.extend(known.is_none().then_some(record));
    }
    for_each_chunk(&mut tree, |chunk| chunk.blob = places[&chunk.blob]);
    let options = BootstrapOptions { chunk_size: Options::CHUNK_SIZE, digest: Algorithm::Blake3 };
    let bootstrap = write_bootstrap(&tree, &records, &options)?;
    let mut seen = HashSet::new();
    indexes.retain(|(_, index)| seen.insert(index.record.blob.id));
    besides.retain(|(_, beside)| seen.insert(beside.record.blob.id));
    Ok(ImageIndex {
        bootstrap,
        layers: indexes.into_iter().map(|(_, index)| index).collect(),
        beside: besides.into_iter().map(|(_, beside)| beside).collect(),
        diff_ids,
        inodes: tree.len(),
    })
}

/// Reads all layers, several at a time. If several cannot be read, the lowest of them is reported.
fn read_all(
    layers: Vec<IndexLayer>,
    scratch: &Scratch,
    threads: usize,
    progress: &dyn Progress,
) -> Result<Vec<layer::Indexed>, BuildError> {
    let count = layers.len();
    let mut beside = (count as u8..).map(BlobIndex);
    let numbered = layers.into_iter().zip((0..).map(BlobIndex)).map(|(layer, own)| {
        let beside = if layer.file.is_none() { beside.next().unwrap_or(own) } else { own };
        (Numbers { own, beside }, layer)
    });
    let todo = Mutex::new(numbered.collect::<Vec<_>>().into_iter());
    let done: Mutex<Vec<_>> = Mutex::new((0..count).map(|_| None).collect());
    let stop = AtomicBool::new(false);
    let next = || lock(&todo).next().filter(|_| !stop.load(Ordering::Relaxed));
    thread::scope(|scope| {
        for _ in 0..threads.clamp(1, count.max(1)) {
            scope.spawn(|| {
                while let Some((numbers, layer)) = next() {
                    let number = usize::from(numbers.own.0);
                    let on_read = |bytes| progress.bytes_read(number, bytes);
                    let content = ChunkContent::Stays(scratch);
                    let read = layer::read(layer, numbers, Options::CHUNK_SIZE, content, &on_read);
                    stop.fetch_or(read.is_err(), Ordering::Relaxed);
                    progress.layer_done(number);
                    lock(&done)[number] = Some(read);
                }
            });
        }
    });
    let done = done.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    // After a failure some were not begun.
    done.into_iter().flatten().collect()
}

/// A poisoned lock means that another thread panicked; the scope passes that on.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
