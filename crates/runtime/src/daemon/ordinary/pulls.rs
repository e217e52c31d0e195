//! Layers that are being pulled.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use lazuli_image::Digest;
use tokio::sync::{OnceCell, Semaphore};

use crate::sync::lock;

/// Layers that are pulled at the same time: each takes a processor.
const LAYERS: usize = 3;

/// How long a layer that could not be pulled is left to containerd.
const GIVEN_UP: Duration = Duration::from_secs(600);

/// How the pull of a layer ended, once it has.
pub(super) type Outcome = OnceCell<Result<(), Instant>>;

/// Layers that are being pulled, or were not long ago.
#[derive(Debug)]
pub(super) struct Pulls {
    layers: Mutex<HashMap<Digest, Arc<Outcome>>>,
    /// Held while a layer is pulled.
    pub(super) turns: Arc<Semaphore>,
}

impl Default for Pulls {
    fn default() -> Self {
        Pulls { layers: Mutex::default(), turns: Arc::new(Semaphore::new(LAYERS)) }
    }
}

impl Pulls {
    /// The pull of a layer, and whether the caller has to begin it.
    pub(super) fn join(&self, layer: Digest) -> (Arc<Outcome>, bool) {
        let mut layers = lock(&self.layers);
        layers.retain(|_, outcome| match outcome.get() {
            None => true,
            Some(Ok(())) => false,
            Some(Err(when)) => when.elapsed() < GIVEN_UP,
        });
        let is_new = !layers.contains_key(&layer);
        (layers.entry(layer).or_default().clone(), is_new)
    }

    /// The pull of a layer, if there is one.
    pub(super) fn find(&self, layer: &Digest) -> Option<Arc<Outcome>> {
        let layers = lock(&self.layers);
        layers.get(layer).cloned()
    }
}
