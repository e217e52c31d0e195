//! Bootstraps of images whose layers have tables of contents, see [`crate::seekable`]. They are
//! made on the node, and stay there.

use super::{
    BlobRecord, BootstrapOptions, TailInfo, layer_index,
    layout::{Origin, features},
    writer,
};
use crate::{
    Blob, Chunk, Codec, Digest, FormatError, InodeId, Tree, offset::round_up_to_block,
    points::NewPoint,
};

/// Makes a bootstrap's record of a layer of `stored_size` bytes with these chunks, in stored order.
/// Each chunk is in a unit that begins with a gzip member or a zstd frame.
///
/// # Errors
/// There are too many chunks.
pub fn seekable_layer(
    layer: Digest,
    stored_size: u64,
    codec: Codec,
    chunks: Vec<Chunk>,
) -> Result<BlobRecord, FormatError> {
    let error = |problem: &'static str| FormatError::new(("chunks of", layer), 0, problem);
    let count = u32::try_from(chunks.len()).map_err(|_| error("there are too many"))?;
    let end = chunks.last().map_or(0, |chunk| chunk.decoded_end().0);
    let decoded_size = round_up_to_block(end).ok_or_else(|| error("they are too big"))?;
    let mut blob = layer_index::empty(layer, stored_size);
    if codec == Codec::Gzip {
        let in_units = chunks.iter().filter(|chunk| chunk.part.is_some());
        blob.points = in_units.map(begin).collect();
    }
    let blob = Blob { codec, decoded_size, chunks: chunks.into(), ..blob };
    let tail = TailInfo::without_table(features::ALIGNED | features::ZRAN, count, None);
    Ok(BlobRecord { blob, tail })
}

/// The point at the header of the member in which a chunk is.
fn begin(chunk: &Chunk) -> NewPoint {
    NewPoint { stored: chunk.stored, bits: 0, before: 0, window: Vec::new() }
}

/// The image of `tree`, whose files consist of chunks of seekable layers. Those of `prefetch` are
/// read by a start.
///
/// # Errors
/// The tree or the layers do not fit the format or each other.
pub fn write_seekable(
    tree: &Tree,
    layers: &[BlobRecord],
    options: &BootstrapOptions,
    prefetch: &[InodeId],
) -> Result<Vec<u8>, FormatError> {
    writer::write(tree, layers, options, prefetch, Origin::Seekable)
}
