//! A clock that hardly moves while the process is stopped.
//!
//! Between its look at what is ready and its answer a thread of ours may be stopped together with
//! the whole process: by a signal, a debugger, a freezer. When all goes on, eviction must not find
//! that the chunk has been idle for all that time: the answer, or the read of the FUSE driver, is
//! still to come. So a leap of the clock counts for a few seconds only.

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
    /// When it was looked at last, in tenths of a second since `opened`, and below that what it
    /// showed.
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

/// What was seen, brought forward to `real`.
fn advance(seen: u64, real: u32) -> u64 {
    let before = (seen >> 32) as u32;
    u64::from(before.max(real)) << 32 | u64::from(advance_to(seen, real))
}

/// What the clock shows at `real`.
fn advance_to(seen: u64, real: u32) -> u32 {
    let (before, shown) = ((seen >> 32) as u32, seen as u32);
    shown.saturating_add(real.saturating_sub(before).min(LEAP))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_runs_and_does_not_leap() {
        let mut seen = 0;
        let mut shown = |real| {
            let now = advance_to(seen, real);
            seen = advance(seen, real);
            assert_eq!(seen as u32, now);
            now
        };
        // Looks at it every five seconds, then a minute without any, and one that comes late.
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
