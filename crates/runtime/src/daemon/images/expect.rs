//! Images that are about to be pulled: their metadata are fetched before containerd asks for a
//! layer.

use std::{sync::Arc, time::Duration};

use lazuli_image::Digest;
use lazuli_policy::Question;
use lazuli_registry::{ImageName, Login, Manifest, SeekableLayers};

use super::{super::DaemonError, Images};
use crate::image::StoredImage;

/// How long metadata stay without a request for the image: containerd fetches a configuration
/// first.
const STAY: Duration = Duration::from_secs(30);

impl Images {
    /// An image is about to be pulled: `name` has the digest of `manifest`, which was read with
    /// `login`. The metadata of a lazy image and signed indexes of an ordinary one are fetched now.
    /// Whatever becomes of that, a mount works. Call it on a runtime.
    pub fn expect(&self, name: ImageName, manifest: Manifest, login: Option<Login>) {
        let manifest = Arc::new(manifest);
        if manifest.parsed.lazy_base().is_none() {
            return self.expect_ordinary(&name, manifest, login);
        }
        self.0.admission.recent.insert(&name, manifest.clone());
        let Some(arriving) = self.0.admission.expected.begin(manifest.digest) else { return };
        let images = self.clone();
        tokio::spawn(async move {
            let (directory, digest) = (images.0.root.join("images"), manifest.digest);
            let was_here = StoredImage::is_in(&directory, &digest);
            let pin = images.0.admission.pins.pin(&directory, digest);
            let lock = images.0.admission.fetch_locks.lock(&name.to_string()).await;
            if let Err(error) = images.fetch_ahead(&name, &manifest, login).await {
                tracing::debug!(error = error.for_people(), "metadata are not fetched ahead");
            }
            drop((lock, arriving));
            tokio::time::sleep(STAY).await;
            drop(pin);
            if !was_here && !images.is_used(&digest).await {
                images.removed(digest).await;
            }
        });
    }

    /// Returns whether an image is mounted, or about to be.
    async fn is_used(&self, image: &Digest) -> bool {
        let served = self.0.images.all().await;
        // An unreadable record may be of this image.
        served.iter().any(|served| served.manifest_digest() == *image)
            || self.0.mounts.records().map_or(true, |records| {
                records.iter().any(|record| record.manifest_digest == *image)
            })
    }

    async fn fetch_ahead(
        &self,
        name: &ImageName,
        manifest: &Manifest,
        login: Option<Login>,
    ) -> Result<(), DaemonError> {
        let _login = login.map(|login| self.0.admission.logins.lend(name, login));
        let repository = lazuli_registry::open(name, &self.0.admission.registry)?;
        repository.request_policy().preconnect().done().await;
        let question = Question::of(name, manifest, &self.0.admission.registry);
        let admission =
            async { Ok::<_, DaemonError>(self.0.admission.gate.admit(question).await?) };
        let images = self.0.root.join("images");
        let seekable = SeekableLayers::Ordinary;
        StoredImage::fetch_admitted(repository.clone(), manifest, &images, seekable, admission)
            .await?;
        Ok(())
    }
}
