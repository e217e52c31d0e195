//! When a keeper starts its next worker.

use std::time::{Duration, Instant};

/// Workers in a row that may fail without a pause.
const QUICK_RESTARTS: u32 = 3;

/// The pause after that; it doubles with each further failure.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest pause: how much later than necessary readers continue when the reason is gone.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Failures of workers, and the next start.
#[derive(Debug, Default)]
pub(super) struct Restarts {
    /// Workers in a row that did not settle.
    failures: u32,
    due: Option<Instant>,
}

impl Restarts {
    /// When the next worker is to start, if there is to be one.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Makes the next worker start without a pause.
    pub(super) fn start_now(&mut self) {
        self.due = Some(Instant::now());
    }

    /// Has no worker start.
    pub(super) fn cancel(&mut self) {
        self.due = None;
    }

    /// A worker died, or could not be started. Returns the pause until the next one starts.
    pub(super) fn fail(&mut self) -> Duration {
        self.failures += 1;
        let pause = match self.failures.checked_sub(QUICK_RESTARTS + 1) {
            None => Duration::ZERO,
            Some(doublings) => LONGEST_PAUSE.min(FIRST_PAUSE * 2_u32.pow(doublings.min(10))),
        };
        self.due = Some(Instant::now() + pause);
        pause
    }

    /// Records that a worker did its work: later failures are counted anew.
    pub(super) fn settle(&mut self) {
        self.failures = 0;
    }

    /// Workers in a row that did not settle.
    pub(super) fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_after_three_quick_restarts_and_are_bounded() {
        let mut restarts = Restarts::default();
        let mut pause = || restarts.fail().as_millis();
        assert_eq!([(); 7].map(|()| pause()), [0, 0, 0, 50, 100, 200, 400]);
        (0..100).for_each(|_| assert!(pause() <= LONGEST_PAUSE.as_millis()));
        assert_eq!(pause(), LONGEST_PAUSE.as_millis());
        restarts.settle();
        assert_eq!(restarts.fail(), Duration::ZERO);
    }
}
