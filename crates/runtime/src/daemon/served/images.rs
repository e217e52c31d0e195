//! The images that are served at this moment.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use lazuli_image::Digest;
use lazuli_policy::Verified;
use tokio::sync::Mutex;

use super::{image::ServedImage, route::ImageRoute};
use crate::{cache::Cache, daemon::DaemonError, image::StoredImage};

/// By manifest. An image is served as long as a mount holds it.
#[derive(Debug, Default)]
pub(in crate::daemon) struct ServedImages(Mutex<HashMap<Digest, Weak<ServedImage>>>);

impl ServedImages {
    /// All of them.
    pub(in crate::daemon) async fn all(&self) -> Vec<Arc<ServedImage>> {
        self.0.lock().await.values().filter_map(Weak::upgrade).collect()
    }

    /// Returns whether an image is served and has been mounted.
    pub(in crate::daemon) async fn is_started(&self, manifest: &Digest) -> bool {
        let images = self.0.lock().await;
        images.get(manifest).and_then(Weak::upgrade).is_some_and(|image| image.is_started())
    }

    /// The served form of an image, which takes that it may run: the same for all of its mounts.
    pub(in crate::daemon) async fn serve(
        &self,
        stored: StoredImage,
        verified: &Verified,
        route: ImageRoute,
        cache: &Cache,
    ) -> Result<Arc<ServedImage>, DaemonError> {
        if verified.manifest() != stored.manifest_digest {
            return Err(DaemonError::Unverified { image: stored.manifest_digest });
        }
        let mut images = self.0.lock().await;
        images.retain(|_, image| image.strong_count() > 0);
        let digest = stored.manifest_digest;
        if let Some(image) = images.get(&digest).and_then(Weak::upgrade) {
            image.add_route(route);
            return Ok(image);
        }
        let image = Arc::new(ServedImage::new(stored, cache, route)?);
        images.insert(digest, Arc::downgrade(&image));
        Ok(image)
    }
}
