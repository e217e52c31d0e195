//! Mounts of ordinary images, and of their layers.

use std::sync::Arc;

use futures_util::future::join_all;
use lazuli_image::Digest;
use lazuli_policy::Verified;
use lazuli_registry::{ImageName, IndexTrust, Manifest};

use super::{made_images::Part, toc_layer::layer_by_toc, vouched::Vouched};
use crate::{
    daemon::{DaemonError, admission::pins::Pin, api::MountRequest, node::Node},
    image::StoredImage,
};

/// A mounted image: the image made by this node, its admission, the manifest of the ordinary image,
/// and a pin on its files.
type Shown = (StoredImage, Verified, Arc<Manifest>, Pin);

impl Node {
    /// The lowest `count` layers of an ordinary image that containerd has, as an image, if all of
    /// them may still be shown and the image may run.
    pub(in crate::daemon) async fn prefix(
        &self,
        request: &MountRequest,
        name: &ImageName,
        count: u32,
    ) -> Result<Shown, DaemonError> {
        let manifest = self.known_manifest(request, name).await?;
        self.shown(request, name, manifest, Part::Lowest(count)).await
    }

    /// One layer of an ordinary image as an image: on the same conditions, or by its table of
    /// contents if `layer` is the digest of that.
    pub(in crate::daemon) async fn one_layer(
        &self,
        request: &MountRequest,
        name: &ImageName,
        layer: Digest,
    ) -> Result<Shown, DaemonError> {
        let manifest = self.known_manifest(request, name).await?;
        let Some(by_toc) = layer_by_toc(&manifest, &layer) else {
            return self.shown(request, name, manifest, Part::One(layer)).await;
        };
        let (stored, verified, pin) = self.shown_by_toc(request, name, &manifest, by_toc).await?;
        Ok((stored, verified, manifest, pin))
    }

    async fn known_manifest(
        &self,
        request: &MountRequest,
        name: &ImageName,
    ) -> Result<Arc<Manifest>, DaemonError> {
        let (_, digest) = request.name_and_digest()?;
        match self.admission.recent.get(name) {
            Some(manifest) => Ok(manifest),
            None => self.ordinaries.manifest(name, &digest, &self.admission.options(request)).await,
        }
    }

    /// All layers of an image or artifact without an index as an image, if this node has hashed
    /// them, or each has a statement of its own.
    pub(in crate::daemon) async fn by_layers(
        &self,
        request: &MountRequest,
        name: &ImageName,
        manifest: &Arc<Manifest>,
    ) -> Result<Option<Shown>, DaemonError> {
        if manifest.parsed.lazy_base().is_some() || !self.may_index() {
            return Ok(None);
        }
        let may_be_stated = || {
            self.admission.registry.indexes != IndexTrust::Proven
                && self.ordinaries.settings.repository.is_some()
                && self.ordinaries.may_be_signed(name)
        };
        if !self.ordinaries.has_hashed(manifest) && !may_be_stated() {
            return Ok(None);
        }
        let count = u32::try_from(manifest.parsed.layers.len()).unwrap_or(u32::MAX);
        match self.shown(request, name, manifest.clone(), Part::Lowest(count)).await {
            Err(DaemonError::NotVouched { .. }) => Ok(None),
            shown => shown.map(Some),
        }
    }

    async fn shown(
        &self,
        request: &MountRequest,
        name: &ImageName,
        manifest: Arc<Manifest>,
        part: Part,
    ) -> Result<Shown, DaemonError> {
        let options = self.admission.options(request);
        let repository = lazuli_registry::open(name, &options)?;
        let verified = self.admission.admit(request, &manifest).await?;
        let image = self.ordinaries.image(request, manifest, None, &*repository, &options).await?;
        let layers: Vec<_> = match part {
            Part::Lowest(count) => image.layers.iter().take(count as usize).collect(),
            Part::One(digest) => {
                image.layers.iter().filter(|layer| layer.digest() == digest).take(1).collect()
            }
        };
        let count = match part {
            Part::Lowest(count) => count as usize,
            Part::One(_) => 1,
        };
        let known = async |vouched: &Vouched| -> Option<Vec<_>> {
            let known = layers.iter().map(|layer| self.ordinaries.known_layer(layer, vouched));
            join_all(known).await.into_iter().collect()
        };
        // Proven layers need no registry.
        let mut vouched = Vouched::default();
        let known = match known(&vouched).await {
            Some(proven) => Some(proven),
            None => {
                vouched = self.ordinaries.vouched(&image, &repository, &options).await?;
                known(&vouched).await
            }
        };
        let known = known.filter(|known| known.len() == count);
        let known = known.ok_or_else(|| DaemonError::NotVouched { image: name.to_string() })?;
        let (mut stored, pin) = self.image_of_layers(&image, part, known).await?;
        stored.guess = vouched.guess;
        let verified = verified.of_index(stored.manifest_digest);
        Ok((stored, verified, image.manifest.clone(), pin))
    }
}
