//! Images that are about to be pulled: their metadata are fetched before containerd asks for a
//! layer.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lazuli_image::Digest;
use lazuli_policy::Question;
use lazuli_registry::{ImageName, Login, Manifest};
use tokio::sync::watch;

use super::{DaemonError, Images};
use crate::image::StoredImage;

/// Images whose metadata are fetched at a time. Others are fetched when containerd asks for them.
const MOST: usize = 16;

/// How long metadata stay that nobody has asked for: containerd fetches a configuration first.
const STAY: Duration = Duration::from_secs(30);

/// Images whose metadata are on their way, by the digest of the manifest.
#[derive(Debug, Default)]
pub(super) struct Expected(Mutex<HashMap<Digest, watch::Receiver<()>>>);

impl Expected {
    /// Takes note that an image's metadata are on their way, until the result is dropped. None if
    /// they were before, or if too many are.
    fn begin(&self, image: Digest) -> Option<watch::Sender<()>> {
        let mut coming = self.lock();
        coming.retain(|_, arrives| arrives.has_changed().is_ok());
        if coming.contains_key(&image) || coming.len() >= MOST {
            return None;
        }
        let (sender, receiver) = watch::channel(());
        coming.insert(image, receiver);
        Some(sender)
    }

    /// Waits for metadata that are on their way; not long, because the fetch has deadlines.
    pub(super) async fn arrived(&self, image: &Digest) {
        let coming = self.lock().get(image).cloned();
        if let Some(mut coming) = coming {
            // Fails when the sender is dropped, which is the end of it.
            let _ = coming.changed().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Digest, watch::Receiver<()>>> {
        // No panic can leave the map half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Images {
    /// A lazy image is about to be pulled: `name` has the digest of `manifest`, which was read with
    /// `login`. Its metadata are fetched now. Whatever becomes of that, a mount works. Call it on a
    /// runtime.
    pub fn expect(&self, name: ImageName, manifest: Manifest, login: Option<Login>) {
        let manifest = Arc::new(manifest);
        self.0.recent.insert(&name, manifest.clone());
        let Some(arriving) = self.0.expected.begin(manifest.digest) else { return };
        let images = self.clone();
        tokio::spawn(async move {
            let (directory, digest) = (images.0.root.join("images"), manifest.digest);
            let was_here = StoredImage::is_in(&directory, &digest);
            let pin = images.0.pins.pin(&directory, digest);
            if let Err(error) = images.fetch_ahead(&name, &manifest, login).await {
                tracing::debug!(error = error.for_people(), "metadata are not fetched ahead");
            }
            drop(arriving);
            tokio::time::sleep(STAY).await;
            drop(pin);
            if !was_here && !images.is_used(&digest).await {
                images.removed(digest).await;
            }
        });
    }

    /// Whether an image is mounted, or about to be.
    async fn is_used(&self, image: &Digest) -> bool {
        let served = self.0.served_images().await;
        // What cannot be read may be anything.
        served.iter().any(|served| served.manifest_digest() == *image)
            || self.0.records.all().map_or(true, |records| {
                records.iter().any(|record| record.manifest_digest == *image)
            })
    }

    async fn fetch_ahead(
        &self,
        name: &ImageName,
        manifest: &Manifest,
        login: Option<Login>,
    ) -> Result<(), DaemonError> {
        let _login = login.map(|login| self.0.logins.lend(name, login));
        let repository = lazuli_registry::open(name, &self.0.registry)?;
        repository.request_policy().preconnect().done().await;
        let question = Question::of(name, manifest, &self.0.registry);
        let admission = async { Ok::<_, DaemonError>(self.0.gate.admit(question).await?) };
        let images = self.0.root.join("images");
        StoredImage::fetch_admitted(&repository, manifest, &images, admission).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use lazuli_image::Algorithm;

    use super::*;

    #[tokio::test]
    async fn who_asks_for_an_image_waits_for_what_is_on_its_way() {
        let (expected, image) = (Expected::default(), Algorithm::Sha256.digest(b"image"));
        expected.arrived(&image).await;
        let arriving = expected.begin(image).unwrap();
        assert!(expected.begin(image).is_none());
        let waiting = expected.arrived(&image);
        tokio::pin!(waiting);
        assert!((&mut waiting).now_or_never().is_none());
        drop(arriving);
        waiting.await;
        assert!(expected.begin(image).is_some());
    }

    #[tokio::test]
    async fn images_that_are_expected_are_bounded() {
        let expected = Expected::default();
        let begin = |number: usize| expected.begin(Algorithm::Sha256.digest(&number.to_le_bytes()));
        let held: Vec<_> = (0..MOST).map(|number| begin(number).unwrap()).collect();
        assert!(begin(MOST).is_none());
        drop(held);
        assert!(begin(MOST).is_some());
    }
}
