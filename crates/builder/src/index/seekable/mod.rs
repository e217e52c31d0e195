//! Makes an image from layers with tables of contents.
//!
//! ```text
//! tables of contents ─┬─ entries ─ overlay ─ tree ─┬─ bootstrap
//!                     └─ pieces of files ─ chunks ─┘
//! ```

mod layer;
mod pieces;

use lazuli_image::{
    Algorithm, BlobIndex, Codec, InodeId, Kind, Points, Stored, Tree,
    chunk::MAX_UNIT,
    rafs::{BlobRecord, BootstrapOptions, write_seekable},
    seekable::SeekableLayer,
};

use super::{MAX_LAYERS, memory::share};
use crate::{build::stack, error::BuildError, pack::for_each_chunk, whiteout};

/// Maximum number of chunk-sized parts of all files. A part takes 8 bytes of the bootstrap; with
/// the smallest chunk size this is 64 GiB of content.
const MAX_PARTS: u64 = 16 << 20;

/// A seekable layer with its table of contents.
#[derive(Clone, Debug)]
pub struct LayerToc {
    /// The manifest's description.
    pub layer: SeekableLayer,
    /// The table, unpacked and compared with its digest.
    pub toc: Vec<u8>,
    /// End of the files' content in the layer.
    pub end: Stored,
}

/// An image of seekable layers.
#[derive(Clone, Debug)]
pub struct SeekableImage {
    /// The metadata file. It is for this node, and not for a registry.
    pub bootstrap: Vec<u8>,
    /// Points at which decoders can begin in its gzip layers.
    pub points: Vec<(BlobIndex, Points)>,
}

/// Makes the image of `layers`, lowest first, from their tables alone. Memory is that of the tree.
///
/// # Errors
/// A table is damaged or hostile, lists a file that cannot be read in parts, or takes too much
/// memory.
pub fn assemble_seekable(layers: &[LayerToc]) -> Result<SeekableImage, BuildError> {
    let (count, limit) = (layers.len() as u64, MAX_LAYERS as u64);
    if count > limit {
        return Err(BuildError::TooMany { what: "layers", count, limit });
    }
    let mut memory = share();
    let read = layers.iter().zip(0..).map(|(layer, number)| {
        Ok((layer.layer.digest.to_string(), layer::read(layer, number, &mut memory)?))
    });
    join(read.collect::<Result<_, BuildError>>()?)
}

/// Makes the image that has the tree of `layer` alone, as a lower directory of overlayfs: whiteouts
/// are character devices and attributes.
///
/// # Errors
/// As [`assemble_seekable`]. The layer has files in directories that it does not list, whose owner
/// and mode are those of lower layers, or other content that depends on these.
pub fn assemble_seekable_one(layer: &LayerToc) -> Result<SeekableImage, BuildError> {
    let name = layer.layer.digest.to_string();
    let mut read = layer::read(layer, 0, &mut share())?;
    whiteout::to_overlayfs(&mut read.entries)
        .map_err(|problem| BuildError::Layer { layer: name.clone(), problem })?;
    join(vec![(name, read)])
}

/// Makes the image of layers that were read, each with its name.
fn join(layers: Vec<(String, layer::Read)>) -> Result<SeekableImage, BuildError> {
    let (mut entries, mut read) = (Vec::new(), Vec::new());
    let mut chunk_size = MAX_UNIT;
    for (name, layer::Read { entries: own, record, landmark, divisor }) in layers {
        entries.push((name, own));
        chunk_size = chunk_size.min(divisor);
        read.push((record, landmark));
    }
    let (mut tree, _) = stack(entries)?;
    let (records, landmarks) = used(&mut tree, read);
    must_fit(&tree, chunk_size)?;
    let options = BootstrapOptions { chunk_size, digest: Algorithm::Sha256 };
    let hot = hot(&tree, &records, &landmarks);
    let bootstrap = write_seekable(&tree, &records, &options, &hot)?;
    let gzip = (0..).zip(&records).filter(|(_, record)| record.blob.codec == Codec::Gzip);
    let points = gzip.map(|(index, record)| (BlobIndex(index), record.blob.points.clone()));
    Ok(SeekableImage { bootstrap, points: points.collect() })
}

/// Bounds the bootstrap's size: a table may make the chunk size small while a few bytes of another
/// one claim large files.
fn must_fit(tree: &Tree, chunk_size: u32) -> Result<(), BuildError> {
    let parts = |id| match &tree[InodeId(id)].kind {
        Kind::Regular { size, .. } => size.div_ceil(chunk_size.into()),
        _ => 0,
    };
    let count = (0..tree.len() as u32).fold(0_u64, |sum, id| sum.saturating_add(parts(id)));
    if count > MAX_PARTS {
        return Err(BuildError::TooMany { what: "parts of files", count, limit: MAX_PARTS });
    }
    Ok(())
}

/// The layers whose chunks the image uses, each once, with their landmarks.
fn used(
    tree: &mut Tree,
    layers: Vec<(BlobRecord, Option<Stored>)>,
) -> (Vec<BlobRecord>, Vec<Option<Stored>>) {
    let mut is_used = vec![false; layers.len()];
    for_each_chunk(tree, |chunk| is_used[usize::from(chunk.blob.0)] = true);
    let (mut records, mut landmarks) = (Vec::<BlobRecord>::new(), Vec::new());
    let mut places = vec![BlobIndex(0); layers.len()];
    for (at, (record, landmark)) in layers.into_iter().enumerate().filter(|(at, _)| is_used[*at]) {
        // Layers that are equal have one blob.
        let known = records.iter().position(|known| known.blob.id == record.blob.id);
        places[at] = BlobIndex(known.unwrap_or(records.len()) as u8);
        if known.is_none() {
            records.push(record);
            landmarks.push(landmark);
        }
    }
    for_each_chunk(tree, |chunk| chunk.blob = places[usize::from(chunk.blob.0)]);
    (records, landmarks)
}

/// The files whose content begins before the landmark of their layer.
fn hot(tree: &Tree, records: &[BlobRecord], landmarks: &[Option<Stored>]) -> Vec<InodeId> {
    let is_hot = |id: &InodeId| {
        let Kind::Regular { chunks, .. } = &tree[*id].kind else { return false };
        let Some(first) = chunks.first() else { return false };
        let blob = usize::from(first.blob.0);
        let chunk = records[blob].blob.chunk(first.number);
        chunk.zip(landmarks[blob]).is_some_and(|(chunk, landmark)| chunk.stored < landmark)
    };
    (0..tree.len() as u32).map(InodeId).filter(is_hot).collect()
}
