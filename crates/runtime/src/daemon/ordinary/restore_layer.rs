//! Restores layers that arrived in pieces once they are complete, and checks them.
//!
//! This proves, without any network, whether the layer's tar has the stated digest, and so whether
//! skeleton, windows and digests of chunks led to the layer's own files. A layer that is a file of
//! an artifact has its own digest. If the statement is wrong, readers of mounted images get errors,
//! and no new start uses it.

use std::{
    collections::HashSet,
    io,
    os::unix::fs::FileExt as _,
    sync::{Arc, Weak},
    time::Duration,
};

use lazuli_builder::index::diff_id;
use lazuli_image::{Algorithm, Chunk, Digest, rafs::ReadIndex};

use super::{
    background::in_background,
    store::{IndexStore, LayerRecord},
};
use crate::{
    cache::CachedBlob,
    daemon::{DaemonError, node::Node, served::image::ServedImage},
    image::StoredImage,
};

/// Why a layer's digest was not computed.
type Problem = Box<dyn std::error::Error + Send + Sync>;

/// The pause between checks for complete layers.
const PAUSE: Duration = Duration::from_secs(2);

/// Checks layers as they become complete, for as long as the node serves. Layers with the indexes
/// `wrong` have not been served since this worker began.
pub(in crate::daemon) async fn keep_checking(node: Weak<Node>, wrong: Vec<Digest>) {
    for index in wrong {
        let Some(node) = node.upgrade() else { return };
        node.condemn(&index).await;
    }
    // Indexes with a final result.
    let mut done = HashSet::new();
    loop {
        tokio::time::sleep(PAUSE).await;
        let Some(node) = node.upgrade() else { return };
        for image in node.images.all().await {
            for blob in image.blobs() {
                let Some(index) = image.index_of(&blob.id()) else { continue };
                if done.contains(&index) || !blob.is_complete() {
                    continue;
                }
                let layer = blob.id();
                let store = node.ordinaries.store.clone();
                let record = store.layer(&layer).filter(|record| record.index == index);
                let record = match record {
                    Some(record) if record.is_proven => continue,
                    None if image.chunks_of_file(&layer).is_none() => continue,
                    // Nobody has claimed anything else of it.
                    None => LayerRecord { diff_id: layer, index, is_proven: false },
                    Some(record) => record,
                };
                let (image, blob) = (image.clone(), blob.clone());
                match in_background(move || check(&store, &image, &blob, record)).await {
                    Some(Some(is_right)) => {
                        done.insert(index);
                        if !is_right {
                            node.condemn(&index).await;
                        }
                    }
                    Some(None) => {}
                    None => tracing::error!(%layer, "the layer is not checked"),
                }
            }
        }
    }
}

/// Returns whether a complete layer matches its statement; `None` if that cannot be found out.
/// Blocks.
fn check(
    store: &IndexStore,
    image: &ServedImage,
    blob: &CachedBlob,
    record: LayerRecord,
) -> Option<bool> {
    let layer = blob.id();
    let read =
        |chunk: &Chunk, content: &mut [u8]| blob.file().read_exact_at(content, chunk.decoded.0);
    let got: Result<Digest, Problem> = match image.chunks_of_file(&layer) {
        Some(chunks) => file_digest(chunks, read).map_err(Problem::from),
        None => {
            let bytes = store.index(&record.index)?;
            let index = ReadIndex::parse(&bytes, layer, blob.stats().stored_bytes);
            index.map_err(Problem::from).and_then(|index| Ok(diff_id(&index, read)?))
        }
    };
    // Something may have been given up while it was read.
    if !blob.is_complete() {
        return None;
    }
    let is_right = got.as_ref().is_ok_and(|got| *got == record.diff_id);
    let noted = match is_right {
        true => {
            tracing::info!(%layer, "complete, and what was stated of it");
            store.note_layer(&layer, &LayerRecord { is_proven: true, ..record })
        }
        false => {
            tracing::error!(%layer, index = %record.index, expected = %record.diff_id, ?got,
                "an index is wrong: it is not used any more");
            store.note_wrong(&record.index)
        }
    };
    if let Err(error) = noted {
        tracing::warn!(%layer, %error, "it is checked again");
    }
    Some(is_right)
}

/// The digest of a file of which these are all chunks. Blocks.
fn file_digest(
    chunks: &[Chunk],
    read: impl Fn(&Chunk, &mut [u8]) -> io::Result<()>,
) -> io::Result<Digest> {
    let mut hasher = Algorithm::Sha256.hasher();
    let mut content = Vec::new();
    for chunk in chunks {
        content.resize(chunk.decoded_size as usize, 0);
        read(chunk, &mut content)?;
        hasher.update(&content);
    }
    Ok(hasher.finish())
}

impl Node {
    /// Refuses a new start by an index that is known to be wrong.
    pub(in crate::daemon) fn refuse_wrong_indexes(
        &self,
        image: &StoredImage,
    ) -> Result<(), DaemonError> {
        let bootstrap = &image.bootstrap;
        for (blob, tail) in bootstrap.blobs().iter().zip(bootstrap.tails()) {
            if tail.index.is_some_and(|index| self.ordinaries.store.is_wrong(&index.digest)) {
                return Err(DaemonError::WrongIndex { layer: blob.id });
            }
        }
        Ok(())
    }

    /// Makes reads of adopted images fail if an earlier worker found their indexes wrong, and
    /// returns these indexes. Must be called before any reader is answered.
    pub(in crate::daemon) async fn refuse_wrong(&self) -> Vec<Digest> {
        let mut wrong = Vec::new();
        for image in self.images.all().await {
            for blob in image.blobs() {
                let index = image.index_of(&blob.id());
                let is_wrong = |index: &Digest| self.ordinaries.store.is_wrong(index);
                let Some(index) = index.filter(is_wrong) else { continue };
                wrong.push(index);
                let (layer, blob) = (blob.id(), blob.clone());
                match tokio::task::spawn_blocking(move || blob.refuse()).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::error!(%layer, %error, "cannot be cut off"),
                    Err(error) => tracing::error!(%layer, %error, "cannot be cut off"),
                }
            }
        }
        wrong
    }

    /// Makes all reads fail that this index leads to.
    async fn condemn(&self, index: &Digest) {
        for (mountpoint, image) in self.mounts.served().await {
            let Some(blob) = image.blob_of_index(index) else { continue };
            let condemned = {
                let (image, mountpoint) = (image.clone(), mountpoint.clone());
                tokio::task::spawn_blocking(move || condemn(&blob, &image, &mountpoint)).await
            };
            let mountpoint = mountpoint.display();
            match condemned {
                Ok(Ok(())) => tracing::error!(%mountpoint, "its readers get errors now"),
                Ok(Err(error)) => tracing::error!(%mountpoint, %error, "cannot be cut off"),
                Err(error) => tracing::error!(%mountpoint, %error, "cannot be cut off"),
            }
        }
    }
}

fn condemn(
    blob: &CachedBlob,
    image: &Arc<ServedImage>,
    mountpoint: &std::path::Path,
) -> std::io::Result<()> {
    blob.condemn()?;
    blob.forget_pages();
    image.forget_missing(mountpoint)
}
