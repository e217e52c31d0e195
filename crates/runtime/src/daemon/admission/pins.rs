//! Images whose metadata is about to be used.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
};

use lazuli_image::Digest;

use crate::{image::removed, sync::lock};

/// Images whose metadata is about to be used.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Pins {
    pinned: Mutex<Pinned>,
    /// Held while something is deleted.
    pub(in crate::daemon) clearing: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
pub(in crate::daemon) struct Pinned {
    now: HashMap<Digest, usize>,
    /// The number of pins there have ever been.
    pub(in crate::daemon) ever: u64,
}

/// Keeps the metadata of an image until it is dropped.
#[derive(Debug)]
pub(in crate::daemon) struct Pin {
    pins: Arc<Pins>,
    image: Digest,
}

impl Pins {
    /// Keeps the metadata of the image with this manifest, which is used again if it was removed.
    pub(in crate::daemon) fn pin(self: &Arc<Self>, images: &Path, image: Digest) -> Pin {
        let mut pinned = self.lock();
        *pinned.now.entry(image).or_default() += 1;
        pinned.ever += 1;
        removed::unmark(images, &image);
        Pin { pins: self.clone(), image }
    }

    /// Holds up new pins as long as the result lives.
    pub(in crate::daemon) fn lock(&self) -> MutexGuard<'_, Pinned> {
        lock(&self.pinned)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut pinned = self.pins.lock();
        if let Some(count) = pinned.now.get_mut(&self.image) {
            *count -= 1;
            if *count == 0 {
                pinned.now.remove(&self.image);
            }
        }
    }
}
