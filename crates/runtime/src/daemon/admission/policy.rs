//! Admission: asks the policy before an image's metadata are parsed, and again for each container.

use std::sync::Arc;

use lazuli_image::Digest;
use lazuli_policy::{Question, Verified, manifest_descriptor};
use lazuli_registry::{ImageName, Login, Manifest, Options, Replacement, SeekableLayers, Selector};
use tokio::{
    sync::oneshot,
    task::{JoinError, JoinHandle},
};

use super::{Admission, logins::Lent};
use crate::{
    daemon::{DaemonError, api::MountRequest, images::Images},
    image::StoredImage,
};

impl MountRequest {
    /// The name that the policy covers.
    pub(in crate::daemon) fn asked_name(&self) -> Result<ImageName, DaemonError> {
        Ok(self.asked.as_ref().unwrap_or(&self.image).parse()?)
    }

    /// The name of the image, and the digest of its manifest, which has to be in it.
    pub(in crate::daemon) fn name_and_digest(&self) -> Result<(ImageName, Digest), DaemonError> {
        let name: ImageName = self.image.parse()?;
        match name.selector() {
            Some(Selector::Digest(digest)) => Ok((name, digest)),
            _ => Err(DaemonError::NoDigest { image: self.image.clone() }),
        }
    }
}

impl Admission {
    /// Returns whether a lazy image may replace the ordinary image `name` that it refers to.
    pub(in crate::daemon) fn replacement(
        &self,
        name: &ImageName,
        options: &Options,
    ) -> Replacement {
        match self.gate.takes_statements(name) {
            true => Replacement::Allowed,
            false => options.referrers.replacement(name),
        }
    }

    /// Finds out whether the image with this manifest may run.
    pub(in crate::daemon) async fn admit(
        &self,
        request: &MountRequest,
        manifest: &Manifest,
    ) -> Result<Verified, DaemonError> {
        Ok(self.gate.admit(self.question(request, manifest)?).await?)
    }

    /// The policy's question about a manifest.
    pub(super) fn question(
        &self,
        request: &MountRequest,
        manifest: &Manifest,
    ) -> Result<Question, DaemonError> {
        let question = Question::of(&request.asked_name()?, manifest, &self.options(request));
        Ok(match request.asked {
            Some(_) => question.by_client(),
            None => question,
        })
    }

    /// Finds out whether an image may run that is named by the digest of its manifest, before the
    /// manifest is fetched.
    pub(in crate::daemon) async fn admit_pinned(
        &self,
        request: &MountRequest,
    ) -> Result<Verified, DaemonError> {
        let (_, digest) = request.name_and_digest()?;
        self.admit_digest(request, &request.asked_name()?, digest).await
    }

    /// Finds out whether a bootstrap with this digest may run that came without a manifest.
    pub(in crate::daemon) async fn admit_bootstrap(
        &self,
        request: &MountRequest,
        digest: Digest,
    ) -> Result<Verified, DaemonError> {
        self.admit_digest(request, &request.asked_name()?.pinned_to(digest), digest).await
    }

    async fn admit_digest(
        &self,
        request: &MountRequest,
        name: &ImageName,
        digest: Digest,
    ) -> Result<Verified, DaemonError> {
        let options = self.options(request);
        let question = Question::resolved(name, manifest_descriptor(digest), &options);
        Ok(self.gate.admit(question).await?)
    }
}

impl Images {
    /// Waits for `admission`. The image's blobs are looked for with its `login` meanwhile, and the
    /// metadata for the mount is fetched unless that is under way: containerd requests the mount as
    /// soon as it has its answer.
    pub(in crate::daemon) async fn admit_ahead(
        &self,
        request: &MountRequest,
        manifest: Arc<Manifest>,
        login: Option<&Login>,
        lent: Option<Lent>,
        admission: JoinHandle<Result<Verified, DaemonError>>,
    ) -> Result<(), DaemonError> {
        let ended = |ended: Result<_, JoinError>| ended.unwrap_or(Err(DaemonError::Stopping));
        let images = self.0.root.join("images");
        if admission.is_finished() || StoredImage::is_in(&images, &manifest.digest) {
            return ended(admission.await).map(drop);
        }
        let found = self.0.admission.checked.begin(&request.image, login);
        let (this, wanted, login) = (self.clone(), request.clone(), login.cloned());
        tokio::spawn(async move {
            match this.look_for_blobs(&wanted, login.as_ref()).await {
                // Nobody waits for it if the mount was not requested, or its request was dropped.
                Ok(()) => drop(found.send(())),
                Err(error) => {
                    let error = error.for_people();
                    tracing::debug!(error, "checked again before it is mounted");
                }
            }
        });
        if self.0.admission.expected.has(&manifest.digest) {
            return ended(admission.await).map(drop);
        }
        let (name, options) = (request.image.parse()?, self.0.admission.options(request));
        let repository = lazuli_registry::open(&name, &options)?;
        let (tell, told) = oneshot::channel();
        let admission = async move {
            // Sending fails if the request was dropped meanwhile.
            match ended(admission.await) {
                Ok(verified) => {
                    let _ = tell.send(Ok(()));
                    Ok(verified)
                }
                Err(error) => {
                    let _ = tell.send(Err(error));
                    Err(DaemonError::Stopping)
                }
            }
        };
        let (node, image) = (self.0.clone(), request.image.clone());
        tokio::spawn(async move {
            let _lent = lent;
            let _lock = node.admission.fetch_locks.lock(&image).await;
            let _pin = node.admission.pins.pin(&images, manifest.digest);
            let seekable = SeekableLayers::Ordinary;
            let fetch = StoredImage::fetch_admitted(
                repository.clone(),
                &manifest,
                &images,
                seekable,
                admission,
            );
            if let Err(error) = fetch.await {
                tracing::debug!(error = error.for_people(), "fetched again when it is mounted");
            }
        });
        told.await.unwrap_or(Err(DaemonError::Stopping))
    }
}
