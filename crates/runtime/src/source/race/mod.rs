//! Reads a range of a blob from several sources, and is the only code that waits for transient
//! faults.
//!
//! ```text
//! sources, in order ─▶ the first that is well
//!                      ├─ delivers ─▶ bytes
//!                      ├─ fails ─▶ the next ─ … ─▶ a pause ─▶ the first again
//!                      └─ late ─▶ the next as well; the first answer wins
//! ```

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _};
use lazuli_registry::{
    health::vary,
    hedge::{Attempt, Attempts, Event, Lateness},
};
use tokio::time::{Instant, sleep_until};

use super::{
    SourceError,
    request::RangeRequest,
    tracked_source::{AttemptProgress, TrackedSource},
};
use crate::sharing::priority_semaphore::Permit;

/// Pause before a source that failed is asked again. Lost connections and restarts are over in this
/// time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// Maximum pause: how much later than necessary a reader continues when a registry comes back.
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

/// Silence, or near silence, of a source after which another healthy source is asked as well.
/// Registries and their storage answer within half a second nearly always; an unnecessary request
/// costs one answer.
const HEDGE_AFTER: Duration = Duration::from_secs(1);

/// Silence after which, without another healthy source, unhealthy ones are asked, or the same
/// source over another connection: connections die silently in firewalls and load balancers.
pub(crate) const LAST_HEDGE_AFTER: Duration = Duration::from_secs(5);

/// Bytes, unchecked.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) bytes: Bytes,
    pub(crate) source: Arc<TrackedSource>,
    /// When they were asked for.
    pub(crate) started: Instant,
    /// The memory that they take.
    pub(crate) _permit: Permit,
}

/// The result of an attempt, with the permit for its memory.
type Brought = Result<(Bytes, Permit), SourceError>;

/// The sources that may be asked next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Among {
    /// Those that did well lately.
    Well,
    /// Any, if none succeeded.
    All,
}

struct Candidate<'a> {
    source: &'a Arc<TrackedSource>,
    /// Since the last pause.
    asked: bool,
    /// Attempts in progress.
    under_way: usize,
    failure: Option<Arc<SourceError>>,
    /// The failure is final.
    hopeless: bool,
}

struct Race<'a> {
    request: &'a RangeRequest<'a>,
    candidates: Vec<Candidate<'a>>,
    attempts: Attempts<BoxFuture<'a, Brought>>,
    /// The progress of each attempt, by its number.
    progress: Vec<Arc<AttemptProgress>>,
    pause: Duration,
    paused: bool,
}

/// Reads from whichever of `sources`, most preferred first, delivers first.
///
/// # Errors
/// Final ones of all sources as soon as they are known, else [`SourceError::TimedOut`] at the
/// deadline, or before when no source may be asked again until then.
pub(crate) async fn read(
    sources: &[Arc<TrackedSource>],
    request: &RangeRequest<'_>,
) -> Result<Answer, SourceError> {
    let begun = Instant::now();
    let candidate =
        |source| Candidate { source, asked: false, under_way: 0, failure: None, hopeless: false };
    let mut race = Race {
        request,
        candidates: sources.iter().map(candidate).collect(),
        attempts: Attempts::default(),
        progress: Vec::new(),
        pause: FIRST_PAUSE,
        paused: false,
    };
    if !race.ask_next(Among::All) && !race.pause() {
        return Err(race.give_up(begun));
    }
    loop {
        let event = tokio::select! {
            biased;
            Some(event) = race.attempts.next() => event,
            () = sleep_until(request.deadline) => return Err(race.give_up(begun)),
        };
        match event {
            Event::Ended(number, Ok((bytes, permit))) => {
                return Ok(race.won(number, bytes, permit));
            }
            Event::Ended(number, Err(error)) => {
                race.failed(number, error);
                if race.candidates.iter().all(|candidate| candidate.hopeless) {
                    return Err(race.failures());
                }
                if !race.ask_next(Among::All) && !race.pause() {
                    return Err(race.give_up(begun));
                }
            }
            Event::Late(number, lateness) => race.hurry(number, lateness),
            Event::Resume => {
                race.paused = false;
                race.reconsider();
                if !race.makes_progress() {
                    race.candidates.iter_mut().for_each(|candidate| candidate.asked = false);
                    race.ask_next(Among::All);
                }
                if race.attempts.is_idle() && !race.pause() {
                    return Err(race.give_up(begun));
                }
            }
        }
    }
}

impl<'a> Race<'a> {
    /// Asks the next source: the first healthy one or, if there is none and any is allowed, the
    /// first of the others.
    fn ask_next(&mut self, among: Among) -> bool {
        let now = Instant::now();
        let open = |candidate: &&Candidate<'_>| !candidate.hopeless && candidate.under_way == 0;
        let ready = |candidate: &Candidate<'_>| {
            open(&candidate)
                && !candidate.asked
                && candidate.source.asked_until().is_none_or(|until| until <= now)
        };
        let well = |candidate: &Candidate<'_>| candidate.source.is_well();
        let next = self.candidates.iter().position(|c| ready(c) && well(c)).or_else(|| {
            let none_is_well = !self.candidates.iter().filter(open).any(well);
            (among == Among::All && none_is_well)
                .then(|| self.candidates.iter().position(ready))
                .flatten()
        });
        if let Some(next) = next {
            self.ask(next);
        }
        next.is_some()
    }

    /// Retries a source that was skipped for background work once a reader is waiting.
    fn reconsider(&mut self) {
        let is_elsewhere = |candidate: &Candidate<'_>| {
            matches!(candidate.failure.as_deref(), Some(SourceError::AskOthers { .. }))
        };
        if self.request.claim.is_wanted() {
            let others = self.candidates.iter_mut().filter(|candidate| is_elsewhere(candidate));
            others.for_each(|candidate| candidate.hopeless = false);
        }
    }

    fn ask(&mut self, at: usize) {
        let candidate = &mut self.candidates[at];
        (candidate.asked, candidate.under_way) = (true, candidate.under_way + 1);
        let progress = Arc::new(AttemptProgress::default());
        let (source, request) = (candidate.source, self.request);
        self.progress.push(progress.clone());
        let read = async move { source.read(request, &progress).await };
        let number = self.attempts.start(at, read.boxed());
        let hedge_after = source.hedge_after().unwrap_or(HEDGE_AFTER);
        self.attempts.look_after(number, hedge_after, Lateness::Late);
    }

    /// Returns whether any attempt delivers bytes at a speed worth waiting for.
    fn makes_progress(&self) -> bool {
        self.attempts.under_way().any(|(number, _)| self.progress[number].makes_progress())
    }

    /// Does something about an attempt that takes long.
    fn hurry(&mut self, number: usize, lateness: Lateness) {
        let attempt = self.attempts.get(number);
        if attempt.is_over {
            return;
        }
        // Waiting for a permit is no fault of a source that does well: a crowd stays where it is.
        let age = self.progress[number].age().unwrap_or_default();
        let source = self.candidates[attempt.server].source;
        let hedge_after = source.hedge_after().unwrap_or(HEDGE_AFTER);
        if age < hedge_after && source.is_well() {
            self.attempts.look_after(number, hedge_after - age, lateness);
            return;
        }
        let idle = !self.makes_progress();
        match lateness {
            Lateness::VeryLate => {
                let is_only = self.candidates[attempt.server].under_way == 1;
                if idle && !self.ask_next(Among::All) && is_only {
                    self.ask(attempt.server);
                }
            }
            Lateness::Late => {
                if idle {
                    self.ask_next(Among::Well);
                }
                let rest = LAST_HEDGE_AFTER.saturating_sub(hedge_after);
                self.attempts.look_after(number, rest, Lateness::VeryLate);
            }
        }
    }

    /// Schedules another round of requests; returns `false` if none is possible before the
    /// deadline.
    fn pause(&mut self) -> bool {
        if self.paused {
            return true;
        }
        let now = Instant::now();
        let left = self.request.deadline.saturating_duration_since(now);
        let mut next = now + vary(self.pause).min(left / 2);
        if self.attempts.is_idle() {
            let open = self.candidates.iter().filter(|candidate| !candidate.hopeless);
            let asked = open.map(|candidate| candidate.source.asked_until().unwrap_or(now)).min();
            next = next.max(asked.unwrap_or(now));
            if next >= self.request.deadline {
                return false;
            }
        }
        self.pause = LONGEST_PAUSE.min(self.pause * 2);
        self.paused = true;
        // So near to the deadline it is only waited for.
        if left >= FIRST_PAUSE {
            self.attempts.resume_at(next);
        }
        true
    }

    fn failed(&mut self, number: usize, error: SourceError) {
        let Attempt { server, started, .. } = self.attempts.get(number);
        let candidate = &mut self.candidates[server];
        tracing::debug!(%error, source = candidate.source.describe(), "a read failed");
        candidate.source.note(started, Some(&error));
        candidate.under_way -= 1;
        candidate.hopeless |= !error.is_transient();
        candidate.failure = Some(Arc::new(error));
    }

    fn won(&mut self, number: usize, bytes: Bytes, permit: Permit) -> Answer {
        let Attempt { server, started, .. } = self.attempts.get(number);
        let source = self.candidates[server].source.clone();
        let limit =
            |server: usize| self.candidates[server].source.hedge_after().unwrap_or(HEDGE_AFTER);
        let age = |number: usize, _| self.progress[number].age();
        for (number, other) in self.attempts.overtaken(number, limit, age) {
            let source = self.candidates[other.server].source;
            if let Some(error) = source.late(&self.progress[number]) {
                source.note(other.started, Some(&error));
            }
        }
        source.note(started, None);
        Answer { bytes, source, started, _permit: permit }
    }

    /// Why no source delivered.
    fn failures(&self) -> SourceError {
        let known = self.candidates.iter().filter_map(|candidate| candidate.failure.clone());
        let known: Vec<_> = known.collect();
        match known.as_slice() {
            [] => SourceError::NoSource,
            [only] => SourceError::clone(only),
            _ => SourceError::Everywhere { failures: known },
        }
    }

    fn give_up(&mut self, begun: Instant) -> SourceError {
        for (number, attempt) in self.attempts.under_way() {
            let candidate = &mut self.candidates[attempt.server];
            if let Some(error) = candidate.source.late(&self.progress[number]) {
                candidate.source.note(attempt.started, Some(&error));
                candidate.failure.get_or_insert(Arc::new(error));
            }
        }
        if self.candidates.is_empty() {
            return SourceError::NoSource;
        }
        let last = self.candidates.iter().any(|c| c.failure.is_some());
        let last = last.then(|| Arc::new(self.failures()));
        SourceError::TimedOut { waited: begun.elapsed(), last }
    }
}

#[cfg(test)]
mod tests;
