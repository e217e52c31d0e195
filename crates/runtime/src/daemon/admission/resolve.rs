//! Resolves a name to the manifest to serve: a lazy image's own, or that of a trusted index.

use std::sync::Arc;

use lazuli_image::oci::Descriptor;
use lazuli_policy::Verified;
use lazuli_registry::{
    ImageName, IndexTrust, Manifest, Options, Platform, Repository, lazy_manifest,
};

use super::Admission;
use crate::daemon::{DaemonError, api::MountRequest};

/// The image to which a name resolves.
#[derive(Clone, Debug)]
pub(in crate::daemon) struct Resolved {
    /// The manifest to serve.
    pub(in crate::daemon) manifest: Arc<Manifest>,
    /// The ordinary image that this is a signed index of: the policy is about that one.
    image: Option<Arc<Manifest>>,
}

impl Resolved {
    /// The layers of the manifest and, if that is a signed index, those of the ordinary image.
    pub(in crate::daemon) fn layers(&self) -> impl Iterator<Item = &Descriptor> {
        let image = self.image.iter().flat_map(|image| &image.parsed.layers);
        self.manifest.parsed.layers.iter().chain(image)
    }
}

impl From<Arc<Manifest>> for Resolved {
    fn from(manifest: Arc<Manifest>) -> Self {
        Resolved { manifest, image: None }
    }
}

impl Admission {
    /// Resolves `name`, which is opened as `repository`.
    pub(in crate::daemon) async fn resolve(
        &self,
        name: &ImageName,
        repository: &dyn Repository,
        platform: Option<&Platform>,
        options: &Options,
    ) -> Result<Resolved, DaemonError> {
        let (replacement, indexes) = (self.replacement(name, options), options.indexes);
        let found = lazy_manifest(repository, name, platform, replacement, indexes).await?;
        if found.parsed.lazy_base().is_some() || indexes != IndexTrust::Signed {
            return Ok(Arc::new(found).into());
        }
        let signed = self.gate.signed_index(name, &found, repository, options).await?;
        let image = Arc::new(found);
        Ok(match signed {
            Some(index) => Resolved { manifest: Arc::new(index.manifest), image: Some(image) },
            None => image.into(),
        })
    }

    /// Finds out whether the resolved image may run.
    pub(in crate::daemon) async fn admit_resolved(
        &self,
        request: &MountRequest,
        resolved: &Resolved,
    ) -> Result<Verified, DaemonError> {
        let Resolved { manifest, image } = resolved;
        match image {
            Some(image) => Ok(self.admit(request, image).await?.of_index(manifest.digest)),
            None => self.admit(request, manifest).await,
        }
    }
}
