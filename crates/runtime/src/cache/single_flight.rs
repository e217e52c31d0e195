//! Single flight: one fetch per chunk, shared by every reader that waits for it.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::sync::watch;

use crate::{error::ReadError, sharing::workers::Priority, sync::lock};

type Outcome = Option<Result<(), ReadError>>;

/// The chunks that are being fetched.
#[derive(Debug, Default)]
pub(crate) struct InFlight(Arc<Mutex<HashMap<usize, watch::Receiver<Outcome>>>>);

/// The right and duty to fetch one chunk. Dropping it unfinished wakes the waiters, one of which
/// takes over.
pub(crate) struct Lease {
    chunk: usize,
    wanted: bool,
    outcome: watch::Sender<Outcome>,
    in_flight: InFlight,
    is_over: bool,
}

/// A share in a fetch that is in flight.
#[derive(Debug)]
pub(crate) struct Waiter(watch::Receiver<Outcome>);

/// The chunks in flight, locked.
pub(crate) struct LockedInFlight<'a> {
    in_flight: &'a InFlight,
    map: MutexGuard<'a, HashMap<usize, watch::Receiver<Outcome>>>,
}

impl InFlight {
    pub(crate) fn lock(&self) -> LockedInFlight<'_> {
        let map = lock(&self.0);
        LockedInFlight { in_flight: self, map }
    }
}

impl LockedInFlight<'_> {
    /// Joins the fetch of `chunk`, if it is in flight.
    pub(crate) fn join(&self, chunk: usize) -> Option<Waiter> {
        self.map.get(&chunk).cloned().map(Waiter)
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    pub(crate) fn has_any(&self, mut chunks: std::ops::Range<usize>) -> bool {
        chunks.any(|chunk| self.has(chunk))
    }

    pub(crate) fn has(&self, chunk: usize) -> bool {
        self.map.contains_key(&chunk)
    }

    /// Starts the fetch of `chunk`, which must not be in flight.
    pub(crate) fn start(&mut self, chunk: usize, priority: Priority) -> Lease {
        let (outcome, waiter) = watch::channel(None);
        self.map.insert(chunk, waiter);
        let in_flight = InFlight(self.in_flight.0.clone());
        let wanted = priority == Priority::Reader;
        Lease { chunk, wanted, outcome, in_flight, is_over: false }
    }
}

impl Lease {
    /// Position of the chunk in the blob's layout.
    pub(crate) fn chunk(&self) -> usize {
        self.chunk
    }

    /// Returns whether a reader waits for the chunk: it was requested, or a reader has joined
    /// since. (One receiver is the map's own.)
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted || self.outcome.receiver_count() > 1
    }

    /// [`Lease::is_wanted`] as a function that outlives the lease. Waiters notice an abandoned
    /// fetch only after this is dropped, too.
    pub(crate) fn wish(&self) -> impl Fn() -> bool + Send + Sync + 'static {
        let (wanted, outcome) = (self.wanted, self.outcome.clone());
        move || wanted || outcome.receiver_count() > 1
    }

    /// Reports the result to all waiters. The bit of a ready chunk must be set before, so that a
    /// reader finds either the bit or the fetch.
    pub(crate) fn finish(mut self, result: Result<(), ReadError>) {
        // First, so that a reader that learns of a failure and asks again does not join this fetch.
        self.leave();
        self.outcome.send_replace(Some(result));
    }

    /// The same for a failure, which readers that ask within `time` are told, too.
    pub(crate) fn fail_for(self, error: ReadError, time: Duration) {
        self.outcome.send_replace(Some(Err(error)));
        tokio::spawn(async move {
            tokio::time::sleep(time).await;
            drop(self);
        });
    }

    /// Leaves the map, once: later the chunk may be in flight again.
    fn leave(&mut self) {
        if !std::mem::replace(&mut self.is_over, true) {
            self.in_flight.lock().map.remove(&self.chunk);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.leave();
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("chunk", &self.chunk).finish_non_exhaustive()
    }
}

impl Waiter {
    /// Waits for the outcome of the fetch; `None` if it was abandoned.
    pub(crate) async fn wait(mut self) -> Outcome {
        let outcome = self.0.wait_for(Option::is_some).await.ok()?;
        outcome.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Statements of their own: the lock is held to the end of each, and a lease takes it when it
    /// ends.
    fn start(in_flight: &InFlight, chunk: usize, priority: Priority) -> Lease {
        in_flight.lock().start(chunk, priority)
    }

    fn join(in_flight: &InFlight, chunk: usize) -> Option<Waiter> {
        in_flight.lock().join(chunk)
    }

    #[tokio::test]
    async fn waiters_learn_how_a_fetch_ended() {
        let in_flight = InFlight::default();
        let lease = start(&in_flight, 7, Priority::Background);
        assert!(!lease.is_wanted());
        let waiters = [join(&in_flight, 7).unwrap(), join(&in_flight, 7).unwrap()];
        assert!(lease.is_wanted());
        assert!(join(&in_flight, 8).is_none());
        lease.finish(Ok(()));
        assert!(join(&in_flight, 7).is_none());
        for waiter in waiters {
            assert!(matches!(waiter.wait().await, Some(Ok(()))));
        }
    }

    #[tokio::test]
    async fn an_abandoned_fetch_can_be_taken_over() {
        let in_flight = InFlight::default();
        let lease = start(&in_flight, 7, Priority::Reader);
        let waiter = join(&in_flight, 7).unwrap();
        drop(lease);
        assert!(waiter.wait().await.is_none());
        start(&in_flight, 7, Priority::Reader).finish(Ok(()));
    }
}
