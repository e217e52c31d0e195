//! Work that gives way to everything else on the node.

use std::{
    io::{self, Read},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rustix::{process::setpriority_process, thread::gettid};
use tokio::sync::oneshot;

use crate::cache::Cache;

/// The lowest priority of a thread. The kernel's schedulers for disks go by it, too.
const LOWEST: i32 = 19;

/// Interval for checking whether readers still wait.
const PAUSE: Duration = Duration::from_millis(5);

/// Longest pause for readers before a little more is read: some may always wait.
const LONGEST: Duration = Duration::from_secs(1);

/// Runs `work` on a thread of its own with the lowest priority; `None` if it panicked or no thread
/// could be started.
pub(super) async fn in_background<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (done, result) = oneshot::channel();
    let thread = thread::Builder::new().name("background".to_owned()).spawn(move || {
        if let Err(error) = setpriority_process(Some(gettid()), LOWEST) {
            tracing::debug!(%error, "background work has the usual priority");
        }
        let _ = done.send(work());
    });
    thread.ok()?;
    result.await.ok()
}

/// Pauses while readers of the cache wait.
pub(super) struct Yielding<R> {
    inner: R,
    cache: Arc<Cache>,
}

impl<R> Yielding<R> {
    pub(super) fn new(inner: R, cache: Arc<Cache>) -> Self {
        Yielding { inner, cache }
    }
}

/// Waits while readers of the cache wait. Blocks.
pub(super) fn give_way(cache: &Cache) {
    let begun = Instant::now();
    while cache.is_awaited() && begun.elapsed() < LONGEST {
        thread::sleep(PAUSE);
    }
}

impl<R: Read> Read for Yielding<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        give_way(&self.cache);
        self.inner.read(buffer)
    }
}
