//! A slot for background work of one image at a time, which a stuck image loses.

use std::{pin::pin, time::Duration};

use tokio::{sync::Semaphore, time::sleep};

/// One job runs at a time, unless one exceeds its time limit.
#[derive(Debug)]
pub(super) struct TimedSlot(Semaphore);

impl Default for TimedSlot {
    fn default() -> Self {
        TimedSlot(Semaphore::new(1))
    }
}

impl TimedSlot {
    /// Waits for the slot and runs `work` in it. After `longest` the slot is released even if
    /// `work` is not done, because its registry may never answer; `work` then continues without the
    /// slot.
    pub(super) async fn run<T>(&self, longest: Duration, work: impl Future<Output = T>) -> T {
        // The semaphore is never closed.
        let permit = self.0.acquire().await;
        let mut work = pin!(work);
        tokio::select! {
            done = &mut work => return done,
            () = sleep(longest) => drop(permit),
        }
        work.await
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stuck_job_delays_others_only_up_to_its_time_limit() {
        let (slot, began) = (TimedSlot::default(), Instant::now());
        let longest = Duration::from_millis(100);
        let hangs = slot.run(longest, sleep(Duration::from_secs(60)));
        let work = |_| slot.run(longest, async { sleep(Duration::from_millis(40)).await });
        let others = async {
            futures_util::future::join_all((0..3).map(work)).await;
            began.elapsed()
        };
        let ((), took) = tokio::join!(hangs, others);
        assert_eq!(took, Duration::from_millis(100 + 3 * 40));
    }
}
