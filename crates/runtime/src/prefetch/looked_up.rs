//! What is known of images that are about to be mounted.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use lazuli_image::Digest;
use lazuli_registry::Repository;

use super::Known;
use crate::sync::lock;

/// How long it waits for the mount: a client that has just pulled the image creates a container
/// next. Hot bytes take memory meanwhile.
pub(super) const STAY: Duration = Duration::from_secs(10);

/// Maximum number of images.
const MOST: usize = 16;

/// A repository and the digest of a manifest there: what one repository has delivered is not used
/// for an image of another one.
type Key = (String, Digest);

/// The key of an image; `None` for one in a directory, which is near.
pub(super) fn key(repository: &Arc<dyn Repository>, manifest: &Digest) -> Option<Key> {
    Some((repository.repository_name()?, *manifest))
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct LookedUp(Mutex<HashMap<Key, Known>>);

impl LookedUp {
    /// Keeps what `look` finds. Returns whether it was called: not if something is known of the
    /// image, or of too many.
    pub(super) fn insert(&self, key: &Key, look: impl FnOnce() -> Known) -> bool {
        let mut all = lock(&self.0);
        let is_new = !all.contains_key(key) && all.len() < MOST;
        if is_new {
            all.insert(key.clone(), look());
        }
        is_new
    }

    /// Gives away what is known of an image.
    pub(super) fn take(&self, key: &Key) -> Option<Known> {
        lock(&self.0).remove(key)
    }
}
