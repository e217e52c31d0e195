//! What all fetches of a node share: threads that decode, check and write chunks, and room for answers.

use std::{
    panic,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use tokio::{
    runtime::Handle,
    sync::{Semaphore, SemaphorePermit},
    task,
};

use crate::source::priority_semaphore::PrioritySemaphore;

/// Stored bytes of answers that are in memory at a time, over all blobs: sixteen of the biggest requests. Half of a megabyte
/// fills 100 Mbit/s at 40 ms, so this fills any link of a node.
const ROOM: u64 = 64 << 20;

/// Bounds how many chunks are decoded at a time, over all blobs: one per processor.
#[derive(Debug)]
pub(crate) struct Workers {
    runtime: Handle,
    all: Semaphore,
    /// As many as `all`, taken first by work that nobody waits for: so it stands in no queue in front of a reader.
    background: Semaphore,
    /// Half of them, taken in addition while any reader waits.
    polite: Semaphore,
    /// For long work in the background: one blob at a time.
    turn: Semaphore,
    room: Arc<PrioritySemaphore>,
    /// Readers who wait for data.
    readers: AtomicUsize,
}

/// A reader who waits, as long as this lives.
#[derive(Debug)]
pub(crate) struct Reader<'a>(&'a Workers);

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.0.readers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Workers {
    /// # Panics
    /// Outside a tokio runtime.
    pub(crate) fn new() -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        Workers {
            runtime: Handle::current(),
            all: Semaphore::new(processors),
            background: Semaphore::new(processors),
            polite: Semaphore::new((processors / 2).max(1)),
            turn: Semaphore::new(1),
            room: PrioritySemaphore::new(ROOM),
            readers: AtomicUsize::new(0),
        }
    }

    /// Counts a reader who waits.
    pub(crate) fn reader(&self) -> Reader<'_> {
        self.readers.fetch_add(1, Ordering::Relaxed);
        Reader(self)
    }

    /// Whether any reader waits for data.
    pub(crate) fn is_awaited(&self) -> bool {
        self.readers.load(Ordering::Relaxed) > 0
    }

    /// Bytes of memory for what sources deliver.
    pub(crate) fn room(&self) -> &Arc<PrioritySemaphore> {
        &self.room
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Waits until no other blob is worked through in the background, and keeps the others waiting until the result
    /// is dropped.
    pub(crate) async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        self.turn.acquire().await.ok()
    }

    /// Runs `job` on a thread that may block. Panics when the job does.
    pub(crate) async fn run<R: Send + 'static>(
        &self,
        background: bool,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> R {
        // Neither semaphore is ever closed, so the permits are always granted.
        let _background = if background { self.background.acquire().await.ok() } else { None };
        let yields = background && self.is_awaited();
        let _polite = if yields { self.polite.acquire().await.ok() } else { None };
        let _permit = self.all.acquire().await;
        match task::spawn_blocking(job).await {
            Ok(result) => result,
            Err(error) => match error.try_into_panic() {
                Ok(reason) => panic::resume_unwind(reason),
                // Blocking tasks are cancelled only when the runtime shuts down, and this future with it.
                Err(_) => std::future::pending().await,
            },
        }
    }
}
