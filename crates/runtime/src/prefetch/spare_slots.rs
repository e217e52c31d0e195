//! Slots for background requests: as many as the link, the disk and the processors have room for.
//!
//! A request that shares one of these with others takes longer than one alone. As long as requests
//! are nearly as fast as one alone, there is room for one more; when they are clearly slower, there
//! is one too many. So requests fill what others leave, and nothing queues behind them for long.

use std::{
    pin::pin,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::{Instant, sleep},
};

use crate::sync::lock;

/// Maximum number of slots. With 512 KiB each, they fill 2.5 Gbit/s at 25 ms.
const MOST: usize = 16;

/// Requests at full width after which the width is looked at, at least.
const ROUND: usize = 4;

/// Parts of the speed of a request alone: with more, a slot is added; with less, one is removed.
/// With 0.9 and 0.75 requests of 1 MiB filled 10 to 20 % more of 1 Gbit/s at 20 ms, and one reader
/// in a hundred waited twice as long.
const ROOM: f64 = 0.92;
const CROWDED: f64 = 0.82;

/// Requests after which the speed of a request alone is measured again: what was measured beside
/// others was too slow.
const STALE: usize = 128;

/// Requests that measure that.
const ALONE: usize = 2;

/// Part of the earlier measurement that counts if the new one is slower: others are busy just now,
/// or the link has become slower.
const FADE: f64 = 0.9;

/// The slots of a node. There is one at first.
#[derive(Debug)]
pub(super) struct SpareSlots {
    slots: Semaphore,
    width: Mutex<Width>,
}

/// How many slots there are, and why.
#[derive(Debug)]
struct Width {
    slots: usize,
    /// What it was before the speed of a request alone was measured again.
    before: usize,
    in_use: usize,
    /// Permits that are taken away as they are given back.
    surplus: usize,
    /// Bytes per second of a request alone, 0 at first.
    alone: f64,
    /// Whether that is measured now, with one slot.
    measures_alone: bool,
    round: Round,
    since_alone: usize,
}

/// Requests since the width was last looked at.
#[derive(Debug, Default)]
struct Round {
    requests: usize,
    bytes: u64,
    seconds: f64,
}

/// A slot in use.
struct Slot<'a> {
    of: &'a SpareSlots,
    permit: Option<SemaphorePermit<'a>>,
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        let mut width = self.of.lock();
        width.in_use -= 1;
        if width.surplus > 0
            && let Some(permit) = self.permit.take()
        {
            width.surplus -= 1;
            permit.forget();
        }
    }
}

impl Default for SpareSlots {
    fn default() -> Self {
        let width = Width {
            slots: 1,
            before: 1,
            in_use: 0,
            surplus: 0,
            alone: 0.0,
            measures_alone: true,
            round: Round::default(),
            since_alone: 0,
        };
        SpareSlots { slots: Semaphore::new(1), width: Mutex::new(width) }
    }
}

impl SpareSlots {
    /// Number of requests that there is room for.
    pub(super) fn width(&self) -> usize {
        self.lock().slots
    }

    /// Waits for a slot, then for its `turn`, and runs the request that follows. The request
    /// returns how many bytes came, or nothing if that says nothing about the link.
    ///
    /// After `longest` the slot is released even if the request is not done, because its registry
    /// may never answer; the request then continues without the slot.
    pub(super) async fn run<B, R, T>(
        &self,
        longest: Duration,
        turn: impl Future<Output = B>,
        request: impl FnOnce(B) -> R,
    ) -> T
    where
        R: Future<Output = (Option<u64>, T)>,
    {
        // The semaphore is never closed.
        let permit = self.slots.acquire().await.ok();
        let slot = Slot { of: self, permit };
        self.lock().in_use += 1;
        let request = request(turn.await);
        let (begun, is_full) = (Instant::now(), self.lock().is_full());
        let mut request = pin!(request);
        tokio::select! {
            (bytes, done) = &mut request => {
                if let Some(bytes) = bytes.filter(|_| is_full) {
                    self.note(bytes, begun.elapsed());
                }
                return done;
            }
            () = sleep(longest) => drop(slot),
        }
        request.await.1
    }

    fn note(&self, bytes: u64, elapsed: Duration) {
        let mut width = self.lock();
        // What began at another width says little about this one.
        if !width.is_full() {
            return;
        }
        let before = width.slots;
        width.note(bytes, elapsed);
        let added = width.slots.saturating_sub(before);
        let kept = width.surplus.min(added);
        width.surplus = width.surplus - kept + before.saturating_sub(width.slots);
        self.slots.add_permits(added - kept);
    }

    fn lock(&self) -> MutexGuard<'_, Width> {
        lock(&self.width)
    }
}

impl Width {
    fn is_full(&self) -> bool {
        self.in_use == self.slots
    }

    /// Counts a request that began and ended while all slots were in use.
    fn note(&mut self, bytes: u64, elapsed: Duration) {
        let round = &mut self.round;
        round.requests += 1;
        round.bytes += bytes;
        round.seconds += elapsed.as_secs_f64();
        self.since_alone += 1;
        let least = if self.measures_alone { ALONE } else { ROUND.max(self.slots) };
        if round.requests < least {
            return;
        }
        let speed = round.bytes as f64 / round.seconds.max(1e-6);
        self.round = Round::default();
        if self.measures_alone {
            self.alone = speed.max(FADE * self.alone);
            (self.measures_alone, self.slots, self.since_alone) = (false, self.before, 0);
            return;
        }
        self.alone = self.alone.max(speed);
        if self.since_alone > STALE {
            (self.measures_alone, self.before, self.slots) = (true, self.slots, 1);
        } else if speed >= ROOM * self.alone {
            self.slots = (self.slots + 1).min(MOST);
        } else if speed < CROWDED * self.alone {
            self.slots = (self.slots - 1).max(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{future::ready, sync::Arc};

    use futures_util::{future::join_all, stream::FuturesUnordered, stream::StreamExt as _};

    use super::*;

    const PIECE: u64 = 1 << 20;

    /// A link that serves one request after the other, behind some distance.
    struct Link {
        bytes_per_second: f64,
        round_trip: Duration,
        free_at: Mutex<Instant>,
    }

    impl Link {
        fn new(bytes_per_second: f64, round_trip: Duration) -> Self {
            Link { bytes_per_second, round_trip, free_at: Mutex::new(Instant::now()) }
        }

        async fn carry(&self, bytes: u64) -> (Option<u64>, ()) {
            let time = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
            let sent = {
                let mut free_at = lock(&self.free_at);
                *free_at = (*free_at).max(Instant::now()) + time;
                *free_at
            };
            tokio::time::sleep_until(sent + self.round_trip).await;
            (Some(bytes), ())
        }
    }

    /// Carries pieces, as many at a time as there is room for. Returns bytes per second.
    async fn carry(slots: &SpareSlots, link: &Link, pieces: usize) -> f64 {
        let begun = Instant::now();
        let mut under_way = FuturesUnordered::new();
        for _ in 0..pieces {
            while under_way.len() >= slots.width() {
                under_way.next().await;
            }
            let carry = |()| link.carry(PIECE);
            under_way.push(slots.run(Duration::from_secs(1), ready(()), carry));
        }
        while under_way.next().await.is_some() {}
        pieces as f64 * PIECE as f64 / begun.elapsed().as_secs_f64()
    }

    #[tokio::test(start_paused = true)]
    async fn requests_fill_a_link_and_no_more() {
        for (bytes_per_second, milliseconds, most) in
            [(125e6, 20, 5), (12.5e6, 50, 2), (312e6, 5, 4), (1250e6, 1, 4)]
        {
            let link = Link::new(bytes_per_second, Duration::from_millis(milliseconds));
            let slots = SpareSlots::default();
            carry(&slots, &link, 100).await;
            let share = carry(&slots, &link, 1000).await / bytes_per_second;
            assert!(share > 0.65, "{share} of {bytes_per_second} at {milliseconds} ms");
            assert!(slots.width() <= most, "{} at {milliseconds} ms", slots.width());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_make_room_for_others() {
        let link = Arc::new(Link::new(125e6, Duration::from_millis(20)));
        let slots = SpareSlots::default();
        carry(&slots, &link, 100).await;
        assert!(slots.width() > 1);
        let others = {
            let link = link.clone();
            tokio::spawn(async move {
                loop {
                    join_all((0..8).map(|_| link.carry(PIECE))).await;
                }
            })
        };
        carry(&slots, &link, 100).await;
        assert_eq!(slots.width(), 1);
        others.abort();
        carry(&slots, &link, 300).await;
        assert!(slots.width() > 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stuck_request_delays_others_only_up_to_its_time_limit() {
        let (slots, began) = (SpareSlots::default(), Instant::now());
        let longest = Duration::from_millis(100);
        let request = async |milliseconds| {
            sleep(Duration::from_millis(milliseconds)).await;
            (None, ())
        };
        let hangs = slots.run(longest, ready(60_000), request);
        let others = async {
            join_all((0..3).map(|_| slots.run(longest, ready(40), request))).await;
            began.elapsed()
        };
        let ((), took) = tokio::join!(hangs, others);
        assert_eq!(took, Duration::from_millis(100 + 3 * 40));
    }
}
