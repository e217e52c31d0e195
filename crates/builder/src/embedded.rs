//! One layer as a blob that holds its own bootstrap. [`crate::combine`] makes an image of several.

use std::{fs, path::PathBuf};

use lazuli_image::{
    Algorithm, Digest, InodeId, Tree,
    rafs::{
        BlobRecord, BootstrapOptions, bare_bootstrap, layer_tail, write_bootstrap_with_prefetch,
    },
};

use crate::{
    Dictionary, Layer, Options, Progress,
    build::{StoredLayers, store},
    error::{BuildError, SourceError},
    overlay::Overlay,
    pack::Packing,
    scratch::Scratch,
    whiteout,
};

/// The blob of a layer, in a temporary file.
#[derive(Debug)]
pub struct LayerBlob {
    /// The temporary file, removed on drop.
    pub file: PathBuf,
    /// SHA-256 of it.
    pub id: Digest,
    /// Whether the blob has chunks.
    pub has_content: bool,
    /// Blobs of the dictionary that the layer uses.
    pub known: Vec<Digest>,
    _scratch: Scratch,
}

/// How to treat whiteouts in the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whiteouts {
    /// Drop them: there are no lower layers.
    Applied,
    /// Keep them as files with whiteout names.
    Kept,
}

/// Makes the blob of `layer`. It has all content of the layer except chunks in `dictionary`.
/// `prefetch` lists the inodes that upstream's readers fetch first.
pub fn build_layer(
    mut dictionary: Dictionary,
    layer: Layer,
    whiteouts: Whiteouts,
    prefetch: &dyn Fn(&Tree) -> Vec<InodeId>,
    options: &Options,
    progress: &dyn Progress,
) -> Result<LayerBlob, BuildError> {
    let StoredLayers { scratch, layer_files, ingested } =
        store(&mut dictionary, vec![layer], options, progress)?;
    let mut overlay = match whiteouts {
        Whiteouts::Applied => Overlay::new(),
        Whiteouts::Kept => Overlay::of_one_layer(),
    };
    for (name, mut entries) in ingested.layers {
        if whiteouts == Whiteouts::Kept {
            for entry in &mut entries {
                let shown = entry.path.to_string();
                whiteout::to_marker(entry).map_err(|problem| BuildError::Layer {
                    layer: name.clone(),
                    problem: SourceError::Path { path: shown, problem: problem.to_string() },
                })?;
            }
        }
        overlay.apply(&name, entries)?;
    }
    let mut tree = overlay.finish();
    let packing = Packing::new(ingested.chunks, layer_files, dictionary, &mut tree);
    let (blobs, own) = packing.of_one_layer(&scratch, options)?;
    let known = blobs.iter().map(|record| record.blob.id).collect();
    let layout = BootstrapOptions { chunk_size: options.chunk_size, digest: Algorithm::Blake3 };
    let bootstrap = |blobs: &[BlobRecord]| {
        let prefetch = if blobs.is_empty() { Vec::new() } else { prefetch(&tree) };
        write_bootstrap_with_prefetch(&tree, blobs, &layout, &prefetch)
    };
    let Some(own) = own else {
        let blob = bare_bootstrap(&bootstrap(&blobs)?)?;
        let file = scratch.join("layer");
        fs::write(&file, &blob).map_err(|problem| scratch.failed(problem))?;
        let id = Algorithm::Sha256.digest(&blob);
        return Ok(LayerBlob { file, id, has_content: false, known, _scratch: scratch });
    };
    let file = own.path.clone();
    let with = |own: BlobRecord| {
        let mut all = blobs.clone();
        all.push(own);
        bootstrap(&all)
    };
    let tail = |chunks: &_, hasher| layer_tail(chunks, hasher, options.codec, &with);
    let built = own.seal_with(&scratch, tail, options.codec)?;
    let id = built.record.blob.id;
    Ok(LayerBlob { file, id, has_content: true, known, _scratch: scratch })
}
