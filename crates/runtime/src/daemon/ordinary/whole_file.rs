//! Checks files of artifacts once they are complete: the digest of all bytes is the layer's.
//!
//! Readers have seen chunks that match the digests which the image's metadata has of them. If the
//! whole has another digest than the layer, the metadata is a lie. What is found out holds for this
//! description of the layer alone, and for no other image that has the layer.

use std::{
    io,
    sync::{Arc, Weak},
};

use lazuli_image::{Algorithm, Digest};

use super::{
    background::{give_way, in_background},
    checks::{Checks, PAUSE},
    restore_layer::{cut_off, read_chunk},
};
use crate::{
    cache::{Cache, CachedBlob},
    daemon::{DaemonError, node::Node, served::image::ServedImage},
};

/// Checks files as they become complete, for as long as the node serves.
pub(in crate::daemon) async fn keep_checking(node: Weak<Node>) {
    // By their descriptions.
    let mut checks = Checks::default();
    loop {
        tokio::time::sleep(PAUSE).await;
        let Some(serving) = node.upgrade() else { return };
        let complete = serving.complete_blobs().await;
        drop(serving);
        for blob in complete {
            check(&node, &blob, &mut checks).await;
        }
    }
}

/// Checks a blob if it is a file that has not been checked. Holds neither the node nor the blob
/// while all of it is read: that takes minutes.
async fn check(node: &Weak<Node>, blob: &Weak<CachedBlob>, checks: &mut Checks) {
    let Some((serving, own)) = node.upgrade().zip(blob.upgrade()) else { return };
    let (layer, description) = (own.id(), own.description());
    if !checks.is_due(&description) {
        return;
    }
    if !own.is_one_file() || serving.ordinaries.store.is_right_file(&description).is_some() {
        return checks.finish(description);
    }
    let cache = Arc::downgrade(&serving.cache);
    drop((serving, own));
    let read = {
        let blob = blob.clone();
        in_background(move || file_digest(&blob, &cache)).await
    };
    match (read, node.upgrade().zip(blob.upgrade())) {
        (Some(Ok(digest)), Some((node, blob))) => {
            checks.finish(description);
            node.judge(&blob, digest == layer).await;
        }
        _ => checks.put_off(description),
    }
}

/// The digest of all content of a blob, while it is in use. Blocks, and gives way to readers.
fn file_digest(blob: &Weak<CachedBlob>, cache: &Weak<Cache>) -> io::Result<Digest> {
    let (mut hasher, mut content) = (Algorithm::Sha256.hasher(), Vec::new());
    for at in 0.. {
        let in_use = cache.upgrade().zip(blob.upgrade());
        let (cache, blob) = in_use.ok_or(io::ErrorKind::NotFound)?;
        let Some(chunk) = blob.chunks().get(at) else { break };
        give_way(&cache);
        content.resize(chunk.decoded_size as usize, 0);
        read_chunk(&blob, chunk, &mut content)?;
        hasher.update(&content);
    }
    Ok(hasher.finish())
}

impl Node {
    /// Complete blobs of images whose data an index leads to. What a manifest covers needs no other
    /// proof.
    async fn complete_blobs(&self) -> Vec<Weak<CachedBlob>> {
        let images = self.images.all().await;
        let blobs = images.iter().flat_map(|image| {
            image.blobs().iter().filter(|blob| image.index_of(&blob.id()).is_some())
        });
        blobs.filter(|blob| blob.is_complete()).map(Arc::downgrade).collect()
    }

    /// Notes whether a file is the layer that it should be. If not, its readers get errors.
    async fn judge(&self, blob: &Arc<CachedBlob>, is_right: bool) {
        let (layer, description) = (blob.id(), blob.description());
        if let Err(error) = self.ordinaries.store.note_file(&description, is_right) {
            tracing::warn!(%layer, %error, "it is checked again by the next worker");
        }
        if is_right {
            tracing::info!(%layer, "complete, and the file that it should be");
            return;
        }
        tracing::error!(%layer, "the metadata leads to another file than the layer");
        for (mountpoint, image) in self.mounts.served().await {
            if image.has(blob) {
                cut_off(blob, &image, &mountpoint).await;
            }
        }
    }

    /// Refuses an image with a file that is known to be another one than its layer.
    pub(in crate::daemon) fn refuse_wrong_files(
        &self,
        image: &ServedImage,
    ) -> Result<(), DaemonError> {
        let store = &self.ordinaries.store;
        let is_wrong =
            |blob: &&Arc<CachedBlob>| store.is_right_file(&blob.description()) == Some(false);
        match image.blobs().iter().find(is_wrong) {
            Some(blob) => Err(DaemonError::WrongFile { layer: blob.id() }),
            None => Ok(()),
        }
    }
}
