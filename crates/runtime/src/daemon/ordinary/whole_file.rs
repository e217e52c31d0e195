//! Checks files of artifacts once they are complete: the digest of all bytes is the layer's.
//!
//! Readers have seen chunks that match the digests which the image's metadata has of them. If the
//! whole has another digest than the layer, the metadata is a lie. What is found out holds for this
//! description of the layer alone, and for no other image that has the layer.

use std::{
    collections::HashSet,
    io,
    sync::{Arc, Weak},
    time::Duration,
};

use lazuli_image::{Algorithm, Digest};

use super::{
    background::{give_way, in_background},
    restore_layer::{condemn, read_chunk},
};
use crate::{
    cache::{Cache, CachedBlob},
    daemon::{DaemonError, node::Node, served::image::ServedImage},
};

/// The pause between checks for complete files.
const PAUSE: Duration = Duration::from_secs(2);

/// Checks files as they become complete, for as long as the node serves.
pub(in crate::daemon) async fn keep_checking(node: Weak<Node>) {
    // Descriptions of blobs of which nothing more is to be found out.
    let mut done = HashSet::new();
    loop {
        tokio::time::sleep(PAUSE).await;
        let Some(node) = node.upgrade() else { return };
        for image in node.images.all().await {
            for blob in image.blobs() {
                let description = blob.description();
                if done.contains(&description) || !blob.is_complete() {
                    continue;
                }
                // What an image's manifest covers needs no other proof.
                let is_indexed = image.index_of(&blob.id()).is_some();
                let is_known = node.ordinaries.store.is_right_file(&description).is_some();
                if !blob.is_one_file() || !is_indexed || is_known {
                    done.insert(description);
                    continue;
                }
                let (cache, own) = (node.cache.clone(), blob.clone());
                let read = in_background(move || file_digest(&own, &cache)).await;
                // Something was given up while it was read, or is damaged.
                let Some(Ok(digest)) = read else { continue };
                done.insert(description);
                node.judge(blob, digest == blob.id()).await;
            }
        }
    }
}

/// The digest of all content of a blob. Blocks, and gives way to readers.
fn file_digest(blob: &CachedBlob, cache: &Cache) -> io::Result<Digest> {
    let (mut hasher, mut content) = (Algorithm::Sha256.hasher(), Vec::new());
    for chunk in blob.chunks() {
        give_way(cache);
        content.resize(chunk.decoded_size as usize, 0);
        read_chunk(blob, chunk, &mut content)?;
        hasher.update(&content);
    }
    Ok(hasher.finish())
}

impl Node {
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
            if !image.has(blob) {
                continue;
            }
            let (blob, at) = (blob.clone(), mountpoint.clone());
            let cut_off = tokio::task::spawn_blocking(move || condemn(&blob, &image, &at)).await;
            let mountpoint = mountpoint.display();
            match cut_off {
                Ok(Ok(())) => tracing::error!(%mountpoint, "its readers get errors now"),
                Ok(Err(error)) => tracing::error!(%mountpoint, %error, "cannot be cut off"),
                Err(error) => tracing::error!(%mountpoint, %error, "cannot be cut off"),
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
