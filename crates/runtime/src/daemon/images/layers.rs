//! The expected names of a lazy image's layers, which the snapshot service compares with
//! containerd's.

use std::sync::Arc;

use lazuli_image::Digest;
use lazuli_registry::{ImageName, Login, Manifest};

use super::{
    super::{DaemonError, api::MountRequest},
    Images,
};
use crate::image::{ImageError, chain};

impl Images {
    /// The chain ids of the data layers of the image that `request` names by the digest of its
    /// manifest, lowest first.
    pub async fn data_layers(
        &self,
        request: &MountRequest,
        login: Option<&Login>,
    ) -> Result<Vec<Digest>, DaemonError> {
        let (name, digest) = request.name_and_digest()?;
        let lent = login.map(|login| self.0.admission.logins.lend(&name, login.clone()));
        // Both at the same time, since each of them takes round trips.
        let (node, admitted) = (self.0.clone(), request.clone());
        let admission = tokio::spawn(async move { node.admission.admit_pinned(&admitted).await });
        let manifest = self.recent_manifest(request, &name).await?;
        expect(&manifest, &name, &digest)?;
        let layers = chain::of_data(&manifest.parsed);
        let layers = layers.ok_or_else(|| ImageError::NotLazy { image: name.to_string() })?;
        self.admit_ahead(request, manifest, login, lent, admission).await?;
        Ok(layers)
    }

    /// Finds out whether the image that `request` names by the digest of its manifest may run.
    pub async fn admit(
        &self,
        request: &MountRequest,
        login: Option<&Login>,
    ) -> Result<(), DaemonError> {
        let (name, _) = request.name_and_digest()?;
        let _login = login.map(|login| self.0.admission.logins.lend(&name, login.clone()));
        self.0.admission.admit_pinned(request).await.map(drop)
    }

    pub(in crate::daemon) async fn recent_manifest(
        &self,
        request: &MountRequest,
        name: &ImageName,
    ) -> Result<Arc<Manifest>, DaemonError> {
        Ok(match self.0.admission.recent.get(name) {
            Some(manifest) => manifest,
            None => {
                let repository = lazuli_registry::open(name, &self.0.admission.options(request))?;
                let manifest = Arc::new(repository.manifest(None).await?);
                self.0.admission.recent.insert(name, manifest.clone());
                manifest
            }
        })
    }

    /// The chain id of the bootstrap layer of the image that `request` names by the digest of its
    /// manifest. It depends on the unpacked layer, so missing metadata is fetched.
    pub async fn bootstrap_layer(
        &self,
        request: &MountRequest,
        login: Option<&Login>,
    ) -> Result<Digest, DaemonError> {
        let (name, digest) = request.name_and_digest()?;
        let images = self.0.root.join("images");
        self.0.admission.expected.arrived(&digest).await;
        let stored = {
            let images = images.clone();
            tokio::task::spawn_blocking(move || chain::stored(&images, &digest)).await
        };
        if let Ok(Some(layer)) = stored {
            return Ok(layer);
        }
        let _login = login.map(|login| self.0.admission.logins.lend(&name, login.clone()));
        let repository = lazuli_registry::open(&name, &self.0.admission.options(request))?;
        let manifest = repository.manifest(None).await?;
        expect(&manifest, &name, &digest)?;
        let _pin = self.0.admission.pins.pin(&images, digest);
        chain::fetched(
            repository.clone(),
            &manifest,
            &images,
            self.0.admission.admit(request, &manifest),
        )
        .await
    }
}

/// Checks the digest. It may be that of an index, which lists image manifests but is none.
fn expect(manifest: &Manifest, name: &ImageName, digest: &Digest) -> Result<(), DaemonError> {
    if manifest.digest == *digest {
        return Ok(());
    }
    Err(DaemonError::NotItsManifest { image: name.to_string(), manifest: manifest.digest })
}
