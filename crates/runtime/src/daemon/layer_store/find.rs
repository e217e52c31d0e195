//! Finds layers of images by the names that clients have for them.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use lazuli_builder::index::tar_size;
use lazuli_image::{Algorithm, Codec, Digest, rafs::ReadIndex};
use lazuli_registry::{ImageName, Manifest, Reference, SeekableLayers};
use lazuli_sys::path_error::At as _;
use tokio::sync::OwnedMutexGuard;

use super::held::{HeldLayer, request};
use crate::{
    daemon::{
        DaemonError,
        images::Images,
        ordinary::toc_layer::{TocLayer, layer_by_toc},
    },
    kernel::layer_store::LayerName,
};

/// Deadline of a search. The client waits, and pulls the layer afterwards.
const LOOK_WITHIN: Duration = Duration::from_secs(20);

impl Images {
    /// A layer that may be shown, or was found before.
    pub(super) async fn find_held(&self, name: &LayerName) -> Option<HeldLayer> {
        let _one = self.lock_layers(name).await;
        self.find_locked(name).await
    }

    /// The same, and keeps it from being removed until the result is dropped.
    pub(super) async fn find_to_use(&self, name: &LayerName) -> Option<OwnedMutexGuard<()>> {
        let one = self.lock_layers(name).await;
        self.find_locked(name).await.map(|_| one)
    }

    /// Keeps the layers of an image from being found or removed by others.
    pub(super) async fn lock_layers(&self, name: &LayerName) -> OwnedMutexGuard<()> {
        self.0.admission.fetch_locks.lock(&format!("layers of {}", name.image)).await
    }

    /// Keeps the documents of an image, which may have several names, as they are.
    pub(super) async fn lock_documents(&self, manifest: &Digest) -> OwnedMutexGuard<()> {
        self.0.admission.fetch_locks.lock(&format!("documents of {manifest}")).await
    }

    async fn find_locked(&self, name: &LayerName) -> Option<HeldLayer> {
        let store = &self.0.layer_store;
        if let Some(held) = store.look_up(name) {
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
        found.inspect_err(failed).ok()?
    }

    /// Finds a layer, and holds it.
    async fn look(&self, name: &LayerName) -> Result<Option<HeldLayer>, DaemonError> {
        let LayerName { image, layer } = name;
        // Never a file of this node.
        let Ok(reference) = image.parse::<Reference>() else { return Ok(None) };
        let image_name = ImageName::Registry(reference);
        let options = &self.0.admission.registry;
        let may_show_tables = options.indexes.seekable_layers(&image_name) == SeekableLayers::Lazy;
        if !may_show_tables && !self.may_know_layers(&image_name) {
            return Ok(None);
        }
        let Some(manifest) = self.meaning(image, &image_name).await? else { return Ok(None) };
        let pinned = image_name.pinned_to(manifest.digest);
        self.0.admission.recent.insert(&pinned, manifest.clone());
        let pinned = pinned.to_string();
        let driver = self.0.layer_store.driver();
        // They stay until the layer is held.
        let _documents = self.lock_documents(&manifest.digest).await;
        let request = request(image, &pinned, PathBuf::from("/"), driver);
        let held = |layer, stored_size, diff_id| HeldLayer {
            image: image.clone(),
            layer,
            toc: None,
            manifest: manifest.digest,
            pinned: pinned.clone(),
            diff_id,
            index: None,
            stored_size,
            tar_size: None,
            is_gzip: false,
            users: 0,
            since: SystemTime::now(),
        };
        let found = match layer_by_toc(&manifest, layer) {
            Some(_) => {
                let found = self.toc_layer(&request, layer).await?;
                found.map(|TocLayer { layer, claimed_diff_id }| HeldLayer {
                    toc: Some(layer.toc_digest()),
                    is_gzip: layer.codec() == Codec::Gzip,
                    ..held(layer.digest, layer.size, claimed_diff_id)
                })
            }
            None if self.may_know_layers(&image_name) => {
                let known = self.single_layer(&request, layer).await?;
                known.and_then(|known| {
                    let held = held(known.digest, known.stored_size, known.diff_id);
                    by_index(held, &known.index)
                })
            }
            None => None,
        };
        if let Some(found) = &found {
            self.0.layer_store.hold(found.clone()).at(&self.0.root)?;
        }
        Ok(found)
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

/// A layer that is shown by its index `index`.
fn by_index(held: HeldLayer, index: &[u8]) -> Option<HeldLayer> {
    let digest = Algorithm::Sha256.digest(index);
    let index = ReadIndex::parse(index, held.layer, held.stored_size);
    let index = index.inspect_err(|error| tracing::warn!(%error, "not usable")).ok()?;
    Some(HeldLayer {
        index: Some(digest),
        // Known as long as the layer has a skeleton, which every layer that is shown has.
        tar_size: tar_size(&index).ok(),
        // Layers of other compressions have no index.
        is_gzip: held.diff_id != held.layer,
        ..held
    })
}
