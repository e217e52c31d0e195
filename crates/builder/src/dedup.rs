//! Deduplication of chunks over all layers of an image and the blobs of its [`Dictionary`].

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lazuli_image::Digest;

use crate::dictionary::Dictionary;

/// Interval at which a waiting thread checks whether another one failed.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// A chunk that differs from all others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Distinct {
    /// The digest of the decoded bytes.
    pub(crate) digest: Digest,
    /// Bytes once decoded.
    pub(crate) decoded_size: u32,
    /// The dictionary's first blob that has it; else the lowest layer, as far as is known, and the
    /// first use there.
    pub(crate) owner: Owner,
}

/// The place of a chunk. Stored chunks order before those still to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    /// In this blob of the dictionary, under this number.
    Dictionary { blob: u8, number: u32 },
    /// In the blob of this layer, of which it is this chunk.
    Layer { layer: u8, number: u32 },
}

/// Number of a [`Distinct`] chunk. The numbers depend on thread timing; nothing that is written
/// may.
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
pub(crate) struct SharedChunks {
    state: Mutex<EnteredChunks>,
    /// Told whenever chunks were entered.
    entered: Condvar,
}

#[derive(Debug)]
struct EnteredChunks {
    ids: HashMap<[u8; 32], DistinctId>,
    chunks: Chunks,
}

/// A chunk that is to be stored.
pub(crate) struct Fresh {
    pub(crate) id: DistinctId,
    /// The position among the chunks given to [`SharedChunks::enter`].
    pub(crate) position: usize,
}

impl SharedChunks {
    pub(crate) fn new(layers: usize, dictionary: &Dictionary) -> Self {
        let mut chunks = Chunks { layers: vec![Vec::new(); layers], distinct: Vec::new() };
        let mut ids = HashMap::new();
        for (blob, known) in (0..).zip(dictionary.blobs()) {
            for chunk in &known.record.blob.chunks {
                if let Entry::Vacant(place) = ids.entry(chunk.digest.hash) {
                    let owner = Owner::Dictionary { blob, number: chunk.number };
                    place.insert(DistinctId(chunks.distinct.len() as u32));
                    let (digest, decoded_size) = (chunk.digest, chunk.decoded_size);
                    chunks.distinct.push(Distinct { digest, decoded_size, owner });
                }
            }
        }
        SharedChunks { state: Mutex::new(EnteredChunks { ids, chunks }), entered: Condvar::new() }
    }

    /// Enters consecutive chunks of a layer, given as digest and decoded size. Waits until all
    /// chunks before them are entered, or `stop` is set. Returns the chunks that the layer has to
    /// store as far as is known, because no earlier place has them. The final owner thus always
    /// stores its chunks; a higher layer that was faster may have stored them as well.
    pub(crate) fn enter(
        &self,
        layer: u8,
        first: u32,
        digests: &[(Digest, u32)],
        stop: &AtomicBool,
    ) -> Vec<Fresh> {
        let mut state = self.lock();
        while state.chunks.layers[usize::from(layer)].len() < first as usize {
            if stop.load(Ordering::Relaxed) {
                return Vec::new();
            }
            let woken = self.entered.wait_timeout(state, LOOK);
            state = woken.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        let EnteredChunks { ids, chunks } = &mut *state;
        let numbers = &mut chunks.layers[usize::from(layer)];
        let mut fresh = Vec::new();
        for (position, &(digest, decoded_size)) in digests.iter().enumerate() {
            let owner = Owner::Layer { layer, number: first + position as u32 };
            let id = match ids.entry(digest.hash) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(place) => {
                    let id = *place.insert(DistinctId(chunks.distinct.len() as u32));
                    chunks.distinct.push(Distinct { digest, decoded_size, owner });
                    fresh.push(Fresh { id, position });
                    id
                }
            };
            let known = &mut chunks.distinct[id.0 as usize].owner;
            if owner < *known {
                *known = owner;
                fresh.push(Fresh { id, position });
            }
            numbers.push(id);
        }
        self.entered.notify_all();
        fresh
    }

    /// Everything, when all layers are read.
    pub(crate) fn finish(self) -> Chunks {
        self.state.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).chunks
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, EnteredChunks> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
