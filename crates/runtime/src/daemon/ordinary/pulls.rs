//! Layers that are being pulled.
//!
//! A pull is joined by images of the same repository alone, and each repository has slots of its
//! own. Its first pull takes one slot of the node; for further ones all repositories share
//! [`FURTHER`], so that registries that hang or trickle leave slots to others. A layer waits
//! [`SLOT_LIMIT`] at most for a slot of the node.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
    time::{Duration, Instant},
};

use lazuli_image::Digest;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::timeout,
};

use crate::sync::lock;

/// Layers of one repository that are pulled at the same time, beside one: each takes a processor.
const OF_REPOSITORY: usize = 2;

/// Layers that the node pulls at the same time. Each holds up to 14 MiB of answers.
const OF_NODE: usize = 8;

/// Layers that are pulled beside another one of the same repository. The other slots of the node
/// are left to repositories of which nothing is pulled.
const FURTHER: usize = OF_NODE / 2;

/// How long a layer waits while other repositories have all slots. Then containerd pulls it.
const SLOT_LIMIT: Duration = Duration::from_secs(5);

/// How long a layer that could not be pulled is left to containerd.
const GIVEN_UP: Duration = Duration::from_secs(600);

/// How the pull of a layer ended, or when it failed.
pub(super) type Outcome = Result<(), Instant>;

/// The pull of a layer: nothing until it has ended.
pub(super) type Running = watch::Receiver<Option<Outcome>>;

/// A layer in a repository, `registry/name`.
type Key = (String, Digest);

/// Layers that are being pulled, or were not long ago.
#[derive(Debug)]
pub(super) struct Pulls {
    layers: Mutex<HashMap<Key, Running>>,
    repositories: Mutex<HashMap<String, Weak<OfRepository>>>,
    node: Arc<Semaphore>,
    further: Arc<Semaphore>,
}

/// The slots of a repository.
#[derive(Debug)]
struct OfRepository {
    first: Arc<Semaphore>,
    further: Arc<Semaphore>,
}

/// Held while a layer is pulled.
#[derive(Debug)]
pub(super) struct PullSlot {
    _permits: Vec<OwnedSemaphorePermit>,
    /// Another layer of the repository has to find the slot taken.
    _repository: Arc<OfRepository>,
}

impl Default for Pulls {
    fn default() -> Self {
        let (layers, repositories) = Default::default();
        let [node, further] = [OF_NODE, FURTHER].map(|slots| Arc::new(Semaphore::new(slots)));
        Pulls { layers, repositories, node, further }
    }
}

impl Pulls {
    /// Registers a pull of a layer. Returns the sender for its result, unless it is running or has
    /// failed lately.
    pub(super) fn begin(
        &self,
        repository: &str,
        layer: Digest,
    ) -> Option<watch::Sender<Option<Outcome>>> {
        let mut layers = lock(&self.layers);
        layers.retain(|_, pull| match *pull.borrow() {
            // The sender of a pull that panicked is gone.
            None => pull.has_changed().is_ok(),
            Some(Ok(())) => false,
            Some(Err(when)) => when.elapsed() < GIVEN_UP,
        });
        let key = (repository.to_owned(), layer);
        if layers.contains_key(&key) {
            return None;
        }
        let (sender, running) = watch::channel(None);
        layers.insert(key, running);
        Some(sender)
    }

    /// Waits until a layer is pulled; false if it will not be.
    pub(super) async fn pulled(&self, repository: &str, layer: Digest) -> bool {
        let running = lock(&self.layers).get(&(repository.to_owned(), layer)).cloned();
        let Some(mut running) = running else { return false };
        let outcome = running.wait_for(Option::is_some).await;
        outcome.is_ok_and(|outcome| matches!(*outcome, Some(Ok(()))))
    }

    /// Waits for a slot to pull from a repository; `None` if others hold all slots for too long.
    pub(super) async fn slot(&self, repository: &str) -> Option<PullSlot> {
        let of_repository = self.slots_of(repository);
        let further = async {
            let own = of_repository.further.clone().acquire_owned().await;
            [own, self.further.clone().acquire_owned().await]
        };
        let own: Vec<_> = tokio::select! {
            biased;
            first = of_repository.first.clone().acquire_owned() => vec![first],
            further = further => further.into(),
        };
        let node = timeout(SLOT_LIMIT, self.node.clone().acquire_owned()).await.ok()?;
        // The semaphores are never closed.
        let permits = own.into_iter().chain([node]).collect::<Result<_, _>>().ok()?;
        Some(PullSlot { _permits: permits, _repository: of_repository })
    }

    fn slots_of(&self, repository: &str) -> Arc<OfRepository> {
        let mut repositories = lock(&self.repositories);
        repositories.retain(|_, slots| slots.strong_count() > 0);
        if let Some(slots) = repositories.get(repository).and_then(Weak::upgrade) {
            return slots;
        }
        let [first, further] = [1, OF_REPOSITORY].map(|slots| Arc::new(Semaphore::new(slots)));
        let slots = Arc::new(OfRepository { first, further });
        repositories.insert(repository.to_owned(), Arc::downgrade(&slots));
        slots
    }
}

#[cfg(test)]
mod tests {
    use lazuli_image::Algorithm;

    use super::*;

    fn layer() -> Digest {
        Algorithm::Sha256.digest(b"layer")
    }

    #[tokio::test]
    async fn images_of_a_repository_share_a_pull_and_others_do_not() {
        let pulls = Pulls::default();
        let sender = pulls.begin("r.example/a", layer()).unwrap();
        assert!(pulls.begin("r.example/a", layer()).is_none());
        let other = pulls.begin("r.example/b", layer()).unwrap();
        sender.send_replace(Some(Ok(())));
        other.send_replace(Some(Err(Instant::now())));
        assert!(pulls.pulled("r.example/a", layer()).await);
        assert!(!pulls.pulled("r.example/b", layer()).await);
        assert!(!pulls.pulled("r.example/c", layer()).await);
        // A failed pull is not repeated for a while; a successful one may be repeated once its data
        // is gone.
        assert!(pulls.begin("r.example/b", layer()).is_none());
        assert!(pulls.begin("r.example/a", layer()).is_some());
    }

    #[tokio::test]
    async fn waiters_of_a_pull_that_panics_go_on() {
        let pulls = Pulls::default();
        drop(pulls.begin("r.example/a", layer()).unwrap());
        assert!(!pulls.pulled("r.example/a", layer()).await);
        assert!(pulls.begin("r.example/a", layer()).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn repositories_that_hang_leave_slots_to_others() {
        let pulls = Pulls::default();
        let (mut held, at_once) = (Vec::new(), Duration::ZERO);
        for repository in ["a", "b", "c"] {
            let slots = async {
                loop {
                    held.push(pulls.slot(repository).await.unwrap());
                }
            };
            // It waits for its own slots.
            assert!(timeout(SLOT_LIMIT * 100, slots).await.is_err());
        }
        assert_eq!(held.len(), 3 + FURTHER);
        let other = timeout(at_once, pulls.slot("d")).await.expect("there is one").unwrap();
        assert!(timeout(SLOT_LIMIT * 100, pulls.slot("d")).await.is_err(), "the others are taken");
        assert!(pulls.slot("e").await.is_none(), "the node has none left");
        drop(other);
        assert!(timeout(at_once, pulls.slot("d")).await.is_ok_and(|slot| slot.is_some()));
    }
}
