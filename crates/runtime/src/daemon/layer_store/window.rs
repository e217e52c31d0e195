//! The piece of a layer that was read last.

use std::sync::Mutex;

use bytes::Bytes;
use lazuli_image::Digest;

use crate::sync::lock;

/// See the module. Clients read layers from beginning to end.
#[derive(Debug, Default)]
pub(super) struct Window(Mutex<Option<(Digest, u64, Bytes)>>);

impl Window {
    /// The piece that begins at `start`, if it is this one.
    pub(super) fn get(&self, layer: &Digest, start: u64) -> Option<Bytes> {
        let known = lock(&self.0);
        let (_, _, bytes) = known.as_ref().filter(|it| it.0 == *layer && it.1 == start)?;
        Some(bytes.clone())
    }

    /// Keeps a piece in the place of the one before.
    pub(super) fn set(&self, layer: Digest, start: u64, bytes: Bytes) {
        *lock(&self.0) = Some((layer, start, bytes));
    }
}
