//! Hedged requests: asks several servers the same question, the next one when the first is slow.
//!
//! [`Attempts`] runs the attempts of one question and reports their progress. The caller chooses
//! which server to ask next, and interprets failures.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

/// The attempts of one question, each a future of type `F`.
#[derive(Debug)]
pub struct Attempts<F> {
    all: Vec<Attempt>,
    waits: FuturesUnordered<Wait<F>>,
}

/// One attempt.
#[derive(Clone, Copy, Debug)]
pub struct Attempt {
    /// The position of the server that was asked, as the caller counts.
    pub server: usize,
    /// When it was asked.
    pub started: Instant,
    /// Whether the attempt has ended.
    pub is_over: bool,
}

/// How late an attempt is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lateness {
    /// Another server may be asked as well.
    Late,
    /// Any server may, or the same one over another connection.
    VeryLate,
}

/// A change in the attempts of a question.
#[derive(Debug)]
pub enum Event<T> {
    /// The attempt with this number has ended.
    Ended(usize, T),
    /// The attempt with this number is late, and may have ended since.
    Late(usize, Lateness),
    /// A pause is over.
    Resume,
}

#[derive(Debug)]
enum Wait<F> {
    Attempt(usize, Pin<Box<F>>),
    Late(usize, Lateness, Pin<Box<Sleep>>),
    Pause(Pin<Box<Sleep>>),
}

impl<F: Future> Future for Wait<F> {
    type Output = Event<F::Output>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Wait::Attempt(number, answer) => {
                answer.as_mut().poll(context).map(|answer| Event::Ended(*number, answer))
            }
            Wait::Late(number, lateness, time) => {
                time.as_mut().poll(context).map(|()| Event::Late(*number, *lateness))
            }
            Wait::Pause(time) => time.as_mut().poll(context).map(|()| Event::Resume),
        }
    }
}

impl<F> Default for Attempts<F> {
    fn default() -> Self {
        Attempts { all: Vec::new(), waits: FuturesUnordered::new() }
    }
}

impl<F: Future> Attempts<F> {
    /// Asks a server. Returns the number of the attempt.
    pub fn start(&mut self, server: usize, answer: F) -> usize {
        let number = self.all.len();
        self.all.push(Attempt { server, started: Instant::now(), is_over: false });
        self.waits.push(Wait::Attempt(number, Box::pin(answer)));
        number
    }

    /// Makes [`Event::Late`] happen after `time`.
    pub fn look_after(&mut self, number: usize, time: Duration, lateness: Lateness) {
        self.waits.push(Wait::Late(number, lateness, Box::pin(sleep(time))));
    }

    /// Makes [`Event::Resume`] happen at a moment.
    pub fn resume_at(&mut self, moment: Instant) {
        self.waits.push(Wait::Pause(Box::pin(sleep_until(moment))));
    }

    /// Waits for the next event; `None` if nothing is pending.
    pub async fn next(&mut self) -> Option<Event<F::Output>> {
        let event = self.waits.next().await;
        if let Some(Event::Ended(number, _)) = &event {
            self.all[*number].is_over = true;
        }
        event
    }

    /// The attempt with a number.
    pub fn get(&self, number: usize) -> Attempt {
        self.all[number]
    }

    /// The number of the attempt that began last.
    pub fn last(&self) -> Option<usize> {
        self.all.len().checked_sub(1)
    }

    /// Attempts that have not ended, with their numbers.
    pub fn under_way(&self) -> impl Iterator<Item = (usize, Attempt)> {
        self.all.iter().copied().enumerate().filter(|(_, attempt)| !attempt.is_over)
    }

    /// The attempts that `winner` overtook: those at other servers whose `age` has reached the
    /// server's `limit`. They count as failed, so that these servers are not asked first any more.
    pub fn overtaken(
        &self,
        winner: usize,
        limit: impl Fn(usize) -> Duration,
        age: impl Fn(usize, Attempt) -> Option<Duration>,
    ) -> impl Iterator<Item = (usize, Attempt)> {
        let at_others =
            self.under_way().filter(move |(_, other)| other.server != self.all[winner].server);
        at_others.filter(move |(number, other)| {
            age(*number, *other).is_some_and(|age| age >= limit(other.server))
        })
    }

    /// Returns whether no attempt is running.
    pub fn is_idle(&self) -> bool {
        self.under_way().next().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers after this many milliseconds.
    async fn answer(after: u64, value: u32) -> u32 {
        sleep(Duration::from_millis(after)).await;
        value
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_attempt_is_reported_late_and_still_ends() {
        let mut attempts = Attempts::default();
        let first = attempts.start(7, answer(30, 1));
        attempts.look_after(first, Duration::from_millis(10), Lateness::Late);
        assert!(matches!(attempts.next().await, Some(Event::Late(0, Lateness::Late))));
        let second = attempts.start(9, answer(5, 2));
        assert!(matches!(attempts.next().await, Some(Event::Ended(1, 2))));
        assert!(attempts.get(second).is_over && attempts.last() == Some(second));
        let slow: Vec<_> = attempts.under_way().map(|(at, attempt)| (at, attempt.server)).collect();
        assert_eq!(slow, [(first, 7)]);
        assert!(matches!(attempts.next().await, Some(Event::Ended(0, 1))));
        assert!(attempts.is_idle() && attempts.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_at_other_servers_beyond_their_limit_are_overtaken() {
        let mut attempts = Attempts::default();
        let slow = attempts.start(7, answer(90, 1));
        attempts.start(9, answer(90, 2));
        sleep(Duration::from_millis(20)).await;
        attempts.start(8, answer(90, 3));
        let winner = attempts.start(9, answer(5, 4));
        assert!(matches!(attempts.next().await, Some(Event::Ended(3, 4))));
        let age = |_, attempt: Attempt| Some(attempt.started.elapsed());
        let overtaken = attempts.overtaken(winner, |_| Duration::from_millis(10), age);
        assert_eq!(overtaken.map(|(number, _)| number).collect::<Vec<_>>(), [slow]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_ends_on_time() {
        let mut attempts = Attempts::<std::future::Ready<()>>::default();
        let moment = Instant::now() + Duration::from_secs(3);
        attempts.resume_at(moment);
        assert!(matches!(attempts.next().await, Some(Event::Resume)));
        assert_eq!(Instant::now(), moment);
        assert!(attempts.is_idle());
    }
}
