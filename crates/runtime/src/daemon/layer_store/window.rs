//! The pieces of layers that were read last.

use std::{
    collections::VecDeque,
    sync::Mutex,
    time::{Duration, Instant},
};

use bytes::Bytes;
use lazuli_image::Digest;

use super::held::HeldLayer;
use crate::sync::lock;

/// Maximum number of pieces: clients read some layers at a time.
const PIECES: usize = 8;

/// How long a piece is kept: a client that reads on does so at once.
const KEPT: Duration = Duration::from_secs(60);

/// See the module. Clients read layers from beginning to end.
#[derive(Debug, Default)]
pub(super) struct Window(Mutex<VecDeque<Piece>>);

#[derive(Debug)]
struct Piece {
    /// The layer, and the image that it was read of: who may read one may not read all.
    of: (String, Digest),
    start: u64,
    bytes: Bytes,
    at: Instant,
}

impl Window {
    /// The piece of `layer` that begins at `start`, if it was among the last.
    pub(super) fn get(&self, layer: &HeldLayer, start: u64) -> Option<Bytes> {
        let mut known = lock(&self.0);
        known.retain(|piece| piece.at.elapsed() < KEPT);
        let is_it = |piece: &&Piece| piece.start == start && piece.of == of(layer);
        known.iter().find(is_it).map(|piece| piece.bytes.clone())
    }

    /// Keeps a piece in the place of the oldest.
    pub(super) fn push(&self, layer: &HeldLayer, start: u64, bytes: Bytes) {
        let mut known = lock(&self.0);
        known.truncate(PIECES - 1);
        known.push_front(Piece { of: of(layer), start, bytes, at: Instant::now() });
    }

    /// Drops what is too old.
    pub(super) fn expire(&self) {
        lock(&self.0).retain(|piece| piece.at.elapsed() < KEPT);
    }
}

fn of(layer: &HeldLayer) -> (String, Digest) {
    (layer.pinned.clone(), layer.layer)
}
