//! Indexes of single layers, in a repository that has them by the layers' digests.

use anyhow::{Context as _, Result};
use bytes::Bytes;
use lazuli_image::{
    Algorithm, Digest,
    oci::{EMPTY_CONFIG, IndexedLayer, layer_index_manifest, layer_index_tag, media_type},
    rafs::{ReadIndex, WrittenIndex},
};
use lazuli_policy::{LayerIndexing, StatedLayer};
use lazuli_registry::{BlobContent, Document, ImageName, Options, PushBy};

use super::{push, sign::Signer};
use crate::convert::statement::this_program;

/// The result of storing the indexes.
#[derive(Debug, Default)]
pub(crate) struct StoredIndexes {
    /// Bytes of indexes.
    pub(crate) bytes: u64,
    /// Bytes that the repository did not have.
    pub(crate) uploaded: u64,
    /// Layers that cannot be shown by an index of their own.
    pub(crate) left_out: Vec<Digest>,
}

/// Stores indexes of layers in the repository `to`, of which `stated` is known.
///
/// # Errors
/// The repository refuses, or `signer` cannot sign.
pub(crate) async fn store_layers(
    to: &ImageName,
    access: &Options,
    layers: &[WrittenIndex],
    stated: &[StatedLayer],
    signer: Option<&Signer>,
) -> Result<StoredIndexes> {
    let mut stored = StoredIndexes::default();
    for written in layers {
        let layer = written.record.blob.id;
        let stated = stated.iter().find(|stated| stated.layer == layer);
        let (Some(index), Some(stated)) = (IndexedLayer::of(written), stated) else { continue };
        if !is_whole(written) {
            stored.left_out.push(layer);
            continue;
        }
        let name = to.tagged(&layer_index_tag(&layer));
        let name = name.with_context(|| format!("no index in {to} can have a tag"))?;
        let place = lazuli_registry::open(&name, access)?;
        let manifest = layer_index_manifest(&index)?;
        let document = Document::new(manifest, media_type::MANIFEST);
        let blobs = [&written.bytes[..], EMPTY_CONFIG].map(|bytes| {
            let content = BlobContent::Bytes(Bytes::copy_from_slice(bytes));
            (Algorithm::Sha256.digest(bytes), bytes.len() as u64, content)
        });
        stored.uploaded += push::upload(&*place, blobs.into(), None, &|_| {}).await?;
        stored.bytes += index.size;
        // The statement is stored before the layer's tag names the manifest.
        place.push_document(&document, PushBy::Digest).await?;
        if let Some(signer) = signer {
            let indexing = LayerIndexing { converter: this_program()?, layer: *stated };
            signer.state_layer(&*place, &document, &indexing).await?;
        }
        place.push_document(&document, PushBy::Tag).await?;
    }
    Ok(stored)
}

/// Returns whether a layer can be restored from its index and its chunks: then its tree can be made
/// from its index.
fn is_whole(written: &WrittenIndex) -> bool {
    let blob = &written.record.blob;
    let read = ReadIndex::parse(&written.bytes, blob.id, blob.stored_size);
    read.is_ok_and(|read| read.skeleton.is_some())
}
