//! Layers of ordinary images by the digests of their tables of contents.
//!
//! A client that names a layer like this gets the files of the table. Its digest proves them, so
//! they need no statement, and are shown where `run` shows images of such layers. Nothing is said
//! of the layer's tar, which nothing has hashed.

use lazuli_image::{Digest, oci::Descriptor, seekable::SeekableLayer};
use lazuli_policy::Verified;
use lazuli_registry::{ImageName, Manifest, SeekableLayers};

use super::store::Holder;
use crate::{
    daemon::{DaemonError, admission::pins::Pin, api::MountRequest, images::Images, node::Node},
    image::{ImageError, StoredImage, lone_layer},
};

/// A layer that was found by its table of contents.
#[derive(Debug)]
pub(in crate::daemon) struct TocLayer {
    pub(in crate::daemon) layer: SeekableLayer,
    /// SHA-256 of the tar, as the image's configuration claims.
    pub(in crate::daemon) claimed_diff_id: Digest,
}

/// The layer of an ordinary image that `name` names by its table of contents. The digest of a layer
/// as stored is no such name.
pub(in crate::daemon) fn layer_by_toc<'a>(
    manifest: &'a Manifest,
    name: &Digest,
) -> Option<&'a Descriptor> {
    let layers = &manifest.parsed.layers;
    let is_it = |layer: &&Descriptor| {
        SeekableLayer::of(layer).is_some_and(|layer| layer.toc_digest() == *name)
    };
    let is_stored = layers.iter().any(|layer| layer.digest == *name);
    layers.iter().filter(|_| !is_stored).find(is_it)
}

impl Images {
    /// Returns the layer of an ordinary image whose table of contents has the digest `toc`, if the
    /// table is believed here. `request` has the name and digest of the image.
    pub(in crate::daemon) async fn toc_layer(
        &self,
        request: &MountRequest,
        toc: &Digest,
    ) -> Result<Option<TocLayer>, DaemonError> {
        let (name, _) = request.name_and_digest()?;
        let options = self.0.admission.options(request);
        if options.indexes.seekable_layers(&name) == SeekableLayers::Ordinary {
            return Ok(None);
        }
        let Some(image) = self.ordinary_image(request, &name).await? else { return Ok(None) };
        let Some(named) = layer_by_toc(&image.manifest, toc) else { return Ok(None) };
        let claimed = image.layers.iter().find(|layer| layer.digest() == named.digest);
        let claimed = claimed.and_then(|layer| layer.diff_id).zip(SeekableLayer::of(named));
        let layer = claimed.map(|(claimed_diff_id, layer)| TocLayer { layer, claimed_diff_id });
        let Some(layer) = layer else { return Ok(None) };
        let repository = lazuli_registry::open(&name, &options)?;
        let is_shown = image.access.allows(&*repository, None, layer.layer.digest).await?
            && self.0.ordinaries.keep(&image, Holder::LayerStore);
        Ok(is_shown.then_some(layer))
    }
}

impl Node {
    /// `layer` of an ordinary image by its table of contents, as an image, if the image may run.
    pub(super) async fn shown_by_toc(
        &self,
        request: &MountRequest,
        name: &ImageName,
        manifest: &Manifest,
        layer: &Descriptor,
    ) -> Result<(StoredImage, Verified, Pin), DaemonError> {
        let options = self.admission.options(request);
        let repository = lazuli_registry::open(name, &options)?;
        if options.indexes.seekable_layers(name) == SeekableLayers::Ordinary {
            return Err(ImageError::NotLazy { image: name.to_string() }.into());
        }
        let verified = self.admission.admit(request, manifest).await?;
        let lone = lone_layer(manifest, layer)?;
        let images = self.root.join("images");
        let pin = self.admission.pins.pin(&images, lone.digest);
        // Another name of the image may have the same layer.
        let _lock = self.admission.fetch_locks.lock(&lone.digest.to_string()).await;
        let stored = StoredImage::fetch_layer(repository, &lone, &images).await?;
        let verified = verified.of_index(stored.manifest_digest);
        Ok((stored, verified, pin))
    }
}
