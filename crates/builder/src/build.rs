//! Building an image from its layers.

use std::{collections::HashSet, time::Instant};

use lazuli_image::{
    Algorithm, ChunkRef, Digest, Tree,
    compare::Content,
    rafs::{BlobRecord, BootstrapOptions, write_bootstrap},
};

use crate::{
    Dictionary, Layer, LayerSource, ReadLayer,
    built_blob::BuiltBlob,
    dedup::Chunks,
    entry::EntryKind,
    error::BuildError,
    layer_file::{Finished, LayerFile},
    options::{MAX_BLOBS, Options, check_chunk_size},
    overlay::Overlay,
    pack::Packing,
    pipeline::{IngestSettings, Ingested, Store, ingest},
    report::{Progress, Report},
    scratch::Scratch,
};

/// A finished image. Its files go when it is dropped.
#[derive(Debug)]
pub struct Built {
    /// The metadata file.
    pub bootstrap: Vec<u8>,
    /// The data blobs, in the order of the bootstrap's blob table.
    pub blobs: Vec<BuiltBlob>,
    /// Figures.
    pub report: Report,
}

/// Makes an image of `layers`, lowest first.
///
/// # Errors
/// Nothing is left in the scratch directory after an error, nor after [`Built`] is dropped.
pub fn build(
    layers: Vec<Layer>,
    options: &Options,
    progress: &dyn Progress,
) -> Result<Built, BuildError> {
    build_with(Dictionary::default(), layers, options, progress, &mut |_| {})
}

/// Builds the same image, but refers to `dictionary` for content that its blobs have. Skips blobs
/// that do not match `options` or exceed the limit of blobs. Calls `keep` with each layer read.
pub fn build_with(
    mut dictionary: Dictionary,
    layers: Vec<Layer>,
    options: &Options,
    progress: &dyn Progress,
    keep: &mut dyn FnMut(ReadLayer<'_>),
) -> Result<Built, BuildError> {
    let start = Instant::now();
    let is_read = |layer: &Layer| !matches!(layer.source, LayerSource::Known(_));
    let read: Vec<bool> = layers.iter().map(is_read).collect();
    let stored = store(&mut dictionary, layers, options, progress)?;
    let StoredLayers { scratch, layer_files, ingested: Ingested { layers, chunks } } = stored;
    for (layer, (_, entries)) in layers.iter().enumerate().filter(|(layer, _)| read[*layer]) {
        keep(ReadLayer { chunk_size: options.chunk_size, layer, entries, chunks: &chunks });
    }
    let mut report = figures(&layers, &chunks);
    let (mut tree, dropped_xattrs) = stack(layers)?;
    let packing = Packing::new(chunks, layer_files, dictionary, &mut tree);
    let blobs = packing.write(&scratch, options)?;
    let records: Vec<BlobRecord> = blobs.iter().map(|blob| blob.record.clone()).collect();
    let layout = BootstrapOptions { chunk_size: options.chunk_size, digest: Algorithm::Blake3 };
    let bootstrap = write_bootstrap(&tree, &records, &layout)?;
    report.inodes = tree.len();
    report.dropped_xattrs = dropped_xattrs;
    report.read_layers = read.iter().filter(|read| **read).count();
    report.stored_bytes = records.iter().map(|record| record.blob.stored_size).sum();
    report.blobs = blobs.len();
    let known = blobs.iter().filter(|blob| blob.file.is_none());
    report.known_blobs = known.clone().count();
    report.known_bytes = known.map(|blob| blob.record.blob.stored_size).sum();
    report.bootstrap_bytes = bootstrap.len() as u64;
    report.elapsed = start.elapsed();
    Ok(Built { bootstrap, blobs, report })
}

/// Layers that were read, with their new content in layer files.
pub(crate) struct StoredLayers {
    pub(crate) scratch: Scratch,
    /// One per layer.
    pub(crate) layer_files: Vec<Finished>,
    pub(crate) ingested: Ingested,
}

/// Reads layers, and compresses and stores the chunks missing from `dictionary`. Removes blobs from
/// `dictionary` that the image cannot use.
pub(crate) fn store(
    dictionary: &mut Dictionary,
    layers: Vec<Layer>,
    options: &Options,
    progress: &dyn Progress,
) -> Result<StoredLayers, BuildError> {
    options.check()?;
    let count = layers.len();
    check_blobs("layers", count)?;
    dictionary.fit(options, MAX_BLOBS - count);
    let scratch = Scratch::new(&options.scratch)?;
    let layer_files: Vec<_> =
        (0..count).map(|index| LayerFile::new(&scratch, &format!("layer{index}"))).collect();
    let Options { codec, level, batch_size, .. } = *options;
    let store = Store { codec, level, batch_size, layer_files: &layer_files };
    let settings = IngestSettings {
        chunk_size: options.chunk_size,
        algorithm: Algorithm::Blake3,
        threads: options.threads,
        store: Some(store),
    };
    let ingested = ingest(layers, &settings, dictionary, progress)?;
    let layer_files = layer_files.into_iter().filter_map(LayerFile::finish).collect();
    Ok(StoredLayers { scratch, layer_files, ingested })
}

/// The result of [`merge`].
#[derive(Debug)]
pub struct Merged {
    /// The tree. Its [`ChunkRef`]s are valid only in [`Content::chunk`] of this result.
    pub tree: Tree,
    chunks: Chunks,
}

impl Content for Merged {
    fn tree(&self) -> &Tree {
        &self.tree
    }

    fn chunk(&self, chunk: ChunkRef) -> Option<(Digest, u32)> {
        let layer = self.chunks.layers.get(usize::from(chunk.blob.0))?;
        let id = layer.get(chunk.number as usize)?;
        let distinct = self.chunks.distinct.get(id.0 as usize)?;
        Some((distinct.digest, distinct.decoded_size))
    }
}

/// Computes the tree of an image of `layers`, with the digests of all content, as [`build`] does,
/// but stores nothing. `chunk_size` and `algorithm` are those of the image to compare with.
pub fn merge(
    layers: Vec<Layer>,
    chunk_size: u32,
    algorithm: Algorithm,
    threads: usize,
    progress: &dyn Progress,
) -> Result<Merged, BuildError> {
    check_chunk_size(chunk_size)?;
    check_blobs("layers", layers.len())?;
    let settings = IngestSettings { chunk_size, algorithm, threads: threads.max(1), store: None };
    let none = Dictionary::default();
    let Ingested { layers, chunks } = ingest(layers, &settings, &none, progress)?;
    let (tree, _) = stack(layers)?;
    Ok(Merged { tree, chunks })
}

/// Checks that the format has room for `count` blobs; `what` names them in the error.
pub(crate) fn check_blobs(what: &'static str, count: usize) -> Result<(), BuildError> {
    if count <= MAX_BLOBS {
        return Ok(());
    }
    Err(BuildError::TooMany { what, count: count as u64, limit: MAX_BLOBS as u64 })
}

pub(crate) type Entries = Vec<(String, Vec<crate::Entry>)>;

pub(crate) fn stack(layers: Entries) -> Result<(Tree, u64), BuildError> {
    let mut overlay = Overlay::new();
    for (name, entries) in layers {
        overlay.apply(&name, entries)?;
    }
    let dropped = overlay.dropped_xattrs();
    Ok((overlay.finish(), dropped))
}

fn figures(layers: &Entries, chunks: &Chunks) -> Report {
    let entries = layers.iter().flat_map(|(_, entries)| entries);
    let content = entries.map(|entry| match entry.kind {
        EntryKind::Regular { size, .. } => size,
        _ => 0,
    });
    // Not all that the dictionary has.
    let used: HashSet<_> = chunks.layers.iter().flatten().map(|id| id.0 as usize).collect();
    let distinct = used.iter().map(|id| u64::from(chunks.distinct[*id].decoded_size));
    Report {
        layers: layers.len(),
        content_bytes: content.sum(),
        chunks: chunks.layers.iter().map(|layer| layer.len() as u64).sum(),
        distinct_chunks: used.len() as u64,
        distinct_bytes: distinct.sum(),
        ..Report::default()
    }
}
