//! Patience with sources that fail for a moment.

use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    ops::Range,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::Stored;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::{BlobSource, SourceError};

/// Pause before the second attempt. Connection resets and restarting registries are over in this time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// Longest pause between two attempts: how much later than necessary a reader goes on when a
/// registry comes back.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A source that repeats reads which fail for a passing reason, with growing pauses, until a deadline.
///
/// The deadline covers the whole read, also an attempt that hangs. Pauses vary by half in
/// both directions, so that many nodes do not come back to a registry at the same moment.
#[derive(Debug)]
pub struct Retry<S> {
    inner: S,
    deadline: Duration,
}

impl<S> Retry<S> {
    /// Reads from `inner` and gives up after `deadline`.
    pub fn new(inner: S, deadline: Duration) -> Self {
        Retry { inner, deadline }
    }
}

#[async_trait]
impl<S: BlobSource> BlobSource for Retry<S> {
    async fn read(&self, range: Range<Stored>) -> Result<Bytes, SourceError> {
        let deadline = Instant::now() + self.deadline;
        let gave_up = |last| SourceError::TimedOut { deadline: self.deadline, last };
        let mut pause = FIRST_PAUSE;
        let mut last = None;
        loop {
            let attempt = timeout_at(deadline, self.inner.read(range.clone())).await;
            let error = match attempt {
                Ok(Ok(bytes)) => return Ok(bytes),
                Ok(Err(error)) if !error.is_transient() => return Err(error),
                Ok(Err(error)) => error,
                Err(_) => return Err(gave_up(last)),
            };
            // Longer than the deadline is as good as the deadline, whatever a registry asks for.
            let wait = error.retry_after().unwrap_or_default().max(vary(pause)).min(self.deadline);
            let next = Instant::now() + wait;
            tracing::debug!(%error, ?wait, source = ?self.inner, "read failed, will retry");
            last = Some(Arc::new(error));
            if next >= deadline {
                return Err(gave_up(last));
            }
            sleep_until(next).await;
            pause = LONGEST_PAUSE.min(pause * 2);
        }
    }
}

/// Half to one and a half of `pause`. `RandomState` is seeded by the operating system.
fn vary(pause: Duration) -> Duration {
    let random = RandomState::new().build_hasher().finish() % 1001;
    pause / 2 + pause.mul_f64(random as f64 / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{
        Memory, contract,
        faulty::{Fault, Faulty},
    };

    const DEADLINE: Duration = Duration::from_secs(60);

    fn faulty(faults: impl IntoIterator<Item = Fault>) -> Retry<Faulty> {
        Retry::new(Faulty::new(Memory::new(contract::content()), faults), DEADLINE)
    }

    #[tokio::test(start_paused = true)]
    async fn keeps_the_contract_around_a_source_that_fails() {
        let faults = (0..20).map(|n| if n % 3 == 0 { Fault::None } else { Fault::Transient });
        contract::check(&faulty(faults), &contract::content()).await;
    }

    #[tokio::test(start_paused = true)]
    async fn final_errors_are_not_repeated() {
        let source = faulty([Fault::Final]);
        source.read(Stored(0)..Stored(10)).await.unwrap_err();
        assert_eq!(source.inner.reads(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn gives_up_at_the_deadline() {
        for fault in [Fault::Transient, Fault::Hang] {
            let source = faulty(std::iter::repeat_n(fault, 1000));
            let start = Instant::now();
            let error = source.read(Stored(0)..Stored(10)).await.unwrap_err();
            assert!(matches!(error, SourceError::TimedOut { .. }), "{fault:?}: {error}");
            assert!(start.elapsed() <= DEADLINE, "{fault:?}");
            assert!(start.elapsed() >= DEADLINE - LONGEST_PAUSE * 2, "{fault:?}");
            assert!(source.inner.reads() < 40, "{fault:?}: {} reads", source.inner.reads());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn waits_as_long_as_it_is_told_to() {
        let source = faulty([Fault::Busy(Duration::from_secs(30))]);
        let start = Instant::now();
        source.read(Stored(0)..Stored(10)).await.unwrap();
        assert!(start.elapsed() >= Duration::from_secs(30));
    }
}
