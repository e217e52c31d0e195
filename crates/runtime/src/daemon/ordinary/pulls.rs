//! Layers that are being pulled.
//!
//! A pull is joined by images of the same repository alone, and each repository has slots of its
//! own. Its first pull takes one slot of the node; for further ones all repositories share
//! [`FURTHER`], so that registries that hang or trickle leave slots to others. A layer that
//! containerd could pull waits [`SLOT_LIMIT`] at most for a slot of the node; other layers try
//! again after that.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak, atomic::AtomicU64},
    time::{Duration, Instant},
};

use lazuli_image::Digest;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::timeout,
};

use super::whole_layer::LayerError;
use crate::{cache::CachedBlob, sync::lock};

/// Layers of one repository that are pulled at the same time, beside one: each keeps one processor
/// busy with decoding, and others in part.
const OF_REPOSITORY: usize = 2;

/// Layers that the node pulls at the same time. Each holds up to 14 MiB of answers, and 5 MiB of
/// chunks.
const OF_NODE: usize = 8;

/// Layers that are pulled beside another one of the same repository. The other slots of the node
/// are left to repositories of which nothing is pulled.
const FURTHER: usize = OF_NODE / 2;

/// How long a layer waits while other repositories have all slots. Then containerd pulls it.
const SLOT_LIMIT: Duration = Duration::from_secs(5);

/// How long a layer that could not be pulled is left to containerd.
const GIVEN_UP: Duration = Duration::from_secs(600);

/// Who waits for a pull.
#[derive(Clone, Debug)]
pub(super) enum PullFor {
    /// containerd. It pulls by itself what this node does not, and is not kept waiting.
    Containerd,
    /// A command. It has no other way, and waits for as long as it takes. What is pulled for it
    /// stays open, so that nothing is evicted before it is used.
    Command(OpenBlobs),
}

/// Blobs of layers that were pulled.
pub(super) type OpenBlobs = Arc<Mutex<Vec<Arc<CachedBlob>>>>;

/// How the pull of a layer ended.
pub(super) type Outcome = Result<(), Failed>;

/// The failure of a pull.
#[derive(Clone, Debug)]
pub(super) struct Failed {
    at: Instant,
    pub(super) why: Arc<LayerError>,
}

impl From<LayerError> for Failed {
    fn from(error: LayerError) -> Self {
        Failed { at: Instant::now(), why: Arc::new(error) }
    }
}

/// The pull of a layer.
#[derive(Debug)]
struct Running {
    /// Nothing until it has ended.
    ended: watch::Receiver<Option<Outcome>>,
    fetched: Arc<AtomicU64>,
}

/// The other end of it.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) ended: watch::Sender<Option<Outcome>>,
    /// Stored bytes that are here.
    pub(super) fetched: Arc<AtomicU64>,
}

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
    /// Registers a pull of a layer, by its key, unless it is running, or has failed lately and
    /// there is another way to the layer.
    pub(super) fn begin(&self, repository: &str, layer: Digest, by: &PullFor) -> Option<Begun> {
        let mut layers = lock(&self.layers);
        layers.retain(|_, pull| match &*pull.ended.borrow() {
            // The sender of a pull that panicked is gone.
            None => pull.ended.has_changed().is_ok(),
            Some(Ok(())) => false,
            Some(Err(failed)) => failed.at.elapsed() < GIVEN_UP,
        });
        let key = (repository.to_owned(), layer);
        let known = layers.get(&key).map(|pull| pull.ended.borrow().is_some());
        match (known, by) {
            (None, _) | (Some(true), PullFor::Command(_)) => {}
            (Some(true), PullFor::Containerd) | (Some(false), _) => return None,
        }
        let ((sender, ended), fetched) = (watch::channel(None), Arc::<AtomicU64>::default());
        layers.insert(key, Running { ended, fetched: fetched.clone() });
        Some(Begun { ended: sender, fetched })
    }

    /// Waits until the pull of a layer has ended; `None` if there is none, or it panicked.
    pub(super) async fn ended(&self, repository: &str, layer: Digest) -> Option<Outcome> {
        let key = (repository.to_owned(), layer);
        let mut ended = lock(&self.layers).get(&key).map(|running| running.ended.clone())?;
        let outcome = ended.wait_for(Option::is_some).await;
        outcome.ok()?.clone()
    }

    /// How many stored bytes of a layer that is being pulled are here.
    pub(super) fn fetched(&self, repository: &str, layer: Digest) -> Option<Arc<AtomicU64>> {
        let key = (repository.to_owned(), layer);
        lock(&self.layers).get(&key).map(|running| running.fetched.clone())
    }

    /// Waits for a slot to pull from a repository; `None` if others hold all slots for too long.
    pub(super) async fn slot(&self, repository: &str, by: &PullFor) -> Option<PullSlot> {
        match by {
            PullFor::Containerd => self.one_slot(repository).await,
            // The repository's own slots are others' in between.
            PullFor::Command(_) => loop {
                if let Some(slot) = self.one_slot(repository).await {
                    return Some(slot);
                }
            },
        }
    }

    async fn one_slot(&self, repository: &str) -> Option<PullSlot> {
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

    const CONTAINERD: &PullFor = &PullFor::Containerd;

    fn layer() -> Digest {
        Algorithm::Sha256.digest(b"layer")
    }

    #[tokio::test]
    async fn images_of_a_repository_share_a_pull_and_others_do_not() {
        let pulls = Pulls::default();
        let begin = |repository, by| pulls.begin(repository, layer(), by);
        let command = &PullFor::Command(OpenBlobs::default());
        let own = begin("r.example/a", CONTAINERD).unwrap();
        assert!(begin("r.example/a", CONTAINERD).is_none());
        assert!(begin("r.example/a", command).is_none());
        let other = begin("r.example/b", CONTAINERD).unwrap();
        own.ended.send_replace(Some(Ok(())));
        other.ended.send_replace(Some(Err(LayerError::Busy.into())));
        assert!(matches!(pulls.ended("r.example/a", layer()).await, Some(Ok(()))));
        assert!(matches!(pulls.ended("r.example/b", layer()).await, Some(Err(_))));
        assert!(pulls.ended("r.example/c", layer()).await.is_none());
        // A failed pull is not repeated for a while, unless there is no other way; a successful one
        // may be repeated once its data is gone.
        assert!(begin("r.example/b", CONTAINERD).is_none());
        assert!(begin("r.example/b", command).is_some());
        assert!(begin("r.example/a", CONTAINERD).is_some());
    }

    #[tokio::test]
    async fn waiters_of_a_pull_that_panics_go_on() {
        let pulls = Pulls::default();
        drop(pulls.begin("r.example/a", layer(), CONTAINERD).unwrap());
        assert!(pulls.ended("r.example/a", layer()).await.is_none());
        assert!(pulls.begin("r.example/a", layer(), CONTAINERD).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn repositories_that_hang_leave_slots_to_others() {
        let pulls = Pulls::default();
        let (mut held, at_once) = (Vec::new(), Duration::ZERO);
        for repository in ["a", "b", "c"] {
            let slots = async {
                loop {
                    held.push(pulls.slot(repository, CONTAINERD).await.unwrap());
                }
            };
            // It waits for its own slots.
            assert!(timeout(SLOT_LIMIT * 100, slots).await.is_err());
        }
        assert_eq!(held.len(), 3 + FURTHER);
        let slot = |repository| pulls.slot(repository, CONTAINERD);
        let other = timeout(at_once, slot("d")).await.expect("there is one").unwrap();
        assert!(timeout(SLOT_LIMIT * 100, slot("d")).await.is_err(), "the others are taken");
        assert!(slot("e").await.is_none(), "the node has none left");
        let by = PullFor::Command(OpenBlobs::default());
        let command = pulls.slot("e", &by);
        assert!(timeout(SLOT_LIMIT * 100, command).await.is_err(), "a command waits");
        drop(other);
        assert!(timeout(at_once, slot("d")).await.is_ok_and(|slot| slot.is_some()));
    }
}
