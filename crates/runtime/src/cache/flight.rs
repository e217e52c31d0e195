//! One fetch per chunk, however many wait for it.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::watch;

use crate::error::ReadError;

type Outcome = Option<Result<(), ReadError>>;

/// The chunks that are being fetched.
#[derive(Debug, Default)]
pub(crate) struct Flights(Arc<Mutex<HashMap<usize, watch::Receiver<Outcome>>>>);

/// The duty to fetch one chunk. Whoever holds it finishes it; when it is dropped unfinished, those who
/// wait wake up and one of them takes over.
pub(crate) struct Lease {
    chunk: usize,
    wanted: bool,
    outcome: watch::Sender<Outcome>,
    flights: Flights,
    landed: bool,
}

/// A seat in somebody's flight.
#[derive(Debug)]
pub(crate) struct Seat(watch::Receiver<Outcome>);

/// The flights, with nobody else changing them.
pub(crate) struct Tower<'a> {
    flights: &'a Flights,
    map: MutexGuard<'a, HashMap<usize, watch::Receiver<Outcome>>>,
}

impl Flights {
    pub(crate) fn lock(&self) -> Tower<'_> {
        let map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Tower { flights: self, map }
    }
}

impl Tower<'_> {
    /// A seat in the flight of `chunk`, if there is one.
    pub(crate) fn join(&self, chunk: usize) -> Option<Seat> {
        self.map.get(&chunk).cloned().map(Seat)
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

    /// Starts the flight of `chunk`, which must not have one. `wanted` says that somebody waits for it.
    pub(crate) fn start(&mut self, chunk: usize, wanted: bool) -> Lease {
        let (outcome, seat) = watch::channel(None);
        self.map.insert(chunk, seat);
        let flights = Flights(self.flights.0.clone());
        Lease { chunk, wanted, outcome, flights, landed: false }
    }
}

impl Lease {
    /// Position of the chunk in the blob's layout.
    pub(crate) fn chunk(&self) -> usize {
        self.chunk
    }

    /// Whether somebody waits for the chunk: it was asked for, or has been joined since. (One
    /// receiver is the map's own.)
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted || self.outcome.receiver_count() > 1
    }

    /// What [`Lease::is_wanted`] says, for those who have to know it later. Whoever waits notices an abandoned flight only when
    /// this is gone, too.
    pub(crate) fn wish(&self) -> impl Fn() -> bool + Send + Sync + 'static {
        let (wanted, outcome) = (self.wanted, self.outcome.clone());
        move || wanted || outcome.receiver_count() > 1
    }

    /// Tells everybody who waits. A ready chunk has its bit set before this is called, so that a reader
    /// finds either the bit or the flight.
    pub(crate) fn finish(mut self, result: Result<(), ReadError>) {
        // First, so that a reader who learns of a failure and asks again does not join this flight.
        self.land();
        self.outcome.send_replace(Some(result));
    }

    /// The same for a failure, which whoever asks within `time` is told, too.
    pub(crate) fn fail_for(self, error: ReadError, time: Duration) {
        self.outcome.send_replace(Some(Err(error)));
        tokio::spawn(async move {
            tokio::time::sleep(time).await;
            drop(self);
        });
    }

    /// Leaves the map, once: later the chunk may have another flight.
    fn land(&mut self) {
        if !std::mem::replace(&mut self.landed, true) {
            self.flights.lock().map.remove(&self.chunk);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.land();
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("chunk", &self.chunk).finish_non_exhaustive()
    }
}

impl Seat {
    /// How the flight ended; `None` when it was abandoned.
    pub(crate) async fn wait(mut self) -> Outcome {
        let outcome = self.0.wait_for(Option::is_some).await.ok()?;
        outcome.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Statements of their own: the tower is held to the end of each, and a lease wants it when it ends.
    fn start(flights: &Flights, chunk: usize, wanted: bool) -> Lease {
        flights.lock().start(chunk, wanted)
    }

    fn join(flights: &Flights, chunk: usize) -> Option<Seat> {
        flights.lock().join(chunk)
    }

    #[tokio::test]
    async fn those_who_wait_learn_how_it_ended() {
        let flights = Flights::default();
        let lease = start(&flights, 7, false);
        assert!(!lease.is_wanted());
        let seats = [join(&flights, 7).unwrap(), join(&flights, 7).unwrap()];
        assert!(lease.is_wanted());
        assert!(join(&flights, 8).is_none());
        lease.finish(Ok(()));
        assert!(join(&flights, 7).is_none());
        for seat in seats {
            assert!(matches!(seat.wait().await, Some(Ok(()))));
        }
    }

    #[tokio::test]
    async fn an_abandoned_flight_can_be_taken_over() {
        let flights = Flights::default();
        let lease = start(&flights, 7, true);
        let seat = join(&flights, 7).unwrap();
        drop(lease);
        assert!(seat.wait().await.is_none());
        start(&flights, 7, true).finish(Ok(()));
    }
}
