//! Recent health of servers.
//!
//! Readers wait in the kernel for a server's answer, so a server that hangs or fails must delay one
//! reader for a moment, and not every reader until its deadline. The last results of each server
//! are kept in memory, across its repositories and blobs. Requests that have a choice prefer other
//! servers.

use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

/// How long a server rests after its first failure. A lost connection or a restart is over by then.
const FIRST_REST: Duration = Duration::from_secs(1);

/// Longest rest: how much later than possible a server that came back is preferred again.
const LONGEST_REST: Duration = Duration::from_secs(30);

/// Longest Retry-After that is believed. Readers wait behind it, and some servers name hours.
const LONGEST_ASKED: Duration = Duration::from_secs(60);

/// A server counts as near if its quickest answer took less. A new connection carries a megabyte
/// within seven round trips, so in 20 ms: several at the same time cost both sides more than they
/// save.
const NEAR: Duration = Duration::from_millis(3);

/// The same limit for the very first answer, which may be more meaningful than later ones, when
/// both sides are busy. It takes two round trips, for the connection, and up to 9 ms from a
/// registry on the same machine that has to read code from the disk.
pub(crate) const NEAR_AT_FIRST: Duration = Duration::from_millis(10);

/// The health of one server, or of one blob at a server.
///
/// Requests prefer healthy servers. A server is healthy until a request fails, and again after the
/// next success. In between it rests, for longer after each failure: 1 to 30 s, varied by half in
/// both directions so that nodes don't retry together.
#[derive(Debug)]
pub struct Health {
    /// For messages.
    name: String,
    state: Mutex<HealthState>,
    /// Microseconds of the quickest answer.
    quickest: AtomicU64,
    /// How long the first answer took.
    first: OnceLock<Duration>,
}

#[derive(Debug, Default)]
struct HealthState {
    failures: u32,
    failed: Option<Instant>,
    rests_until: Option<Instant>,
    asked_until: Option<Instant>,
    /// Also of a server that has worked since.
    last_failure: Option<Instant>,
    last_success: Option<Instant>,
}

impl Health {
    /// Nothing is known yet. `name` is for messages.
    pub fn new(name: impl Into<String>) -> Self {
        let (quickest, first) = (AtomicU64::new(u64::MAX), OnceLock::new());
        Health { name: name.into(), state: Mutex::default(), quickest, first }
    }

    /// A request that began at `started` failed for a reason that may pass. `retry_after` is how
    /// long the server asks to be left alone. Requests that were in progress together count as one
    /// failure.
    pub fn failed(&self, started: Instant, retry_after: Option<Duration>) {
        let now = Instant::now();
        let mut state = self.lock();
        if let Some(asked) = retry_after {
            let until = now + asked.min(LONGEST_ASKED);
            state.asked_until = state.asked_until.max(Some(until));
        }
        if state.failed.is_none_or(|failed| started >= failed) {
            state.failures = state.failures.saturating_add(1);
            let rest = FIRST_REST.saturating_mul(1 << (state.failures - 1).min(10));
            let rest = vary(rest.min(LONGEST_REST));
            state.rests_until = Some(now + rest);
            tracing::info!(server = self.name, failures = state.failures, ?rest, "is left alone");
        }
        (state.failed, state.last_failure) = (Some(now), Some(now));
    }

    /// A request succeeded.
    pub fn worked(&self) {
        let mut state = self.lock();
        if state.failures > 0 {
            tracing::info!(server = self.name, failures = state.failures, "works again");
            *state = HealthState { last_failure: state.last_failure, ..HealthState::default() };
        }
        state.last_success = Some(Instant::now());
    }

    /// Notes that the head of an answer arrived this long after its request.
    pub fn answered(&self, after: Duration) {
        self.first.get_or_init(|| after);
        let micros = u64::try_from(after.as_micros()).unwrap_or(u64::MAX);
        self.quickest.fetch_min(micros, Ordering::Relaxed);
    }

    /// The time after which the head of its quickest answer arrived: about a round trip.
    pub fn quickest(&self) -> Option<Duration> {
        let micros = self.quickest.load(Ordering::Relaxed);
        (micros < u64::MAX).then(|| Duration::from_micros(micros))
    }

    /// Returns whether the server answers so quickly that parallel or early requests gain nothing.
    pub fn is_near(&self) -> bool {
        self.quickest().is_some_and(|quickest| quickest < NEAR)
            || self.first.get().is_some_and(|first| *first < NEAR_AT_FIRST)
    }

    /// Returns whether there is no reason to prefer other servers.
    pub fn is_well(&self) -> bool {
        let now = Instant::now();
        let state = self.lock();
        state.rests_until.max(state.asked_until).is_none_or(|until| until <= now)
    }

    /// Returns whether a request failed since then for a transient reason: the server was busy,
    /// asked for a pause, or was unreachable.
    pub fn has_failed_since(&self, since: Instant) -> bool {
        self.lock().last_failure.is_some_and(|failed| failed >= since)
    }

    /// Returns whether a request succeeded since then.
    pub fn has_worked_since(&self, since: Instant) -> bool {
        self.lock().last_success.is_some_and(|worked| worked >= since)
    }

    /// Until when the server asked to be left alone.
    pub fn asked_until(&self) -> Option<Instant> {
        self.lock().asked_until
    }

    fn lock(&self) -> MutexGuard<'_, HealthState> {
        // No panic can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A random duration between half and one and a half of `pause`, so that nodes that failed together
/// don't retry together.
pub fn vary(pause: Duration) -> Duration {
    // `RandomState` is seeded by the operating system.
    let random = RandomState::new().build_hasher().finish() % 1001;
    pause / 2 + pause.mul_f64(random as f64 / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn backoff_grows_with_failures_and_ends_with_a_success() {
        let health = Health::new("a server");
        assert!(health.is_well());
        for failures in 1..12 {
            health.failed(Instant::now(), None);
            assert!(!health.is_well());
            let full = Duration::from_secs(1 << (failures - 1).min(5)).min(LONGEST_REST);
            tokio::time::advance(full / 2 - Duration::from_millis(1)).await;
            assert!(!health.is_well(), "after {failures}");
            tokio::time::advance(full + Duration::from_millis(2)).await;
            assert!(health.is_well(), "after {failures}");
        }
        health.failed(Instant::now(), None);
        health.worked();
        assert!(health.is_well());
        health.failed(Instant::now(), None);
        tokio::time::advance(FIRST_REST * 3 / 2).await;
        assert!(health.is_well());
    }

    #[test]
    fn a_server_is_near_by_its_first_answer_or_its_quickest() {
        let millis = Duration::from_millis;
        for (answers, is_near) in [
            (&[][..], false),
            (&[9], true),
            (&[9, 100], true),
            (&[10], false),
            (&[100, 9], false),
            (&[100, 3], false),
            (&[100, 2], true),
            (&[100, 2, 100], true),
        ] {
            let health = Health::new("a server");
            answers.iter().for_each(|answer| health.answered(millis(*answer)));
            assert_eq!(health.is_near(), is_near, "{answers:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_failures_count_once() {
        let health = Health::new("a server");
        let started = Instant::now();
        tokio::time::advance(Duration::from_millis(10)).await;
        for _ in 0..100 {
            health.failed(started, None);
        }
        tokio::time::advance(FIRST_REST * 3 / 2).await;
        assert!(health.is_well());
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_may_ask_to_be_left_alone() {
        let health = Health::new("a server");
        health.failed(Instant::now(), Some(Duration::from_secs(20)));
        tokio::time::advance(Duration::from_secs(19)).await;
        assert!(!health.is_well());
        assert!(health.asked_until().is_some_and(|until| until > Instant::now()));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(health.is_well());
        health.failed(Instant::now(), Some(Duration::from_secs(86_400)));
        tokio::time::advance(LONGEST_ASKED).await;
        assert!(health.is_well());
    }
}
