//! Which complete layers and files are still to be checked.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use lazuli_image::Digest;

/// The pause between looks for what has become complete.
pub(super) const PAUSE: Duration = Duration::from_secs(2);

/// How long a check that could not be carried out to its end is not repeated: something was evicted
/// meanwhile, or is damaged until it is scrubbed.
const RETRY: Duration = Duration::from_secs(600);

/// Checks, by a digest of what is checked.
#[derive(Debug, Default)]
pub(super) struct Checks {
    done: HashSet<Digest>,
    tried: HashMap<Digest, Instant>,
}

impl Checks {
    /// Returns whether a check is to be carried out now.
    pub(super) fn is_due(&self, key: &Digest) -> bool {
        let was_tried = || self.tried.get(key).is_some_and(|when| when.elapsed() < RETRY);
        !self.done.contains(key) && !was_tried()
    }

    /// Nothing more is to be found out.
    pub(super) fn finish(&mut self, key: Digest) {
        self.tried.remove(&key);
        self.done.insert(key);
    }

    /// The check could not be carried out to its end.
    pub(super) fn put_off(&mut self, key: Digest) {
        self.tried.insert(key, Instant::now());
    }
}
