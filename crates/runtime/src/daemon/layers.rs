//! What the layers of a lazy image have to be called, for the snapshot service to compare with what
//! containerd calls them.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use lazuli_image::Digest;
use lazuli_registry::{ImageName, Login, Manifest, Selector};

use super::{DaemonError, Images, api::MountRequest};
use crate::image::{ImageError, chain};

/// Bytes of manifests that are remembered. Those of lazy images have a few kilobytes, and the
/// largest 4 MiB.
const KEPT: usize = 8 << 20;

/// The last manifests that were fetched by digest: containerd asks for one layer after the other,
/// and then the image is mounted.
#[derive(Debug, Default)]
pub(super) struct Recent(Mutex<VecDeque<(String, Arc<Manifest>)>>);

impl Recent {
    /// The manifest that `name`, which has a digest, means.
    pub(super) fn get(&self, name: &ImageName) -> Option<Arc<Manifest>> {
        let name = name.to_string();
        let recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        recent.iter().find(|(known, _)| *known == name).map(|(_, manifest)| manifest.clone())
    }

    /// Remembers what `name`, which has a digest, means.
    pub(super) fn insert(&self, name: &ImageName, manifest: Arc<Manifest>) {
        let name = name.to_string();
        let mut recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        recent.retain(|(known, _)| *known != name);
        recent.push_back((name, manifest));
        while recent.iter().map(|(_, manifest)| manifest.raw.len()).sum::<usize>() > KEPT {
            recent.pop_front();
        }
    }
}

impl Images {
    /// The chain ids of the data layers of the image that `request` names by the digest of its
    /// manifest, lowest first.
    pub async fn data_layers(
        &self,
        request: &MountRequest,
        login: Option<&Login>,
    ) -> Result<Vec<Digest>, DaemonError> {
        let (name, digest) = pinned(request)?;
        let login = login.map(|login| self.0.logins.lend(&name, login.clone()));
        // Both at the same time, since each of them takes round trips.
        let (node, admitted) = (self.0.clone(), request.clone());
        let admission = tokio::spawn(async move { node.admit_pinned(&admitted).await });
        let manifest = self.recent_manifest(request, &name).await?;
        expect(&manifest, &name, &digest)?;
        let layers = chain::of_data(&manifest.parsed);
        let layers = layers.ok_or_else(|| ImageError::NotLazy { image: name.to_string() })?;
        self.admit_ahead(request, manifest, login, admission).await?;
        Ok(layers)
    }

    /// Finds out whether the image that `request` names by the digest of its manifest may run.
    pub async fn admit(
        &self,
        request: &MountRequest,
        login: Option<&Login>,
    ) -> Result<(), DaemonError> {
        let (name, _) = pinned(request)?;
        let _login = login.map(|login| self.0.logins.lend(&name, login.clone()));
        self.0.admit_pinned(request).await.map(drop)
    }

    async fn recent_manifest(
        &self,
        request: &MountRequest,
        name: &ImageName,
    ) -> Result<Arc<Manifest>, DaemonError> {
        Ok(match self.0.recent.get(name) {
            Some(manifest) => manifest,
            None => {
                let repository = lazuli_registry::open(name, &self.0.options(request))?;
                let manifest = Arc::new(repository.manifest(None).await?);
                self.0.recent.insert(name, manifest.clone());
                manifest
            }
        })
    }

    /// The chain id of the bootstrap layer of the image that `request` names by the digest of its
    /// manifest. What was unpacked tells, so the image's metadata are fetched unless they are here.
    pub async fn bootstrap_layer(
        &self,
        request: &MountRequest,
        login: Option<&Login>,
    ) -> Result<Digest, DaemonError> {
        let (name, digest) = pinned(request)?;
        let images = self.0.root.join("images");
        self.0.expected.arrived(&digest).await;
        let stored = {
            let images = images.clone();
            tokio::task::spawn_blocking(move || chain::stored(&images, &digest)).await
        };
        if let Ok(Some(layer)) = stored {
            return Ok(layer);
        }
        let _login = login.map(|login| self.0.logins.lend(&name, login.clone()));
        let repository = lazuli_registry::open(&name, &self.0.options(request))?;
        let manifest = repository.manifest(None).await?;
        expect(&manifest, &name, &digest)?;
        let _pin = self.0.pins.pin(&images, digest);
        chain::fetched(&repository, &manifest, &images, self.0.admit(request, &manifest)).await
    }
}

pub(super) fn pinned(request: &MountRequest) -> Result<(ImageName, Digest), DaemonError> {
    let name: ImageName = request.image.parse()?;
    match name.selector() {
        Some(Selector::Digest(digest)) => Ok((name, digest)),
        _ => Err(DaemonError::NoDigest { image: request.image.clone() }),
    }
}

/// The digest may be that of an index, which lists the manifest of an image but is none.
fn expect(manifest: &Manifest, name: &ImageName, digest: &Digest) -> Result<(), DaemonError> {
    if manifest.digest == *digest {
        return Ok(());
    }
    Err(DaemonError::NotItsManifest { image: name.to_string(), manifest: manifest.digest })
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use lazuli_image::{Algorithm, oci};

    use super::*;

    #[test]
    fn recent_manifests_are_bounded_by_bytes() {
        let json = br#"{"schemaVersion":2,"config":{"mediaType":"","digest":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","size":0},"layers":[]}"#;
        let parsed = oci::Manifest::parse(json).unwrap();
        let manifest = |size: usize| {
            let (raw, digest) = (Bytes::from(vec![0; size]), Algorithm::Sha256.digest(json));
            let media_type = oci::media_type::MANIFEST.to_owned();
            Arc::new(Manifest { raw, digest, media_type, parsed: parsed.clone(), index: None })
        };
        let name = |tag: usize| format!("r.example/a:{tag}").parse::<ImageName>().unwrap();
        let recent = Recent::default();
        for tag in 0..3 {
            recent.insert(&name(tag), manifest(KEPT / 2));
        }
        let known = [0, 1, 2].map(|tag| recent.get(&name(tag)).is_some());
        assert_eq!(known, [false, true, true]);
        recent.insert(&name(1), manifest(1));
        recent.insert(&name(3), manifest(KEPT / 2 - 1));
        assert!([1, 2, 3].iter().all(|tag| recent.get(&name(*tag)).is_some()));
        recent.insert(&name(4), manifest(KEPT + 1));
        assert!((0..5).all(|tag| recent.get(&name(tag)).is_none()));
    }
}
