//! Removes leftovers of images that containerd has removed: metadata, and blobs that no other image
//! on the node has.
//!
//! containerd removes an image while its last container ends, so a file system of the image may
//! live a moment longer, and a worker that takes over needs the metadata until then. Leftovers that
//! cannot be removed at once are marked, and retried later.

use std::{collections::HashSet, io, sync::Weak, time::Duration};

use lazuli_image::Digest;

use crate::{
    daemon::{Images, node::Node},
    image::removed,
};

/// Interval for checking marked images.
const LOOK: Duration = Duration::from_secs(2);

/// Maximum wait of a removal for the disk. A longer one continues by itself.
const REMOVAL: Duration = Duration::from_secs(2);

impl Images {
    /// Removes everything of an image that nothing else uses: containerd has removed the image.
    /// Waits for that, for a while: a kubelet that is short of disk measures right after it has
    /// removed images, and evicts pods if that was not enough.
    pub async fn removed(&self, manifest: Digest) {
        let (node, images) = (self.0.clone(), self.0.root.join("images"));
        let filesystems = node.filesystems.clone();
        let mark = move || {
            removed::mark(&images, &manifest)?;
            // Its last mount may have gone a moment ago.
            filesystems.settle_image(&manifest);
            io::Result::Ok(())
        };
        let marked = tokio::task::spawn_blocking(mark).await;
        if let Ok(Err(error)) = marked {
            tracing::warn!(image = %manifest, %error, "a removed image stays");
        }
        let clearing = tokio::spawn(async move { node.clear_leftovers().await });
        let _ = tokio::time::timeout(REMOVAL, clearing).await;
    }
}

impl Node {
    /// Deletes the leftovers of marked images, as far as possible.
    async fn clear_leftovers(&self) {
        let _clearing = self.admission.pins.clearing.lock().await;
        if self.lifecycle.is_leaving() {
            return;
        }
        let before = self.admission.pins.lock().ever;
        let mut used: HashSet<_> =
            self.images.all().await.iter().map(|image| image.manifest_digest()).collect();
        // Delete nothing without knowing what is used.
        let (Ok(mounts), Ok(filesystems)) = (self.mounts.records(), self.filesystems.images())
        else {
            return;
        };
        let mounted: HashSet<_> = mounts.iter().map(|record| record.manifest_digest).collect();
        used.extend(filesystems);
        let (images, cache, pins) =
            (self.root.join("images"), self.cache.clone(), self.admission.pins.clone());
        let deleted = tokio::task::spawn_blocking(move || {
            for image in removed::marked(&images) {
                // Pulled again while it was being removed.
                if mounted.contains(&image) {
                    removed::unmark(&images, &image);
                }
                if mounted.contains(&image) || used.contains(&image) {
                    continue;
                }
                let only = removed::only_in(&images, &image);
                let discarded = cache.discard(&only);
                {
                    let pinned = pins.lock();
                    // Images pinned meanwhile may be in use, and a blob that is being flushed is
                    // removed later.
                    if pinned.ever != before || !discarded {
                        continue;
                    }
                    if let Err(error) = removed::take_away(&images, &image) {
                        tracing::warn!(%image, %error, "a removed image stays");
                        continue;
                    }
                }
                tracing::info!(%image, blobs = only.len(), "deleted what only a removed image had");
                if let Err(error) = removed::delete(&images, &image) {
                    tracing::warn!(%image, %error, "stays until the next start");
                }
            }
        });
        if let Err(error) = deleted.await {
            tracing::error!(%error, "removed images stay");
        }
    }
}

/// Retries marked leftovers periodically, for as long as the node serves.
pub(in crate::daemon) async fn clear(node: Weak<Node>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(node) = node.upgrade() else { return };
        let images = node.root.join("images");
        let marked = tokio::task::spawn_blocking(move || !removed::marked(&images).is_empty());
        if marked.await.unwrap_or(false) {
            node.clear_leftovers().await;
        }
    }
}
