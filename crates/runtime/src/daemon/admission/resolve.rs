//! Resolves a name to the manifest to serve: a lazy image's own, or that of a trusted index.

use std::sync::{Arc, Mutex};

use lazuli_image::oci::Descriptor;
use lazuli_policy::Verified;
use lazuli_registry::{
    Found, ImageName, IndexTrust, Manifest, Options, Platform, Repository, lazy_manifest,
};
use tokio::task::JoinHandle;

use super::{Admission, stated::StatedIndexes};
use crate::{
    daemon::{DaemonError, api::MountRequest},
    sync::lock,
};

/// The image to which a name resolves.
#[derive(Debug)]
pub(in crate::daemon) struct Resolved {
    /// The manifest to serve.
    pub(in crate::daemon) manifest: Arc<Manifest>,
    /// The ordinary image that this is a signed index of: the policy is about that one.
    image: Option<Arc<Manifest>>,
    /// The policy's question about that image, which was asked while its index was looked for.
    asked: Mutex<Option<Asked>>,
}

type Asked = JoinHandle<Result<Verified, DaemonError>>;

impl Resolved {
    /// The layers of the manifest and, if that is a signed index, those of the ordinary image.
    pub(in crate::daemon) fn layers(&self) -> impl Iterator<Item = &Descriptor> {
        let image = self.image.iter().flat_map(|image| &image.parsed.layers);
        self.manifest.parsed.layers.iter().chain(image)
    }
}

impl From<Arc<Manifest>> for Resolved {
    fn from(manifest: Arc<Manifest>) -> Self {
        Resolved { manifest, image: None, asked: Mutex::default() }
    }
}

impl Admission {
    /// Resolves `name`, the image of the request, which is opened as `repository`. Indexes that a
    /// key has stated are searched for unless they are `known`.
    pub(in crate::daemon) async fn resolve(
        &self,
        request: &MountRequest,
        name: &ImageName,
        repository: &dyn Repository,
        platform: Option<&Platform>,
        options: &Options,
        known: &impl StatedIndexes,
    ) -> Result<Resolved, DaemonError> {
        let (replacement, indexes) = (self.replacement(name, options), options.indexes);
        let Found { manifest, referrers } =
            lazy_manifest(repository, name, platform, replacement, indexes).await?;
        let image = Arc::new(manifest);
        if image.parsed.lazy_base().is_some() || indexes != IndexTrust::Signed {
            return Ok(image.into());
        }
        // Its signatures are looked for beside its index: both take several round trips.
        let asked = Mutex::new(Some(self.ask(request, &image)?));
        let mut signed = known.recall_index(name, &image);
        if signed.is_none() {
            let listed = referrers.as_deref();
            signed = self.gate.signed_index(name, &image, listed, repository, options).await?;
            if let Some(found) = &signed {
                known.remember_index(&image, found);
            }
        }
        Ok(match signed {
            Some(index) => {
                Resolved { manifest: Arc::new(index.manifest), image: Some(image), asked }
            }
            None => Resolved { manifest: image, image: None, asked },
        })
    }

    /// Begins to find out whether the image with this manifest may run.
    fn ask(&self, request: &MountRequest, manifest: &Manifest) -> Result<Asked, DaemonError> {
        let (gate, question) = (self.gate.clone(), self.question(request, manifest)?);
        Ok(tokio::spawn(async move { Ok(gate.admit(question).await?) }))
    }

    /// Finds out whether the resolved image may run.
    pub(in crate::daemon) async fn admit_resolved(
        &self,
        request: &MountRequest,
        resolved: &Resolved,
    ) -> Result<Verified, DaemonError> {
        let Resolved { manifest, image, asked } = resolved;
        let asked = lock(asked).take();
        let verified = match asked {
            Some(asked) => asked.await.unwrap_or(Err(DaemonError::Stopping))?,
            None => self.admit(request, image.as_ref().unwrap_or(manifest)).await?,
        };
        Ok(match image {
            Some(_) => verified.of_index(manifest.digest),
            None => verified,
        })
    }
}
