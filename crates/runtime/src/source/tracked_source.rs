//! A source of one blob, with its health and its limits.

use std::{
    ops::Range,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::try_join_all;
use lazuli_image::Stored;
use lazuli_registry::{CONNECTIONS, Failure, Health, ServerTraffic, Urgency, range};
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};

use super::{BlobSource, Progress, SourceError, request::RangeRequest};
use crate::{
    metrics::Origin,
    sharing::priority_semaphore::{Permit, PrioritySemaphore},
};

/// Requests that one source gets for one blob at a time. Background work gets half: requests that
/// are spread over [`CONNECTIONS`], which are a few more where chunks lie apart.
const REQUESTS: u64 = 4 * CONNECTIONS;

/// After this time without an answer a request gives its memory back until something arrives:
/// sources that hang must not hold up those that do not.
const LEND: Duration = Duration::from_secs(1);

/// A request that delivers less than [`LEAST`] bytes in this time is given up: about 1 KiB/s. 15 s
/// is longer than the worst stall of storage behind a registry, and short enough that another
/// attempt still fits into a reader's deadline.
const PERIOD: Duration = Duration::from_secs(15);

/// See [`PERIOD`].
const LEAST: u64 = 16 << 10;

/// Bytes per second below which other sources are asked as well: a slower source delivers a page
/// after a second and a library after a minute.
const USEFUL: f64 = 16_384.0;

/// A source of one blob, with its health.
#[derive(Debug)]
pub(crate) struct TrackedSource {
    source: Arc<dyn BlobSource>,
    /// The health of this blob there. The source has that of the server.
    health: Health,
    requests: Arc<PrioritySemaphore>,
}

/// The progress of one attempt.
#[derive(Debug, Default)]
pub(crate) struct AttemptProgress {
    bytes: AtomicU64,
    first: Notify,
    sent: OnceLock<Instant>,
}

impl AttemptProgress {
    /// How long ago the request was sent, if it was.
    pub(crate) fn age(&self) -> Option<Duration> {
        self.sent.get().map(Instant::elapsed)
    }

    /// Returns whether any bytes have arrived.
    pub(crate) fn has_begun(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > 0
    }

    /// Returns whether bytes arrive at a speed worth waiting for.
    pub(crate) fn makes_progress(&self) -> bool {
        let expected = self.age().unwrap_or_default().as_secs_f64() * USEFUL;
        self.has_begun() && self.bytes.load(Ordering::Relaxed) as f64 >= expected
    }
}

impl TrackedSource {
    pub(crate) fn new(source: Arc<dyn BlobSource>) -> Self {
        let health = Health::new(source.describe());
        TrackedSource { source, health, requests: PrioritySemaphore::new(REQUESTS) }
    }

    /// Returns whether this wraps `source`.
    pub(crate) fn is(&self, source: &Arc<dyn BlobSource>) -> bool {
        Arc::ptr_eq(&self.source, source)
    }

    pub(crate) fn describe(&self) -> String {
        self.source.describe()
    }

    /// The origin of its bytes.
    pub(crate) fn origin(&self) -> Origin {
        self.source.traffic().map(ServerTraffic::kind).into()
    }

    /// Returns whether there is no reason to prefer other sources.
    pub(crate) fn is_well(&self) -> bool {
        self.health.is_well() && self.source.server_health().is_none_or(|server| server.is_well())
    }

    /// The quickest answer of its server, if there was any: about a round trip.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        self.source.server_health()?.quickest()
    }

    /// Returns whether its server has failed since then, or was overloaded.
    pub(crate) fn has_failed_since(&self, since: Instant) -> bool {
        let server = self.source.server_health().map_or(&self.health, |server| server);
        server.has_failed_since(since)
    }

    /// Time without data after which others are asked as well, if it is not the usual one.
    pub(crate) fn hedge_after(&self) -> Option<Duration> {
        self.source.hedge_after()
    }

    /// All of the blob is going to be read from it.
    pub(crate) fn expect_whole(&self) {
        self.source.expect_whole();
    }

    /// Until when it asked to be left alone.
    pub(crate) fn asked_until(&self) -> Option<Instant> {
        let server = self.source.server_health().and_then(|server| server.asked_until());
        server.max(self.health.asked_until())
    }

    /// Records the result of an attempt that began at `started`. Permanent errors say nothing about
    /// other blobs there.
    pub(crate) fn note(&self, started: Instant, error: Option<&SourceError>) {
        let server = self.source.server_health().map(Arc::as_ref);
        let is_silent =
            matches!(error, Some(SourceError::Silent { .. } | SourceError::Slow { .. }));
        if let Some(traffic) = self.source.traffic().filter(|_| is_silent) {
            traffic.failed(Failure::Silent);
        }
        match error {
            None => server.into_iter().for_each(Health::worked),
            Some(SourceError::AskOthers { .. }) => {}
            Some(error) if error.is_transient() => {
                server.unwrap_or(&self.health).failed(started, error.retry_after());
            }
            Some(_) => self.health.failed(started, None),
        }
    }

    /// Bytes that it delivered turned out to be right.
    pub(crate) fn was_right(&self) {
        self.health.worked();
    }

    /// Bytes that it delivered turned out to be wrong; they were asked for at `started`.
    pub(crate) fn was_wrong(&self, started: Instant) {
        self.health.failed(started, None);
    }

    /// Reads the request once, after waiting for a request slot and for memory. The permit belongs
    /// to the bytes.
    pub(crate) async fn read(
        &self,
        request: &RangeRequest<'_>,
        attempt: &AttemptProgress,
    ) -> Result<(Bytes, Permit), SourceError> {
        let RangeRequest { range, memory, claim, meter, .. } = request;
        let size = range.end.0.saturating_sub(range.start.0);
        let server = self.source.server_health().map(Arc::as_ref);
        let urgency = if claim.is_wanted() { Urgency::Demand } else { Urgency::Prefetch };
        if !self.source.suits(range, urgency).await {
            return Err(SourceError::AskOthers { source_name: self.describe() });
        }
        let parts: Vec<_> =
            range::parts(range, size.div_ceil(request.part.max(1)), server).collect();
        let _request = self.requests.take(parts.len() as u64, claim).await;
        let mut permit = Some(memory.take(size, claim).await);
        let _ = attempt.sent.set(Instant::now());
        parts.iter().for_each(|_| meter.request());
        let arrived = |bytes: u64| {
            meter.arrived(bytes);
            if attempt.bytes.fetch_add(bytes, Ordering::Relaxed) == 0 {
                attempt.first.notify_one();
            }
        };
        let read = self.read_parts(parts, &arrived);
        tokio::pin!(read);
        let result = tokio::select! {
            result = &mut read => Some(result),
            () = attempt.first.notified() => None,
            () = sleep(LEND) => {
                permit = None;
                tokio::select! {
                    result = &mut read => Some(result),
                    () = attempt.first.notified() => None,
                    () = sleep(PERIOD - LEND) => return Err(self.silent(PERIOD)),
                }
            }
        };
        // While memory is waited for, nothing is taken from the connection, and the sender has to
        // wait, too.
        let permit = match permit {
            Some(permit) => permit,
            None => memory.take(size, claim).await,
        };
        let mut before = attempt.bytes.load(Ordering::Relaxed);
        let bytes = match result {
            Some(result) => result?,
            None => loop {
                tokio::select! {
                    result = &mut read => break result?,
                    () = sleep(PERIOD) => {}
                }
                let now = attempt.bytes.load(Ordering::Relaxed);
                if now - before < LEAST {
                    let source_name = self.describe();
                    return Err(SourceError::Slow { source_name, period: PERIOD });
                }
                before = now;
            },
        };
        if bytes.len() as u64 != size {
            let (source_name, got) = (self.describe(), bytes.len() as u64);
            return Err(SourceError::WrongSize { source_name, expected: size, got });
        }
        Ok((bytes, permit))
    }

    /// Reads `parts` at the same time.
    async fn read_parts(
        &self,
        parts: Vec<Range<Stored>>,
        arrived: Progress<'_>,
    ) -> Result<Bytes, SourceError> {
        let reads = parts.into_iter().map(|part| self.source.read(part, arrived));
        let mut read = try_join_all(reads).await?;
        Ok(if read.len() == 1 { read.remove(0) } else { read.concat().into() })
    }

    /// The error of an attempt without any data.
    fn silent(&self, waited: Duration) -> SourceError {
        SourceError::Silent { source_name: self.describe(), waited }
    }

    /// The error of an attempt that has delivered too little, if it was sent.
    pub(crate) fn late(&self, attempt: &AttemptProgress) -> Option<SourceError> {
        let waited = attempt.age()?;
        match attempt.has_begun() {
            true if attempt.makes_progress() => None,
            true => Some(SourceError::Slow { source_name: self.describe(), period: waited }),
            false => Some(self.silent(waited)),
        }
    }
}
