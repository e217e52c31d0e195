//! Indexes that a trusted key has stated, as they were found a start ago.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use lazuli_policy::{Gate, SignedIndex};
use lazuli_registry::{ImageName, Manifest};

use crate::sync::lock;

/// Bytes of manifests and bundles that are remembered: an index has a few kilobytes.
const KEPT: usize = 8 << 20;

/// The last indexes that were found. Whether one still counts is decided when it is used.
#[derive(Debug, Default)]
pub(in crate::daemon) struct StatedIndexes(Mutex<VecDeque<(Key, Arc<Remembered>)>>);

/// The image by its digest, in the repository that decides who may know the index.
type Key = String;

#[derive(Debug)]
struct Remembered {
    index: Arc<Manifest>,
    bundles: Vec<Bytes>,
}

impl StatedIndexes {
    /// The index of `image` that was found before, if the present policy still trusts its
    /// statement.
    pub(super) fn get(
        &self,
        gate: &Gate,
        name: &ImageName,
        image: &Manifest,
    ) -> Option<Arc<Manifest>> {
        let wanted = key(name, image);
        let known = lock(&self.0).iter().find(|(key, _)| *key == wanted)?.1.clone();
        let counts = gate.recheck(name, image, &known.index, &known.bundles);
        counts.is_ok_and(|indexing| indexing.is_some()).then(|| known.index.clone())
    }

    /// Remembers an index; the one that was found first goes if there are too many.
    pub(super) fn insert(
        &self,
        name: &ImageName,
        image: &Manifest,
        found: SignedIndex,
    ) -> Arc<Manifest> {
        let SignedIndex { manifest, bundles, .. } = found;
        let (key, index) = (key(name, image), Arc::new(manifest));
        let mut all = lock(&self.0);
        all.retain(|(known, _)| *known != key);
        all.push_back((key, Arc::new(Remembered { index: index.clone(), bundles })));
        while all.iter().map(|(_, known)| known.bytes()).sum::<usize>() > KEPT {
            all.pop_front();
        }
        index
    }
}

impl Remembered {
    fn bytes(&self) -> usize {
        self.index.raw.len() + self.bundles.iter().map(Bytes::len).sum::<usize>()
    }
}

fn key(name: &ImageName, image: &Manifest) -> Key {
    name.pinned_to(image.digest).to_string()
}
