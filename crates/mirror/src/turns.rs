//! How many manifests are fetched at a time.
//!
//! A manifest may have 4 MiB, so this bounds memory. A registry that hangs has a part of the turns
//! at most: images of others do not wait behind it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Requests at a time.
const ALL: usize = 48;

/// Requests at a time to one registry.
const OF_ONE: usize = 16;

/// See the module.
#[derive(Debug)]
pub(crate) struct Turns {
    all: Arc<Semaphore>,
    of_one: Mutex<HashMap<String, Weak<Semaphore>>>,
}

/// Leave to ask. The turn is over when it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    _of_one: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl Default for Turns {
    fn default() -> Self {
        Turns { all: Arc::new(Semaphore::new(ALL)), of_one: Mutex::default() }
    }
}

impl Turns {
    /// Waits for a turn at `registry`. None if there are none any more, which does not happen.
    pub(crate) async fn at(&self, registry: &str) -> Option<Turn> {
        let of_one = self.of(registry).acquire_owned().await.ok()?;
        let of_all = self.all.clone().acquire_owned().await.ok()?;
        Some(Turn { _of_one: of_one, _of_all: of_all })
    }

    fn of(&self, registry: &str) -> Arc<Semaphore> {
        let mut known = self.of_one.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(turns) = known.get(registry).and_then(Weak::upgrade) {
            return turns;
        }
        known.retain(|_, turns| turns.strong_count() > 0);
        let turns = Arc::new(Semaphore::new(OF_ONE));
        known.insert(registry.to_owned(), Arc::downgrade(&turns));
        turns
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn one_registry_does_not_take_all_permits() {
        let turns = Turns::default();
        let mut held = Vec::new();
        while let Some(turn) = turns.at("slow.example").now_or_never() {
            held.push(turn.unwrap());
        }
        assert_eq!(held.len(), OF_ONE);
        assert!(turns.at("other.example").now_or_never().is_some());
        held.pop();
        assert!(turns.at("slow.example").now_or_never().is_some());
    }
}
