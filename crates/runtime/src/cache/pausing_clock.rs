//! A clock that hardly moves while the process is stopped.
//!
//! A thread that has seen a chunk ready, but not answered yet, may be stopped with the whole
//! process: by a signal, a debugger, a freezer. When the process continues, eviction must not take
//! the chunk for idle during all that time: the answer, or the read of the FUSE driver, is still to
//! come. So a leap of the clock counts for a few seconds only.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

/// The most that may pass between two looks at the clock, in tenths of a second. Eviction looks
/// every few seconds.
const LEAP: u32 = 100;

/// Counts tenths of a second; enough for 13 years.
#[derive(Debug)]
pub(super) struct Clock {
    opened: Instant,
    /// Time of the latest reading, in tenths of a second since `opened`; the low half is the value
    /// shown then.
    seen: AtomicU64,
}

impl Clock {
    pub(super) fn new() -> Self {
        Clock { opened: Instant::now(), seen: AtomicU64::new(0) }
    }

    pub(super) fn now(&self) -> u32 {
        let real = u32::try_from(self.opened.elapsed().as_millis() / 100).unwrap_or(u32::MAX);
        let advance = |seen| Some(advance(seen, real));
        let seen = self.seen.fetch_update(Ordering::AcqRel, Ordering::Acquire, advance);
        // It never fails: `advance` always has a value.
        advance_to(seen.unwrap_or_else(|seen| seen), real)
    }
}

/// The state `seen`, advanced to `real`.
fn advance(seen: u64, real: u32) -> u64 {
    let before = (seen >> 32) as u32;
    u64::from(before.max(real)) << 32 | u64::from(advance_to(seen, real))
}

/// The value shown at `real`.
fn advance_to(seen: u64, real: u32) -> u32 {
    let (before, shown) = ((seen >> 32) as u32, seen as u32);
    shown.saturating_add(real.saturating_sub(before).min(LEAP))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_advances_at_most_a_step_between_readings() {
        let mut seen = 0;
        let mut shown = |real| {
            let now = advance_to(seen, real);
            seen = advance(seen, real);
            assert_eq!(seen as u32, now);
            now
        };
        // Readings every five seconds, then a minute without any, and a late one.
        for (real, expected) in [
            (0, 0),
            (50, 50),
            (100, 100),
            (100, 100),
            (700, 200),
            (750, 250),
            (740, 250),
            (760, 260),
        ] {
            assert_eq!(shown(real), expected, "at {real}");
        }
        let clock = Clock::new();
        assert!(clock.now() <= clock.now());
    }
}
