//! Limits of concurrent fetches of manifests.
//!
//! A manifest may have 4 MiB, so this bounds memory. A registry that hangs takes a share of the
//! permits at most, and images of other registries don't wait behind it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Concurrent fetches.
const ALL: usize = 48;

/// Concurrent fetches from one registry.
const OF_ONE: usize = 16;

/// The permits, in all and by registry.
#[derive(Debug)]
pub(crate) struct FetchPermits {
    all: Arc<Semaphore>,
    of_one: Mutex<HashMap<String, Weak<Semaphore>>>,
}

/// Permission for one fetch, until it is dropped.
#[derive(Debug)]
pub(crate) struct FetchPermit {
    _of_one: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl Default for FetchPermits {
    fn default() -> Self {
        FetchPermits { all: Arc::new(Semaphore::new(ALL)), of_one: Mutex::default() }
    }
}

impl FetchPermits {
    /// Waits for a permit to fetch from `registry`. `None` only if the semaphores are closed, which
    /// never happens.
    pub(crate) async fn at(&self, registry: &str) -> Option<FetchPermit> {
        let of_one = self.of(registry).acquire_owned().await.ok()?;
        let of_all = self.all.clone().acquire_owned().await.ok()?;
        Some(FetchPermit { _of_one: of_one, _of_all: of_all })
    }

    fn of(&self, registry: &str) -> Arc<Semaphore> {
        let mut known = self.of_one.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(permits) = known.get(registry).and_then(Weak::upgrade) {
            return permits;
        }
        known.retain(|_, permits| permits.strong_count() > 0);
        let permits = Arc::new(Semaphore::new(OF_ONE));
        known.insert(registry.to_owned(), Arc::downgrade(&permits));
        permits
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn one_registry_does_not_take_all_permits() {
        let permits = FetchPermits::default();
        let mut held = Vec::new();
        while let Some(permit) = permits.at("slow.example").now_or_never() {
            held.push(permit.unwrap());
        }
        assert_eq!(held.len(), OF_ONE);
        assert!(permits.at("other.example").now_or_never().is_some());
        held.pop();
        assert!(permits.at("slow.example").now_or_never().is_some());
    }
}
