//! What names meant a moment ago.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use lazuli_registry::Manifest;

use crate::sync::lock;

/// How long it is remembered what a name means: a client asks for the layers of an image one after
/// the other.
const REMEMBERED: Duration = Duration::from_secs(30);

/// Maximum number of names that are remembered.
const MOST: usize = 256;

/// A manifest that a name meant a moment ago; `None` if that could not be found out.
#[derive(Clone, Debug)]
pub(super) struct Meaning {
    at: Instant,
    pub(super) manifest: Option<Arc<Manifest>>,
}

/// What names meant a moment ago.
#[derive(Debug, Default)]
pub(super) struct Recent(Mutex<HashMap<String, Meaning>>);

impl Recent {
    /// What a name meant, if that is remembered.
    pub(super) fn get(&self, image: &str) -> Option<Meaning> {
        let known = lock(&self.0).get(image).cloned();
        known.filter(|meaning| meaning.at.elapsed() < REMEMBERED)
    }

    /// Remembers what a name means.
    pub(super) fn insert(&self, image: &str, manifest: Option<Arc<Manifest>>) {
        let mut known = lock(&self.0);
        known.retain(|_, meaning| meaning.at.elapsed() < REMEMBERED);
        if known.len() < MOST {
            known.insert(image.to_owned(), Meaning { at: Instant::now(), manifest });
        }
    }
}
