//! Background work that lets others go first.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::cache::Cache;

/// Maximum delay of a prefetch that a client has requested: long enough for a reader with a
/// registry nearby. The prefetch then continues in small requests.
pub(super) const LONGEST_DELAY: Duration = STEP;

/// Interval between checks whether they still wait.
const STEP: Duration = Duration::from_millis(10);

/// Waits while readers wait, but not for longer than `longest`.
pub(super) async fn yield_to_readers(cache: &Cache, longest: Duration) {
    yield_while(|| cache.is_awaited(), longest).await;
}

/// Waits while others are busy, but not for longer than `longest`.
pub(super) async fn yield_while(is_busy: impl Fn() -> bool, longest: Duration) {
    let begun = Instant::now();
    while is_busy() && begun.elapsed() < longest {
        sleep(STEP).await;
    }
}
