//! Resources of all fetches of a node: threads that decode, check and write chunks, and memory for
//! answers.

use std::{
    collections::HashMap,
    panic,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tokio::{
    runtime::Handle,
    sync::{Semaphore, SemaphorePermit},
    task,
};

use super::{
    account::Account,
    priority_semaphore::{Claim, PrioritySemaphore},
};
use crate::{source::link_speed::LinkSpeed, sync::lock};

/// Stored bytes of answers that are in memory at a time, over all blobs: sixteen of the biggest
/// requests. Half of a megabyte fills 100 Mbit/s at 40 ms, so this fills any link of a node.
const MEMORY: u64 = 64 << 20;

/// Readers of an image without any data for this time wait for a server and not for the link:
/// nothing needs to yield to them. Well above the time in which registries answer, and below the
/// quiet time after which a start counts as over.
const STALLED: Duration = Duration::from_secs(2);

/// Interval between checks whether urgent fetches have ended.
const LOOK: Duration = Duration::from_millis(200);

/// Whether a reader waits for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    /// A reader waits.
    Reader,
    /// No reader waits yet.
    Background,
}

/// Bounds how many chunks are decoded at a time, over all blobs: one per processor. Images take
/// turns.
#[derive(Debug)]
pub(crate) struct Workers {
    runtime: Handle,
    all: Arc<PrioritySemaphore>,
    /// As many as `all`, taken first by background work: so it stands in no queue in
    /// front of a reader.
    background: Arc<PrioritySemaphore>,
    /// Half of them, taken in addition while any reader waits.
    polite: Arc<PrioritySemaphore>,
    /// Held by a background scan of a whole blob: one at a time.
    scan: Semaphore,
    memory: Arc<PrioritySemaphore>,
    link_speed: LinkSpeed,
    /// Readers that wait for data, by the account that is charged.
    readers: Mutex<HashMap<Account, Readers>>,
    /// Fetches that a start, a pull or a client's order waits for, by number: when they began, or
    /// data came.
    urgent: Mutex<HashMap<u64, Instant>>,
    next_urgent: AtomicU64,
}

/// Those of one image.
#[derive(Debug)]
struct Readers {
    count: usize,
    /// When the first of them came, or data did.
    last: Instant,
}

/// A reader that waits, as long as this lives.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    workers: &'a Workers,
    account: Account,
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        let mut all = lock(&self.workers.readers);
        if let Some(readers) = all.get_mut(&self.account) {
            readers.count -= 1;
            if readers.count == 0 {
                all.remove(&self.account);
            }
        }
    }
}

/// An urgent fetch, as long as this lives.
#[derive(Debug)]
pub(crate) struct UrgentFetch<'a> {
    workers: &'a Workers,
    number: u64,
}

impl UrgentFetch<'_> {
    /// Records the arrival of data.
    pub(crate) fn data_arrived(&self) {
        lock(&self.workers.urgent).insert(self.number, Instant::now());
    }
}

impl Drop for UrgentFetch<'_> {
    fn drop(&mut self) {
        lock(&self.workers.urgent).remove(&self.number);
    }
}

impl Workers {
    /// # Panics
    /// Outside a tokio runtime.
    pub(crate) fn new() -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from) as u64;
        Workers {
            runtime: Handle::current(),
            all: PrioritySemaphore::new(processors),
            background: PrioritySemaphore::new(processors),
            polite: PrioritySemaphore::new((processors / 2).max(1)),
            scan: Semaphore::new(1),
            memory: PrioritySemaphore::shared(MEMORY),
            link_speed: LinkSpeed::default(),
            readers: Mutex::default(),
            urgent: Mutex::default(),
            next_urgent: AtomicU64::new(0),
        }
    }

    /// Counts a fetch that a start, a pull or a client's order waits for.
    pub(crate) fn urgent_fetch(&self) -> UrgentFetch<'_> {
        let number = self.next_urgent.fetch_add(1, Ordering::Relaxed);
        let fetch = UrgentFetch { workers: self, number };
        fetch.data_arrived();
        fetch
    }

    /// Returns whether there is any such fetch whose data is arriving.
    pub(crate) fn has_urgent_fetches(&self) -> bool {
        lock(&self.urgent).values().any(|last| last.elapsed() < STALLED)
    }

    /// Waits until there was none for the time `quiet`, but not for much longer than `longest`.
    pub(crate) async fn after_urgent_fetches(&self, quiet: Duration, longest: Duration) {
        let begun = Instant::now();
        let mut last = Instant::now();
        while last.elapsed() < quiet && begun.elapsed() < longest {
            tokio::time::sleep(LOOK.min(quiet)).await;
            if self.has_urgent_fetches() {
                last = Instant::now();
            }
        }
    }

    /// Counts a reader that waits.
    pub(crate) fn reader(&self, account: Account) -> Reader<'_> {
        let new = || Readers { count: 0, last: Instant::now() };
        lock(&self.readers).entry(account).or_insert_with(new).count += 1;
        Reader { workers: self, account }
    }

    /// Records the arrival of data for an image.
    pub(crate) fn data_arrived(&self, account: &Account) {
        if let Some(readers) = lock(&self.readers).get_mut(account) {
            readers.last = Instant::now();
        }
    }

    /// Returns whether any reader waits whose data is arriving.
    pub(crate) fn is_awaited(&self) -> bool {
        lock(&self.readers).values().any(|readers| readers.last.elapsed() < STALLED)
    }

    /// Returns whether any reader of the image waits.
    pub(crate) fn has_readers(&self, account: &Account) -> bool {
        lock(&self.readers).contains_key(account)
    }

    /// The memory for answers of sources, in bytes.
    pub(crate) fn memory(&self) -> &Arc<PrioritySemaphore> {
        &self.memory
    }

    /// The speed at which answers arrive.
    pub(crate) fn link_speed(&self) -> &LinkSpeed {
        &self.link_speed
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Waits for the only permit to scan a whole blob in the background.
    pub(crate) async fn scan_permit(&self) -> Option<SemaphorePermit<'_>> {
        self.scan.acquire().await.ok()
    }

    /// Runs `job` for an image on a thread that may block. Panics when the job does.
    pub(crate) async fn run<R: Send + 'static>(
        &self,
        account: Account,
        priority: Priority,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> R {
        // Readers and others have semaphores of their own.
        let claim = Claim::new(account, || true);
        let is_background = priority == Priority::Background;
        let _background = match is_background {
            true => Some(self.background.take(1, &claim).await),
            false => None,
        };
        let yields = is_background && self.is_awaited();
        let _polite = if yields { Some(self.polite.take(1, &claim).await) } else { None };
        let _permit = self.all.take(1, &claim).await;
        match task::spawn_blocking(job).await {
            Ok(result) => result,
            Err(error) => match error.try_into_panic() {
                Ok(reason) => panic::resume_unwind(reason),
                // Blocking tasks are cancelled only when the runtime shuts down, and this future
                // with it.
                Err(_) => std::future::pending().await,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use lazuli_image::Digest;

    use super::*;

    const STUCK: Account = Account::Image(Digest::sha256([1; 32]));
    const OTHER: Account = Account::Image(Digest::sha256([2; 32]));

    #[tokio::test]
    async fn stalled_fetches_do_not_hold_up_background_work() {
        let workers = Workers::new();
        assert!(!workers.has_urgent_fetches());
        let (stuck, other) = (workers.urgent_fetch(), workers.urgent_fetch());
        drop(other);
        assert!(workers.has_urgent_fetches());
        lock(&workers.urgent).insert(stuck.number, Instant::now() - STALLED);
        assert!(!workers.has_urgent_fetches());
        stuck.data_arrived();
        assert!(workers.has_urgent_fetches());
        drop(stuck);
        assert!(!workers.has_urgent_fetches());
    }

    #[tokio::test]
    async fn stalled_readers_do_not_hold_up_background_work() {
        let workers = Workers::new();
        let stuck = workers.reader(STUCK);
        assert!(workers.is_awaited() && workers.has_readers(&STUCK));
        let long_ago = Instant::now() - STALLED;
        lock(&workers.readers).get_mut(&STUCK).unwrap().last = long_ago;
        assert!(!workers.is_awaited() && workers.has_readers(&STUCK));
        let more = workers.reader(STUCK);
        assert!(!workers.is_awaited(), "more of them change nothing");
        workers.data_arrived(&OTHER);
        assert!(!workers.is_awaited());
        workers.data_arrived(&STUCK);
        assert!(workers.is_awaited());
        drop((stuck, more));
        assert!(!workers.is_awaited() && !workers.has_readers(&STUCK));
    }
}
