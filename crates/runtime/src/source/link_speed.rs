//! The speed of the link to the servers, by the bytes that arrive from all of them.
//!
//! A node that reads from a peer or a mirror nearby may take its link to a far registry for faster
//! than it is, so users bound what they make of it.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use crate::sync::lock;

/// Interval over which bytes are counted. A busy processor lets bytes wait in the kernel, and then
/// takes them at once: over a shorter time that looks like a faster link.
const WINDOW: Duration = Duration::from_millis(100);

/// Time in which a measured speed loses half of its weight: links are shared, and change.
const HALF_LIFE: Duration = Duration::from_secs(60);

/// The highest speed seen lately.
#[derive(Debug, Default)]
pub(crate) struct LinkSpeed(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    /// The beginning of the window, and the bytes in it.
    since: Option<Instant>,
    bytes: u64,
    /// Bytes per second, and when that was seen.
    best: f64,
    at: Option<Instant>,
}

impl LinkSpeed {
    pub(crate) fn arrived(&self, bytes: u64) {
        lock(&self.0).arrived(bytes, Instant::now());
    }

    /// Bytes that arrive in this time if the link is busy; 0 before anything was measured.
    pub(crate) fn bytes_in(&self, time: Duration) -> u64 {
        (lock(&self.0).speed(Instant::now()) * time.as_secs_f64()) as u64
    }
}

impl Seen {
    fn arrived(&mut self, bytes: u64, now: Instant) {
        let elapsed = now.duration_since(*self.since.get_or_insert(now));
        self.bytes += bytes;
        if elapsed < WINDOW {
            return;
        }
        // With a pause in it, a window says little, and changes nothing.
        let speed = self.bytes as f64 / elapsed.as_secs_f64();
        if speed >= self.speed(now) {
            (self.best, self.at) = (speed, Some(now));
        }
        (self.since, self.bytes) = (Some(now), 0);
    }

    fn speed(&self, now: Instant) -> f64 {
        let age = self.at.map_or(Duration::ZERO, |at| now.duration_since(at));
        self.best * 0.5_f64.powf(age.as_secs_f64() / HALF_LIFE.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_do_not_make_a_link_slow_but_time_does() {
        let (mut seen, start) = (Seen::default(), Instant::now());
        let mut now = start;
        for _ in 0..250 {
            now += Duration::from_millis(1);
            seen.arrived(100_000, now);
        }
        let fast = seen.speed(now);
        assert!((95e6..110e6).contains(&fast), "{fast}");
        now += Duration::from_secs(1);
        seen.arrived(1000, now);
        assert!(seen.speed(now) > 0.95 * fast, "{}", seen.speed(now));
        now += HALF_LIFE;
        assert!(seen.speed(now) < 0.55 * fast, "{}", seen.speed(now));
    }
}
