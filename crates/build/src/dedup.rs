//! Which chunks are the same, over all layers of an image.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Mutex,
};

use lazuli_image::Digest;

/// A chunk that differs from all others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Distinct {
    /// Of the decoded bytes.
    pub(crate) digest: Digest,
    /// Bytes once decoded.
    pub(crate) decoded_size: u32,
    /// Bytes as stored.
    pub(crate) stored_size: u32,
    /// First stored byte in the spool.
    pub(crate) spooled: u64,
}

/// Number of a [`Distinct`] chunk. The numbers depend on thread timing; nothing that is written may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DistinctId(pub(crate) u32);

/// All chunks of all layers.
#[derive(Debug, Default)]
pub(crate) struct Chunks {
    /// For every layer, the chunks in order.
    pub(crate) layers: Vec<Vec<DistinctId>>,
    /// By [`DistinctId`].
    pub(crate) distinct: Vec<Distinct>,
}

/// [`Chunks`] while workers fill it.
#[derive(Debug)]
pub(crate) struct Index(Mutex<State>);

#[derive(Debug)]
struct State {
    ids: HashMap<[u8; 32], DistinctId>,
    chunks: Chunks,
}

/// A chunk that nobody had before.
pub(crate) struct Fresh {
    pub(crate) id: DistinctId,
    /// Which of the chunks given to [`Index::enter`].
    pub(crate) position: usize,
}

impl Index {
    pub(crate) fn new(layers: usize) -> Self {
        let chunks = Chunks { layers: vec![Vec::new(); layers], distinct: Vec::new() };
        Index(Mutex::new(State { ids: HashMap::new(), chunks }))
    }

    /// Enters consecutive chunks of a layer, given as digest and decoded size, and says which of them are new. The
    /// caller owes those a [`Index::stored`].
    pub(crate) fn enter(&self, layer: usize, first: u32, digests: &[(Digest, u32)]) -> Vec<Fresh> {
        let mut state = self.lock();
        let State { ids, chunks } = &mut *state;
        let numbers = &mut chunks.layers[layer];
        let end = first as usize + digests.len();
        if numbers.len() < end {
            numbers.resize(end, DistinctId(u32::MAX));
        }
        let mut fresh = Vec::new();
        for (position, &(digest, decoded_size)) in digests.iter().enumerate() {
            let next = DistinctId(chunks.distinct.len() as u32);
            let id = match ids.entry(digest.hash) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(place) => {
                    place.insert(next);
                    chunks.distinct.push(Distinct {
                        digest,
                        decoded_size,
                        stored_size: 0,
                        spooled: 0,
                    });
                    fresh.push(Fresh { id: next, position });
                    next
                }
            };
            numbers[first as usize + position] = id;
        }
        fresh
    }

    /// Notes where new chunks are in the spool: first byte and size.
    pub(crate) fn stored(&self, places: impl IntoIterator<Item = (DistinctId, u64, u32)>) {
        let mut state = self.lock();
        for (id, spooled, stored_size) in places {
            let distinct = &mut state.chunks.distinct[id.0 as usize];
            distinct.spooled = spooled;
            distinct.stored_size = stored_size;
        }
    }

    /// Everything, when all layers are read.
    pub(crate) fn finish(self) -> Chunks {
        self.0.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).chunks
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
