//! Turns for something scarce, where readers go first.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::oneshot;

/// Whether a reader waits for what is fetched. Asked whenever a turn is given, since a reader may come while a fetch that nobody
/// waited for stands in the queue.
pub(crate) type Wanted = Arc<dyn Fn() -> bool + Send + Sync>;

/// An amount of something, bytes or requests, that fetches take before they begin and give back when they end.
///
/// Who is wanted by a reader goes before everybody who is not, also before those who came earlier and need less. Of the total,
/// those who are not wanted get half at most, so that a reader never waits for all of them to end.
pub(crate) struct PrioritySemaphore {
    total: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    taken: u64,
    /// Of these, by those who were not wanted when they got them.
    background: u64,
    queue: VecDeque<Waiting>,
}

struct Waiting {
    amount: u64,
    wanted: Wanted,
    turn: oneshot::Sender<Permit>,
}

/// A part of a [`PrioritySemaphore`], given back when it is dropped.
#[must_use]
pub(crate) struct Permit {
    budget: Arc<PrioritySemaphore>,
    amount: u64,
    background: bool,
}

impl PrioritySemaphore {
    pub(crate) fn new(total: u64) -> Arc<Self> {
        Arc::new(PrioritySemaphore { total, state: Mutex::default() })
    }

    /// Waits for `amount`, or for everything if that is less. Dropping the future gives the place in the queue up.
    pub(crate) async fn take(self: &Arc<Self>, amount: u64, wanted: &Wanted) -> Permit {
        let (turn, granted) = oneshot::channel();
        let amount = amount.min(self.total);
        let waiting = Waiting { amount, wanted: wanted.clone(), turn };
        let lost = {
            let mut state = self.lock();
            state.queue.push_back(waiting);
            self.grant(&mut state)
        };
        drop(lost);
        match granted.await {
            Ok(permit) => permit,
            // Only a bug leaves the queue without a turn; a fetch that is not counted is better than a reader who hangs.
            Err(_) => Permit { budget: self.clone(), amount: 0, background: false },
        }
    }

    /// Gives requests while there are enough. Returns permits that nobody waited for any more, to be dropped without the lock.
    fn grant(self: &Arc<Self>, state: &mut State) -> Vec<Permit> {
        let mut lost = Vec::new();
        state.queue.retain(|waiting| !waiting.turn.is_closed());
        while !state.queue.is_empty() {
            let reader = state.queue.iter().position(|waiting| (waiting.wanted)());
            let (at, background) = (reader.unwrap_or(0), reader.is_none());
            let amount = state.queue[at].amount;
            let fits = |taken: u64, total: u64| taken == 0 || taken + amount <= total;
            if !fits(state.taken, self.total)
                || background && !fits(state.background, self.total / 2)
            {
                break;
            }
            state.taken += amount;
            state.background += if background { amount } else { 0 };
            let Some(next) = state.queue.remove(at) else { break };
            let permit = Permit { budget: self.clone(), amount, background };
            lost.extend(next.turn.send(permit).err());
        }
        lost
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No panic can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        state.taken -= self.amount;
        state.background -= if self.background { self.amount } else { 0 };
        let lost = self.budget.grant(&mut state);
        drop(state);
        drop(lost);
    }
}

impl fmt::Debug for PrioritySemaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        let waiting = state.queue.len();
        write!(f, "PrioritySemaphore({} of {} taken, {waiting} wait)", state.taken, self.total)
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Permit({})", self.amount)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use futures_util::FutureExt as _;

    use super::*;

    fn class(wanted: bool) -> Wanted {
        Arc::new(move || wanted)
    }

    #[tokio::test]
    async fn readers_overtake_whom_nobody_waits_for() {
        let budget = PrioritySemaphore::new(10);
        let first = budget.take(10, &class(true)).await;
        let order = Mutex::new(Vec::new());
        let wait = async |name: &'static str, amount, wanted: Wanted| {
            let permit = budget.take(amount, &wanted).await;
            order.lock().unwrap().push(name);
            tokio::task::yield_now().await;
            drop(permit);
        };
        let changing = Arc::new(AtomicBool::new(false));
        let becomes: Wanted = {
            let changing = changing.clone();
            Arc::new(move || changing.load(Ordering::Relaxed))
        };
        let all = async {
            tokio::join!(
                wait("prefetch", 1, class(false)),
                wait("prefetch that a reader joined", 1, becomes),
                wait("big reader", 10, class(true)),
                wait("reader", 1, class(true)),
                async {
                    changing.store(true, Ordering::Relaxed);
                    drop(first);
                },
            )
        };
        all.await;
        let expected = ["prefetch that a reader joined", "big reader", "reader", "prefetch"];
        assert_eq!(*order.lock().unwrap(), expected);
    }

    #[tokio::test]
    async fn whom_nobody_waits_for_gets_half() {
        let budget = PrioritySemaphore::new(8);
        let background = class(false);
        let held: Vec<_> =
            futures_util::future::join_all((0..4).map(|_| budget.take(1, &background))).await;
        let mut fifth = Box::pin(budget.take(1, &background));
        assert!(fifth.as_mut().now_or_never().is_none());
        let reader = budget.take(4, &class(true)).now_or_never();
        assert!(reader.is_some());
        drop(held);
        assert!(fifth.now_or_never().is_some());
    }

    #[tokio::test]
    async fn nothing_is_lost() {
        let budget = PrioritySemaphore::new(4);
        let everything = budget.take(100, &class(true)).await;
        let wanted = class(true);
        let mut left = Box::pin(budget.take(3, &wanted));
        assert!(left.as_mut().now_or_never().is_none());
        let mut granted = Box::pin(budget.take(2, &wanted));
        assert!(granted.as_mut().now_or_never().is_none());
        drop(left);
        drop(everything);
        // Has its turn, and gives it back without having looked.
        drop(granted);
        assert!(budget.take(4, &wanted).now_or_never().is_some());
        assert_eq!(budget.lock().taken, 0);
    }
}
