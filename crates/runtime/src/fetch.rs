//! Gets stored ranges from the sources of a blob.
//!
//! Knows nothing of the cache: ranges go in, unchecked bytes come out. The cache plans the ranges
//! and commits the answers.

use std::{
    ops::Range,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use lazuli_image::{Digest, Stored};
use tokio::time::{Instant, timeout};

use crate::{
    error::ReadError,
    sharing::priority_semaphore::{Claim, PrioritySemaphore},
    source::{
        early::EarlyBytes,
        race::{self, Answer},
        request::{Meter, RangeRequest},
        sources::Sources,
        tracked_source::TrackedSource,
    },
};

/// How long bytes that were asked for early are waited for: where a place that brings nothing for
/// so long is asked once more.
const HELD: Duration = race::LAST_HEDGE_AFTER;

/// Bytes per second above which a read goes on as it is when the blob gets another source. The
/// registry of one image may be slow on purpose, and a reader of another one have joined the read.
const FAST: f64 = 1_048_576.0;

/// A range of a blob's stored bytes.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) range: Range<Stored>,
    /// Bytes that one connection is asked for at most. More are asked for in parts at the same
    /// time, because what a new connection carries begins with 14 KiB in a round trip and only
    /// doubles with each.
    pub(crate) part: u64,
    /// Until when it is tried.
    pub(crate) deadline: Instant,
}

/// Which blob to read, and on whose account.
pub(crate) struct Fetch<'a> {
    /// The blob, for errors.
    pub(crate) blob: Digest,
    pub(crate) sources: &'a Sources,
    /// Memory for answers.
    pub(crate) room: &'a Arc<PrioritySemaphore>,
    pub(crate) claim: &'a Claim,
    pub(crate) meter: &'a dyn Meter,
}

impl Fetch<'_> {
    /// Gets a range, from `held` if that has the bytes already or on their way.
    ///
    /// # Errors
    /// No source delivers.
    pub(crate) async fn get(
        &self,
        wanted: &Wanted,
        held: Option<EarlyBytes>,
    ) -> Result<Answer, ReadError> {
        let answer = match held {
            Some(held) if held.is_needed_first => tokio::select! {
                Some(answer) = self.held_answer(held) => Some(answer),
                Ok(answer) = self.read_anywhere(wanted) => Some(answer),
                else => None,
            },
            Some(held) => self.held_answer(held).await,
            None => None,
        };
        match answer {
            Some(answer) => Ok(answer),
            None => self.read_anywhere(wanted).await,
        }
    }

    /// Gets a range from these places alone, the most preferred first.
    pub(crate) async fn get_from(
        &self,
        places: &[Arc<TrackedSource>],
        wanted: &Wanted,
    ) -> Result<Answer, ReadError> {
        self.read(places, wanted, self.meter).await
    }

    /// Bytes that were asked for early, as an answer of the place that is asked first; `None` if
    /// they do not come.
    async fn held_answer(&self, held: EarlyBytes) -> Option<Answer> {
        let started = Instant::now();
        (0..held.requests()).for_each(|_| self.meter.request());
        let bytes = timeout(HELD, held.bytes()).await.ok()??;
        let place = self.sources.list().into_iter().next()?;
        self.meter.arrived(bytes.len() as u64);
        let permit = self.room.take(bytes.len() as u64, self.claim).await;
        Some(Answer { bytes, place, started, _permit: permit })
    }

    /// Reads from all places, and begins anew when others take theirs, or when one comes and
    /// next to nothing has arrived.
    async fn read_anywhere(&self, wanted: &Wanted) -> Result<Answer, ReadError> {
        loop {
            let [mut replaced, mut added] =
                [self.sources.replaced(), self.sources.added()].map(Box::pin);
            // What happens from here on counts, also before it is waited for.
            replaced.as_mut().enable();
            added.as_mut().enable();
            let (places, counter) = (self.sources.list(), Counter::of(self.meter));
            let mut reading = pin!(self.read(&places, wanted, &counter));
            loop {
                tokio::select! {
                    answer = &mut reading => return answer,
                    () = &mut replaced => break,
                    () = &mut added => {
                        if !counter.is_fast() {
                            break;
                        }
                        added.set(self.sources.added());
                    }
                }
            }
        }
    }

    async fn read(
        &self,
        places: &[Arc<TrackedSource>],
        wanted: &Wanted,
        meter: &dyn Meter,
    ) -> Result<Answer, ReadError> {
        let Wanted { range, part, deadline } = wanted.clone();
        let request =
            RangeRequest { range, part, deadline, room: self.room, claim: self.claim, meter };
        race::read(places, &request).await.map_err(|source| ReadError::Source {
            blob: self.blob,
            range: request.range,
            source,
        })
    }
}

/// Counts what arrives for one read.
struct Counter<'a> {
    meter: &'a dyn Meter,
    begun: Instant,
    bytes: AtomicU64,
}

impl<'a> Counter<'a> {
    fn of(meter: &'a dyn Meter) -> Self {
        Counter { meter, begun: Instant::now(), bytes: AtomicU64::new(0) }
    }

    /// Whether so much has arrived that to begin anew would be a waste.
    fn is_fast(&self) -> bool {
        let expected = self.begun.elapsed().as_secs_f64() * FAST;
        let bytes = self.bytes.load(Ordering::Relaxed);
        bytes > 0 && bytes as f64 >= expected
    }
}

impl Meter for Counter<'_> {
    fn request(&self) {
        self.meter.request();
    }

    fn arrived(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.meter.arrived(bytes);
    }
}
