//! One read of a blob that several places have: the only thing that waits for passing faults.
//!
//! ```text
//! places, in order ─▶ the first that is well ─┬─ delivers ──────────────────────────▶ bytes
//!                                             ├─ fails ─▶ the next ─ … ─▶ a pause ─▶ the first again
//!                                             └─ late ─▶ the next as well; who is first wins
//! ```

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use lazuli_registry::health::vary;
use tokio::time::{Instant, sleep, sleep_until};

use super::{
    SourceError,
    request::RangeRequest,
    tracked_source::{Attempt, TrackedSource},
};
use crate::sharing::priority_semaphore::Permit;

/// Pause before a place that failed is asked again. Lost connections and restarts are over in this
/// time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// Longest pause: how much later than necessary a reader goes on when a registry comes back.
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

/// How long a place may bring nothing, or next to nothing, before another one that is well is
/// asked, too. Registries and their storage answer within half a second nearly always; what was
/// asked twice in vain costs one answer.
const HEDGE_AFTER: Duration = Duration::from_secs(1);

/// The same when there is no other that is well: then others are asked, or the same once more over
/// another connection, because connections die silently in firewalls and balancers.
pub(crate) const LAST_HEDGE_AFTER: Duration = Duration::from_secs(5);

/// Bytes, unchecked.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) bytes: Bytes,
    pub(crate) place: Arc<TrackedSource>,
    /// When they were asked for.
    pub(crate) started: Instant,
    /// The room that they take.
    pub(crate) _permit: Permit,
}

enum Event {
    Answered(usize, Result<(Bytes, Permit), SourceError>),
    /// The attempt with this number began [`HEDGE_AFTER`] ago or, when the flag is set,
    /// [`LAST_HEDGE_AFTER`].
    Late(usize, bool),
    /// A pause is over.
    Again,
}

type Events<'a> = FuturesUnordered<Pin<Box<dyn Future<Output = Event> + Send + 'a>>>;

struct Candidate<'a> {
    place: &'a Arc<TrackedSource>,
    /// Since the last pause.
    asked: bool,
    /// Attempts that are under way.
    under_way: usize,
    failure: Option<Arc<SourceError>>,
    /// The failure is final.
    hopeless: bool,
}

struct Try {
    candidate: usize,
    started: Instant,
    attempt: Arc<Attempt>,
    over: bool,
}

impl Try {
    fn makes_progress(&self) -> bool {
        !self.over && self.attempt.makes_progress()
    }
}

struct Race<'a> {
    request: &'a RangeRequest<'a>,
    candidates: Vec<Candidate<'a>>,
    tries: Vec<Try>,
    events: Events<'a>,
    pause: Duration,
    paused: bool,
}

/// Reads from whichever of `places`, most preferred first, delivers first.
///
/// # Errors
/// Final ones of all places as soon as they are known, else [`SourceError::TimedOut`] at the
/// deadline, or before when nobody may be asked again until then.
pub(crate) async fn read(
    places: &[Arc<TrackedSource>],
    request: &RangeRequest<'_>,
) -> Result<Answer, SourceError> {
    let begun = Instant::now();
    let candidate =
        |place| Candidate { place, asked: false, under_way: 0, failure: None, hopeless: false };
    let mut race = Race {
        request,
        candidates: places.iter().map(candidate).collect(),
        tries: Vec::new(),
        events: Events::new(),
        pause: FIRST_PAUSE,
        paused: false,
    };
    if !race.ask_next(true) && !race.pause() {
        return Err(race.give_up(begun));
    }
    loop {
        let event = tokio::select! {
            biased;
            Some(event) = race.events.next() => event,
            () = sleep_until(request.deadline) => return Err(race.give_up(begun)),
        };
        match event {
            Event::Answered(number, Ok((bytes, permit))) => {
                return Ok(race.won(number, bytes, permit));
            }
            Event::Answered(number, Err(error)) => {
                race.failed(number, error);
                if race.candidates.iter().all(|candidate| candidate.hopeless) {
                    return Err(race.failures());
                }
                if !race.ask_next(true) && !race.pause() {
                    return Err(race.give_up(begun));
                }
            }
            Event::Late(number, last) => race.hurry(number, last),
            Event::Again => {
                race.paused = false;
                race.reconsider();
                if !race.tries.iter().any(Try::makes_progress) {
                    race.candidates.iter_mut().for_each(|candidate| candidate.asked = false);
                    race.ask_next(true);
                }
                if race.tries.iter().all(|t| t.over) && !race.pause() {
                    return Err(race.give_up(begun));
                }
            }
        }
    }
}

impl<'a> Race<'a> {
    /// Asks the next place: the first one that is well or, if none is at all and `any` allows it,
    /// the first of the others.
    fn ask_next(&mut self, any: bool) -> bool {
        let now = Instant::now();
        let open = |candidate: &&Candidate<'_>| !candidate.hopeless && candidate.under_way == 0;
        let ready = |candidate: &Candidate<'_>| {
            open(&candidate)
                && !candidate.asked
                && candidate.place.asked_until().is_none_or(|until| until <= now)
        };
        let well = |candidate: &Candidate<'_>| candidate.place.is_well();
        let next = self.candidates.iter().position(|c| ready(c) && well(c)).or_else(|| {
            let none_is_well = !self.candidates.iter().filter(open).any(well);
            (any && none_is_well).then(|| self.candidates.iter().position(ready)).flatten()
        });
        if let Some(next) = next {
            self.ask(next);
        }
        next.is_some()
    }

    /// Who is too slow for what nobody waits for is good enough for a reader who has come
    /// meanwhile.
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
        let number = self.tries.len();
        let attempt = Arc::new(Attempt::default());
        let (place, request) = (candidate.place, self.request);
        self.tries.push(Try {
            candidate: at,
            started: Instant::now(),
            attempt: attempt.clone(),
            over: false,
        });
        self.events.push(Box::pin(async move {
            let read = place.read(request, &attempt);
            Event::Answered(number, read.await)
        }));
        self.look_after(number, place.hedge_after().unwrap_or(HEDGE_AFTER), false);
    }

    /// Has [`Race::hurry`] look at an attempt after `time`.
    fn look_after(&mut self, number: usize, time: Duration, last: bool) {
        self.events.push(Box::pin(async move {
            sleep(time).await;
            Event::Late(number, last)
        }));
    }

    /// Does something about an attempt that takes long.
    fn hurry(&mut self, number: usize, last: bool) {
        let Try { over, candidate, ref attempt, .. } = self.tries[number];
        if over {
            return;
        }
        // Waiting for a turn is no fault of a place that does well: a crowd stays where it is.
        let (age, place) = (attempt.age().unwrap_or_default(), self.candidates[candidate].place);
        let hedge_after = place.hedge_after().unwrap_or(HEDGE_AFTER);
        if age < hedge_after && place.is_well() {
            self.look_after(number, hedge_after - age, last);
            return;
        }
        let idle = !self.tries.iter().any(Try::makes_progress);
        if last {
            if idle && !self.ask_next(true) && self.candidates[candidate].under_way == 1 {
                self.ask(candidate);
            }
        } else {
            if idle {
                self.ask_next(false);
            }
            self.look_after(number, LAST_HEDGE_AFTER.saturating_sub(hedge_after), true);
        }
    }

    /// Sees to it that places are asked again later; `false` if none may be before the deadline.
    fn pause(&mut self) -> bool {
        if self.paused {
            return true;
        }
        let now = Instant::now();
        let left = self.request.deadline.saturating_duration_since(now);
        let mut next = now + vary(self.pause).min(left / 2);
        if self.tries.iter().all(|t| t.over) {
            let open = self.candidates.iter().filter(|candidate| !candidate.hopeless);
            let asked = open.map(|candidate| candidate.place.asked_until().unwrap_or(now)).min();
            next = next.max(asked.unwrap_or(now));
            if next >= self.request.deadline {
                return false;
            }
        }
        self.pause = LONGEST_PAUSE.min(self.pause * 2);
        self.paused = true;
        // So near to the deadline it is only waited for.
        if left >= FIRST_PAUSE {
            self.events.push(Box::pin(async move {
                sleep_until(next).await;
                Event::Again
            }));
        }
        true
    }

    fn failed(&mut self, number: usize, error: SourceError) {
        let Try { candidate, started, ref mut over, .. } = self.tries[number];
        *over = true;
        let candidate = &mut self.candidates[candidate];
        tracing::debug!(%error, place = candidate.place.describe(), "a read failed");
        candidate.place.note(started, Some(&error));
        candidate.under_way -= 1;
        candidate.hopeless |= !error.is_transient();
        candidate.failure = Some(Arc::new(error));
    }

    fn won(&mut self, number: usize, bytes: Bytes, permit: Permit) -> Answer {
        let Try { candidate, started, .. } = self.tries[number];
        let place = self.candidates[candidate].place.clone();
        // Whoever was overtaken although it had been asked early enough is not asked first any
        // more.
        for other in self.tries.iter().filter(|t| !t.over && t.candidate != candidate) {
            let place = self.candidates[other.candidate].place;
            let hedge_after = place.hedge_after().unwrap_or(HEDGE_AFTER);
            if other.attempt.age().is_some_and(|age| age >= hedge_after)
                && let Some(error) = place.late(&other.attempt)
            {
                place.note(other.started, Some(&error));
            }
        }
        place.note(started, None);
        Answer { bytes, place, started, _permit: permit }
    }

    /// Why nobody delivered.
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
        for t in self.tries.iter().filter(|t| !t.over) {
            let candidate = &mut self.candidates[t.candidate];
            if let Some(error) = candidate.place.late(&t.attempt) {
                candidate.place.note(t.started, Some(&error));
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
