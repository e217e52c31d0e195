//! Images whose metadata is in flight.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard},
};

use lazuli_image::Digest;
use tokio::sync::watch;

use crate::sync::lock;

/// Maximum number of images with metadata in flight. Others are fetched when containerd asks for
/// them.
const MOST: usize = 16;

/// Images whose metadata is in flight, by the digest of the manifest.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Expected(Mutex<HashMap<Digest, watch::Receiver<()>>>);

impl Expected {
    /// Registers an image whose metadata is in flight, until the result is dropped. `None` if it is
    /// registered already, or too many are.
    pub(in crate::daemon) fn begin(&self, image: Digest) -> Option<watch::Sender<()>> {
        let mut coming = self.lock();
        coming.retain(|_, arrives| arrives.has_changed().is_ok());
        if coming.contains_key(&image) || coming.len() >= MOST {
            return None;
        }
        let (sender, receiver) = watch::channel(());
        coming.insert(image, receiver);
        Some(sender)
    }

    /// Returns whether metadata are in flight.
    pub(in crate::daemon) fn has(&self, image: &Digest) -> bool {
        self.lock().get(image).is_some_and(|arrives| arrives.has_changed().is_ok())
    }

    /// Waits for metadata that are in flight; not long, because the fetch has deadlines.
    pub(in crate::daemon) async fn arrived(&self, image: &Digest) {
        let coming = self.lock().get(image).cloned();
        if let Some(mut coming) = coming {
            // Fails when the sender is dropped, which is the end of it.
            let _ = coming.changed().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Digest, watch::Receiver<()>>> {
        lock(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use lazuli_image::Algorithm;

    use super::*;

    #[tokio::test]
    async fn a_request_waits_for_metadata_on_their_way() {
        let (expected, image) = (Expected::default(), Algorithm::Sha256.digest(b"image"));
        expected.arrived(&image).await;
        let arriving = expected.begin(image).unwrap();
        assert!(expected.begin(image).is_none() && expected.has(&image));
        let waiting = expected.arrived(&image);
        tokio::pin!(waiting);
        assert!((&mut waiting).now_or_never().is_none());
        drop(arriving);
        waiting.await;
        assert!(!expected.has(&image));
        assert!(expected.begin(image).is_some());
    }

    #[tokio::test]
    async fn expected_images_are_bounded() {
        let expected = Expected::default();
        let begin = |number: usize| expected.begin(Algorithm::Sha256.digest(&number.to_le_bytes()));
        let held: Vec<_> = (0..MOST).map(|number| begin(number).unwrap()).collect();
        assert!(begin(MOST).is_none());
        drop(held);
        assert!(begin(MOST).is_some());
    }
}
