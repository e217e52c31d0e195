//! Fetches stored ranges from the sources of a blob.
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

/// How long to wait for bytes that were requested early: the time after which a silent source is
/// asked again.
const HELD: Duration = race::LAST_HEDGE_AFTER;

/// Bytes per second above which a read continues unchanged when the blob gets another source. The
/// registry of one image may be slow on purpose, and a reader of another image may have joined the
/// read.
const FAST: f64 = 1_048_576.0;

/// A range of a blob's stored bytes.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) range: Range<Stored>,
    /// Maximum number of bytes for one connection. Larger ranges are requested in concurrent parts,
    /// because a new connection starts with 14 KiB per round trip and only doubles with each.
    pub(crate) part: u64,
    /// Until when it is tried.
    pub(crate) deadline: Instant,
}

/// The blob to read, and the account to charge.
pub(crate) struct Fetch<'a> {
    /// The blob, for errors.
    pub(crate) blob: Digest,
    pub(crate) sources: &'a Sources,
    /// Memory for answers.
    pub(crate) memory: &'a Arc<PrioritySemaphore>,
    pub(crate) claim: &'a Claim,
    pub(crate) meter: &'a dyn Meter,
}

impl Fetch<'_> {
    /// Gets a range, from `held` if that has the bytes already or in flight.
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

    /// Gets a range from these sources alone, the most preferred first.
    pub(crate) async fn get_from(
        &self,
        sources: &[Arc<TrackedSource>],
        wanted: &Wanted,
    ) -> Result<Answer, ReadError> {
        self.read(sources, wanted, self.meter).await
    }

    /// Uses bytes that were requested early as an answer of the first source; `None` if they don't
    /// arrive.
    async fn held_answer(&self, held: EarlyBytes) -> Option<Answer> {
        let started = Instant::now();
        (0..held.requests()).for_each(|_| self.meter.request());
        let bytes = timeout(HELD, held.bytes()).await.ok()??;
        let source = self.sources.list().into_iter().next()?;
        self.meter.was_held(bytes.len() as u64);
        let permit = self.memory.take(bytes.len() as u64, self.claim).await;
        Some(Answer { bytes, source, started, _permit: permit })
    }

    /// Reads from all sources. Starts over when other sources replace them, or when a source is
    /// added before much has arrived.
    async fn read_anywhere(&self, wanted: &Wanted) -> Result<Answer, ReadError> {
        loop {
            let [mut replaced, mut added] =
                [self.sources.replaced(), self.sources.added()].map(Box::pin);
            // Changes from here on count, even before they are awaited.
            replaced.as_mut().enable();
            added.as_mut().enable();
            let (sources, counter) = (self.sources.list(), Counter::of(self.meter));
            let mut reading = pin!(self.read(&sources, wanted, &counter));
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
        sources: &[Arc<TrackedSource>],
        wanted: &Wanted,
        meter: &dyn Meter,
    ) -> Result<Answer, ReadError> {
        let Wanted { range, part, deadline } = wanted.clone();
        let request =
            RangeRequest { range, part, deadline, memory: self.memory, claim: self.claim, meter };
        race::read(sources, &request).await.map_err(|source| ReadError::Source {
            blob: self.blob,
            range: request.range,
            source,
        })
    }
}

/// Counts the bytes that arrive for one read.
struct Counter<'a> {
    meter: &'a dyn Meter,
    begun: Instant,
    bytes: AtomicU64,
}

impl<'a> Counter<'a> {
    fn of(meter: &'a dyn Meter) -> Self {
        Counter { meter, begun: Instant::now(), bytes: AtomicU64::new(0) }
    }

    /// Returns whether so much has arrived that starting over would be a waste.
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

    fn was_held(&self, bytes: u64) {
        self.meter.was_held(bytes);
    }
}
