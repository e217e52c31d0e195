//! A semaphore in which readers go first and images share the rest.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::{Arc, Mutex, MutexGuard},
};

use tokio::sync::oneshot;

use super::account::Account;
use crate::sync::lock;

/// The account that a fetch is charged to, and whether a reader waits for it.
#[derive(Clone)]
pub(crate) struct Claim {
    account: Account,
    wanted: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl Claim {
    /// `wanted` returns whether a reader waits for the work. It is called at every grant, since a
    /// reader may join while background work is queued.
    pub(crate) fn new(account: Account, wanted: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Claim { account, wanted: Arc::new(wanted) }
    }

    /// Returns whether a reader waits for it.
    pub(crate) fn is_wanted(&self) -> bool {
        (self.wanted)()
    }
}

/// A semaphore for bytes or requests, which fetches take before they start and release when they
/// end.
///
/// A fetch with a waiting reader precedes all others, even earlier ones that need less. Background
/// work gets at most half of the total, so that a reader never waits for all of it to end. Among
/// the images with readers, as among those without, the one that holds least goes first.
pub(crate) struct PrioritySemaphore {
    total: u64,
    /// Kept for images that hold nothing, see [`PrioritySemaphore::shared`].
    reserve: u64,
    state: Mutex<Ledger>,
}

#[derive(Default)]
struct Ledger {
    taken: u64,
    /// The part of `taken` that background work has.
    background: u64,
    /// No account is without anything.
    shares: HashMap<Account, Share>,
    /// The number of claims so far.
    came: u64,
}

/// The share of one image.
#[derive(Default)]
struct Share {
    taken: u64,
    background: u64,
    queue: VecDeque<Waiting>,
}

struct Waiting {
    /// In the order in which they came.
    number: u64,
    amount: u64,
    claim: Claim,
    grant: oneshot::Sender<Permit>,
}

/// The next of one account.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Next {
    is_background: bool,
    /// The amount that its account holds already.
    taken: u64,
    number: u64,
    /// Its position in the queue of its account.
    at: usize,
}

/// A part of a [`PrioritySemaphore`], given back when it is dropped.
#[must_use]
pub(crate) struct Permit {
    budget: Arc<PrioritySemaphore>,
    account: Account,
    amount: u64,
    background: bool,
}

impl PrioritySemaphore {
    pub(crate) fn new(total: u64) -> Arc<Self> {
        Arc::new(PrioritySemaphore { total, reserve: 0, state: Mutex::default() })
    }

    /// For resources that images may hold for long. One image leaves an eighth to others. An image
    /// that holds nothing is admitted even when everything is taken, up to twice the total.
    pub(crate) fn shared(total: u64) -> Arc<Self> {
        Arc::new(PrioritySemaphore { total, reserve: total / 8, state: Mutex::default() })
    }

    /// Waits for `amount`, or for everything if that is less. Dropping the future gives the place
    /// in the queue up.
    pub(crate) async fn take(self: &Arc<Self>, amount: u64, claim: &Claim) -> Permit {
        let (grant, granted) = oneshot::channel();
        let amount = amount.min(self.total);
        let lost = {
            let mut state = self.lock();
            state.came += 1;
            let waiting = Waiting { number: state.came, amount, claim: claim.clone(), grant };
            state.shares.entry(claim.account).or_default().queue.push_back(waiting);
            self.grant(&mut state)
        };
        drop(lost);
        match granted.await {
            Ok(permit) => permit,
            // Only a bug removes a claim from the queue without granting it. A fetch that is not
            // counted is better than a reader that hangs.
            Err(_) => {
                let (budget, account) = (self.clone(), claim.account);
                Permit { budget, account, amount: 0, background: false }
            }
        }
    }

    /// Gives requests while there are enough. Returns permits that were not waited for any more, to
    /// be dropped without the lock.
    fn grant(self: &Arc<Self>, state: &mut Ledger) -> Vec<Permit> {
        let mut lost = Vec::new();
        state.shares.retain(|_, share| {
            share.queue.retain(|waiting| !waiting.grant.is_closed());
            share.taken > 0 || !share.queue.is_empty()
        });
        while let Some((account, Next { is_background, at, .. })) = self.next(state) {
            let Some(share) = state.shares.get_mut(&account) else { break };
            let Some(Waiting { amount, grant, .. }) = share.queue.remove(at) else { break };
            let background = if is_background { amount } else { 0 };
            (share.taken, share.background) = (share.taken + amount, share.background + background);
            (state.taken, state.background) = (state.taken + amount, state.background + background);
            let budget = self.clone();
            let permit = Permit { budget, account, amount, background: is_background };
            lost.extend(grant.send(permit).err());
        }
        lost
    }

    /// The next claim, if enough is free. A claim that doesn't fit blocks those behind it, except
    /// those of images that hold nothing.
    fn next(&self, state: &Ledger) -> Option<(Account, Next)> {
        let next = |(account, share): (&Account, &Share)| {
            let reader = share.queue.iter().position(|waiting| waiting.claim.is_wanted());
            let (at, is_background) = (reader.unwrap_or(0), reader.is_none());
            let (number, taken) = (share.queue.get(at)?.number, share.taken);
            Some((Next { is_background, taken, number, at }, *account))
        };
        let mut all: Vec<_> = state.shares.iter().filter_map(next).collect();
        all.sort_unstable_by_key(|(next, _)| *next);
        let mut is_full = false;
        all.into_iter().find_map(|(next, account)| {
            let share = &state.shares[&account];
            let may_go = !is_full || share.taken == 0;
            let fits = may_go && self.fits(state, share, &next);
            is_full |= !fits;
            fits.then_some((account, next))
        })
    }

    fn fits(&self, state: &Ledger, share: &Share, next: &Next) -> bool {
        let amount = share.queue[next.at].amount;
        let fits = |taken: u64, own: u64, total: u64, reserve: u64| match own {
            0 if reserve > 0 => taken + amount <= 2 * total,
            _ => taken == 0 || taken + amount <= total - reserve,
        };
        let (half, reserve) = (self.total / 2, self.reserve);
        let fits_behind = || fits(state.background, share.background, half, reserve / 2);
        fits(state.taken, share.taken, self.total, reserve)
            && (!next.is_background || fits_behind())
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        lock(&self.state)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let background = if self.background { self.amount } else { 0 };
        let mut state = self.budget.lock();
        state.taken -= self.amount;
        state.background -= background;
        if let Some(share) = state.shares.get_mut(&self.account) {
            share.taken -= self.amount;
            share.background -= background;
        }
        let lost = self.budget.grant(&mut state);
        drop(state);
        drop(lost);
    }
}

impl fmt::Debug for PrioritySemaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        let waiting: usize = state.shares.values().map(|share| share.queue.len()).sum();
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
    use lazuli_image::Digest;

    use super::*;

    const HOG: Account = Account::Image(Digest::sha256([1; 32]));
    const OTHER: Account = Account::Image(Digest::sha256([2; 32]));
    const THIRD: Account = Account::Image(Digest::sha256([3; 32]));

    fn class(wanted: bool) -> Claim {
        Claim::new(HOG, move || wanted)
    }

    /// A reader of an image.
    fn of(account: Account) -> Claim {
        Claim::new(account, || true)
    }

    #[tokio::test]
    async fn readers_overtake_background_work() {
        let budget = PrioritySemaphore::new(10);
        let first = budget.take(10, &class(true)).await;
        let order = Mutex::new(Vec::new());
        let wait = async |name: &'static str, amount, wanted: Claim| {
            let permit = budget.take(amount, &wanted).await;
            order.lock().unwrap().push(name);
            tokio::task::yield_now().await;
            drop(permit);
        };
        let changing = Arc::new(AtomicBool::new(false));
        let becomes = {
            let changing = changing.clone();
            Claim::new(HOG, move || changing.load(Ordering::Relaxed))
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
    async fn background_work_gets_half() {
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
    async fn dropped_waiter_returns_its_permit() {
        let budget = PrioritySemaphore::new(4);
        let everything = budget.take(100, &class(true)).await;
        let wanted = class(true);
        let mut left = Box::pin(budget.take(3, &wanted));
        assert!(left.as_mut().now_or_never().is_none());
        let mut granted = Box::pin(budget.take(2, &wanted));
        assert!(granted.as_mut().now_or_never().is_none());
        drop(left);
        drop(everything);
        // Was granted its permit, and is dropped before it was polled again.
        drop(granted);
        assert!(budget.take(4, &wanted).now_or_never().is_some());
        assert_eq!(budget.lock().taken, 0);
        assert!(budget.lock().shares.is_empty());
    }

    #[tokio::test]
    async fn an_image_leaves_an_eighth_to_others() {
        let budget = PrioritySemaphore::shared(64);
        let hog = of(HOG);
        let all = futures_util::future::join_all((0..14).map(|_| budget.take(4, &hog))).await;
        let mut more = Box::pin(budget.take(4, &hog));
        assert!(more.as_mut().now_or_never().is_none());
        let other = budget.take(8, &of(OTHER)).now_or_never();
        assert!(other.is_some());
        drop((all, other));
        assert!(more.now_or_never().is_some());
    }

    #[tokio::test]
    async fn an_image_that_holds_nothing_is_let_in_when_all_is_taken() {
        let budget = PrioritySemaphore::shared(64);
        let _all = [budget.take(56, &of(HOG)).await, budget.take(8, &of(OTHER)).await];
        let third = budget.take(32, &of(THIRD)).now_or_never();
        assert!(third.is_some());
        assert!(budget.take(1, &of(THIRD)).now_or_never().is_none());
        drop(third);
        assert!(budget.take(64, &of(THIRD)).now_or_never().is_some());
    }

    #[tokio::test]
    async fn prefetch_of_one_image_leaves_room_for_others() {
        let budget = PrioritySemaphore::shared(64);
        let ahead = |account| Claim::new(account, || false);
        let _all = [budget.take(16, &ahead(HOG)).await, budget.take(12, &ahead(HOG)).await];
        assert!(budget.take(1, &ahead(HOG)).now_or_never().is_none());
        assert!(budget.take(16, &ahead(OTHER)).now_or_never().is_some());
    }

    #[tokio::test]
    async fn an_image_that_holds_fewer_permits_is_served_first() {
        let budget = PrioritySemaphore::new(2);
        let mut held = vec![budget.take(1, &of(HOG)).await, budget.take(1, &of(HOG)).await];
        let order = Mutex::new(Vec::new());
        let wait = async |account| {
            let permit = budget.take(1, &of(account)).await;
            order.lock().unwrap().push(account);
            tokio::task::yield_now().await;
            drop(permit);
        };
        let all = async {
            tokio::join!(wait(HOG), wait(HOG), wait(OTHER), async {
                drop(held.pop());
            })
        };
        all.await;
        assert_eq!(order.lock().unwrap()[0], OTHER, "which held nothing");
    }
}
