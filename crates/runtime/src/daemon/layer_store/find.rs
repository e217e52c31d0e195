//! Finds layers of images by the names that clients have for them.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use lazuli_builder::index::{KnownLayer, tar_size};
use lazuli_image::rafs::ReadIndex;
use lazuli_registry::{ImageName, Manifest, Reference};

use super::held::{HeldLayer, request};
use crate::{
    daemon::{DaemonError, images::Images},
    kernel::layer_store::LayerName,
};

/// Deadline of a search. The client waits, and pulls the layer afterwards.
const LOOK_WITHIN: Duration = Duration::from_secs(20);

impl Images {
    /// A layer that may be shown.
    pub(super) async fn find_held(&self, name: &LayerName) -> Option<HeldLayer> {
        let store = &self.0.layer_store;
        let _one = self.0.admission.fetch_locks.lock(&format!("layers of {}", name.image)).await;
        if let Some(held) = store.held(name) {
            return Some(held);
        }
        let found = match tokio::time::timeout(LOOK_WITHIN, self.look(name)).await {
            Ok(found) => found,
            Err(_) => {
                // Its other layers would wait as long.
                store.recent.insert(&name.image, None);
                tracing::warn!(layer = %name, "not found in time: the client pulls it");
                return None;
            }
        };
        let failed = |error: &DaemonError| {
            let error = error.for_people();
            tracing::warn!(layer = %name, error, "the client pulls a layer");
        };
        let held = found.inspect_err(failed).ok()??;
        match store.hold(held.clone()) {
            Ok(()) => Some(held),
            Err(error) => {
                tracing::warn!(layer = %name, %error, "the client pulls a layer");
                None
            }
        }
    }

    async fn look(&self, name: &LayerName) -> Result<Option<HeldLayer>, DaemonError> {
        let LayerName { image, layer } = name;
        // Never a file of this node.
        let Ok(reference) = image.parse::<Reference>() else { return Ok(None) };
        let image_name = ImageName::Registry(reference);
        if !self.may_know_layers(&image_name) {
            return Ok(None);
        }
        let Some(manifest) = self.meaning(image, &image_name).await? else { return Ok(None) };
        let pinned = image_name.pinned_to(manifest.digest);
        self.0.admission.recent.insert(&pinned, manifest.clone());
        let pinned = pinned.to_string();
        let driver = self.0.layer_store.driver();
        let request = request(image, &pinned, PathBuf::from("/"), driver);
        let Some(known) = self.single_layer(&request, layer).await? else { return Ok(None) };
        let KnownLayer { digest, stored_size, diff_id, index } = known;
        let index = ReadIndex::parse(&index, digest, stored_size);
        let Ok(index) = index.inspect_err(|error| tracing::warn!(%error, "not usable")) else {
            return Ok(None);
        };
        // Known as long as the layer has a skeleton, which every layer that is shown has.
        let tar_size = tar_size(&index).ok();
        Ok(Some(HeldLayer {
            image: image.clone(),
            layer: *layer,
            manifest: manifest.digest,
            pinned,
            diff_id,
            stored_size,
            tar_size,
            // Layers of other compressions have no index.
            is_gzip: diff_id != digest,
            users: 0,
            since: SystemTime::now(),
        }))
    }

    /// The manifest that a name means now. Failures are remembered as well.
    async fn meaning(
        &self,
        image: &str,
        name: &ImageName,
    ) -> Result<Option<Arc<Manifest>>, DaemonError> {
        let recent = &self.0.layer_store.recent;
        if let Some(known) = recent.get(image) {
            return Ok(known.manifest);
        }
        let repository = lazuli_registry::open(name, &self.0.admission.registry)?;
        let manifest = repository.manifest(None).await;
        let manifest = manifest.map(Arc::new).inspect_err(|_| recent.insert(image, None))?;
        recent.insert(image, Some(manifest.clone()));
        Ok(Some(manifest))
    }
}
