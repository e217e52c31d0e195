//! Finds cached chunks of images that are not mounted.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::{
    cache::Cache,
    image::{self, StoredImage},
};

/// Largest bootstrap of an image that is read without being mounted: some 200,000 chunks, which
/// take four times as much memory for as long as that takes.
const REMEMBERED: u64 = 16 << 20;

/// How long the first mount waits for it: about a round trip.
const LOOK_WITHIN: Duration = Duration::from_millis(50);

/// Whether images that are not mounted have been examined.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Remembering(AtomicBool);

impl Remembering {
    /// Indexes the chunks in `cache` of the images in a directory, once, when the first image is
    /// mounted that may share chunks. Continues in the background when the mount stops waiting.
    pub(in crate::daemon) fn start(
        &self,
        images: PathBuf,
        cache: Arc<Cache>,
    ) -> impl Future<Output = ()> + use<> {
        let is_first = !self.0.swap(true, Ordering::Relaxed);
        let looking =
            is_first.then(|| tokio::task::spawn_blocking(move || remember(&images, &cache)));
        async move {
            if let Some(looking) = looking {
                let _ = tokio::time::timeout(LOOK_WITHIN, looking).await;
            }
        }
    }
}

fn remember(images: &Path, cache: &Cache) {
    for path in image::directories(images).unwrap_or_default() {
        let bootstrap = std::fs::metadata(image::bootstrap_path(&path));
        if bootstrap.is_ok_and(|bootstrap| bootstrap.len() > REMEMBERED) {
            continue;
        }
        // Damaged metadata is fetched again at a mount, and reported then.
        let Ok(image) = StoredImage::open(&path) else { continue };
        for blob in image.bootstrap.blobs() {
            if let Err(error) = cache.remember(blob) {
                tracing::debug!(%error, "not remembered");
            }
        }
    }
}
