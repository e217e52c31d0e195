//! The pieces of layers that were read last.

use std::{collections::VecDeque, sync::Mutex};

use bytes::Bytes;
use lazuli_image::Digest;

use crate::sync::lock;

/// Maximum number of pieces: clients read some layers at a time.
const PIECES: usize = 8;

/// See the module. Clients read layers from beginning to end.
#[derive(Debug, Default)]
pub(super) struct Window(Mutex<VecDeque<(Digest, u64, Bytes)>>);

impl Window {
    /// The piece of `layer` that begins at `start`, if it was among the last.
    pub(super) fn get(&self, layer: &Digest, start: u64) -> Option<Bytes> {
        let known = lock(&self.0);
        let (_, _, bytes) = known.iter().find(|it| it.0 == *layer && it.1 == start)?;
        Some(bytes.clone())
    }

    /// Keeps a piece in the place of the oldest.
    pub(super) fn push(&self, layer: Digest, start: u64, bytes: Bytes) {
        let mut known = lock(&self.0);
        known.truncate(PIECES - 1);
        known.push_front((layer, start, bytes));
    }
}
