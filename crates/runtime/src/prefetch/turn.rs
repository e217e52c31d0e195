//! Background work takes turns by image, and a stuck image loses its turn.

use std::{pin::pin, time::Duration};

use tokio::{sync::Semaphore, time::sleep};

/// See the module.
#[derive(Debug)]
pub(super) struct Turn(Semaphore);

impl Default for Turn {
    fn default() -> Self {
        Turn(Semaphore::new(1))
    }
}

impl Turn {
    /// Does `work` when it is its turn. After `longest` the next one begins, whether or not it is
    /// done: its registry may never answer.
    pub(super) async fn take<T>(&self, longest: Duration, work: impl Future<Output = T>) -> T {
        // The semaphore is never closed.
        let turn = self.0.acquire().await;
        let mut work = pin!(work);
        tokio::select! {
            done = &mut work => return done,
            () = sleep(longest) => drop(turn),
        }
        work.await
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn stuck_holder_delays_others_for_a_moment() {
        let (turn, began) = (Turn::default(), Instant::now());
        let longest = Duration::from_millis(100);
        let hangs = turn.take(longest, sleep(Duration::from_secs(60)));
        let work = |_| turn.take(longest, async { sleep(Duration::from_millis(40)).await });
        let others = async {
            futures_util::future::join_all((0..3).map(work)).await;
            began.elapsed()
        };
        let ((), took) = tokio::join!(hangs, others);
        assert_eq!(took, Duration::from_millis(100 + 3 * 40));
    }
}
