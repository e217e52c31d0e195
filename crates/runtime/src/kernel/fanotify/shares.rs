//! Which readers may wait when not all of them can.
//!
//! Each event that waits for data holds a descriptor, and the kernel denies an event for which there is none. So a
//! process lets some number of events wait, its slots, and leaves the others in the kernel's queue. The queue
//! has one order for all images: an image whose registry hangs, with more readers than there are slots, would hold up
//! every other one until its readers give up.
//!
//! ```text
//! a slot is free                                             it waits
//! none is: the image has less than its share                 an image that is stuck loses its oldest slot
//!          the image has its share, and it is stuck          denied (EIO), if other images are mounted
//!          else                                              the queue waits
//! ```
//!
//! The share is the slots divided by the images that have any. An image is stuck when as many of its events as its share
//! have waited for [`STUCK`]. A single image, and images whose data arrives, are never denied anything.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use lazuli_image::Digest;
use tokio::task::AbortHandle;

use super::journal::FileId;

/// So long no reader waits for a slot in vain. Well above what an answer takes on a busy machine, and well below the
/// deadline of a read.
const STUCK: Duration = Duration::from_secs(5);

/// Whose slots an event takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Account {
    /// The only image that has the file.
    Image(Digest),
    /// A file of several images: one must not use up what another one has for the rest.
    Shared(FileId),
}

/// What becomes of an event.
#[derive(Debug)]
pub(super) enum Admission {
    /// It may wait for its data.
    Slot(Slot),
    /// It is to be asked again in a moment.
    Later,
    /// Its image has enough.
    Denied,
}

/// All slots of a process.
#[derive(Debug)]
pub(super) struct Slots {
    limit: usize,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    taken: usize,
    /// By account, and in the order of their numbers the oldest first. No account is empty.
    accounts: HashMap<Account, BTreeMap<u64, Waiting>>,
    next: u64,
    is_closed: bool,
}

#[derive(Debug)]
struct Waiting {
    since: Instant,
    /// Ends the task that fetches, which denies the event.
    task: Option<AbortHandle>,
}

/// Given back when it is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    slots: Arc<Slots>,
    account: Account,
    number: u64,
}

impl Slots {
    pub(super) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Slots { limit: limit.max(1), table: Mutex::default() })
    }

    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Asks for a slot. `others` tells whether other images are mounted that may need one.
    pub(super) fn admit(
        self: &Arc<Self>,
        account: Account,
        now: Instant,
        others: impl FnOnce() -> bool,
    ) -> Admission {
        let mut table = self.lock();
        if table.is_closed {
            return Admission::Denied;
        }
        if table.taken >= self.limit {
            let own = table.accounts.get(&account).map_or(0, BTreeMap::len);
            let active = table.accounts.len() + usize::from(own == 0);
            let share = (self.limit / active).max(1);
            if own >= share {
                let is_stuck = table.is_stuck(&account, share, now);
                return if is_stuck && others() { Admission::Denied } else { Admission::Later };
            }
            if !table.take_from_stuck(share, now) {
                return Admission::Later;
            }
        }
        let number = table.next;
        table.next += 1;
        table.taken += 1;
        let waiting = Waiting { since: now, task: None };
        table.accounts.entry(account).or_default().insert(number, waiting);
        Admission::Slot(Slot { slots: self.clone(), account, number })
    }

    /// Denies everything from now on. At the end of a daemon readers get errors in any case, and an event that waits
    /// for a slot would hold up what the kernel asks when files are cut.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn is_stuck(&self, account: &Account, share: usize, now: Instant) -> bool {
        let slots = self.accounts.get(account);
        let last = slots.and_then(|slots| slots.values().nth(share - 1));
        last.is_some_and(|last| now.duration_since(last.since) >= STUCK)
    }

    /// Takes the oldest slot from the account that has most, of those that are stuck with more than their share.
    fn take_from_stuck(&mut self, share: usize, now: Instant) -> bool {
        let is_stuck = |account: &Account| self.is_stuck(account, share, now);
        let above = self.accounts.iter().filter(|(_, slots)| slots.len() > share);
        let most = above.filter(|(account, _)| is_stuck(account)).max_by_key(|(_, s)| s.len());
        let found = most.and_then(|(account, slots)| Some((*account, *slots.keys().next()?)));
        found.is_some_and(|(account, number)| {
            let task = self.remove(&account, number).and_then(|waiting| waiting.task);
            if let Some(task) = task {
                task.abort();
            }
            true
        })
    }

    fn remove(&mut self, account: &Account, number: u64) -> Option<Waiting> {
        let slots = self.accounts.get_mut(account)?;
        let waiting = slots.remove(&number)?;
        self.taken -= 1;
        if slots.is_empty() {
            self.accounts.remove(account);
        }
        Some(waiting)
    }
}

impl Slot {
    /// What can be reached if the slot is taken away.
    pub(super) fn holder(&self) -> Holder {
        Holder { slots: self.slots.clone(), account: self.account, number: self.number }
    }
}

/// See [`Slot::holder`].
#[derive(Debug)]
pub(super) struct Holder {
    slots: Arc<Slots>,
    account: Account,
    number: u64,
}

impl Holder {
    /// Names the task that is ended when the slot is taken away; it may have ended already.
    pub(super) fn is(self, task: AbortHandle) {
        let mut table = self.slots.lock();
        let slots = table.accounts.get_mut(&self.account);
        if let Some(waiting) = slots.and_then(|slots| slots.get_mut(&self.number)) {
            waiting.task = Some(task);
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.lock().remove(&self.account, self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOG: Account = Account::Shared((1, 1));
    const OTHER: Account = Account::Shared((1, 2));
    const THIRD: Account = Account::Shared((1, 3));

    fn admit(slots: &Arc<Slots>, account: Account, now: Instant, others: bool) -> Admission {
        slots.admit(account, now, || others)
    }

    fn sit(slots: &Arc<Slots>, account: Account, now: Instant, count: usize) -> Vec<Slot> {
        let sit = |_| match admit(slots, account, now, true) {
            Admission::Slot(slot) => slot,
            other => panic!("{other:?}"),
        };
        (0..count).map(sit).collect()
    }

    #[test]
    fn a_single_image_has_all_seats_and_is_denied_nothing() {
        let (slots, began) = (Slots::new(8), Instant::now());
        let mut waiting = sit(&slots, HOG, began, 8);
        for later in [Duration::ZERO, 10 * STUCK] {
            let admission = admit(&slots, HOG, began + later, false);
            assert!(matches!(admission, Admission::Later), "{admission:?}");
        }
        waiting.pop();
        assert!(matches!(admit(&slots, HOG, began, false), Admission::Slot(_)));
    }

    #[test]
    fn images_whose_data_arrives_wait_for_each_other() {
        let (slots, began) = (Slots::new(8), Instant::now());
        let _sitting = [sit(&slots, HOG, began, 6), sit(&slots, OTHER, began, 2)];
        let soon = began + STUCK / 2;
        for account in [HOG, OTHER, THIRD] {
            let admission = admit(&slots, account, soon, true);
            assert!(matches!(admission, Admission::Later), "{account:?}: {admission:?}");
        }
    }

    #[tokio::test]
    async fn an_image_that_is_stuck_makes_room() {
        let (slots, began) = (Slots::new(8), Instant::now());
        let stuck = sit(&slots, HOG, began, 8);
        let first = tokio::spawn(std::future::pending::<()>());
        stuck[0].holder().is(first.abort_handle());
        let later = began + STUCK;
        assert!(matches!(admit(&slots, HOG, later, true), Admission::Denied));
        // Half of the slots are its share by now.
        let others = sit(&slots, OTHER, later, 4);
        assert!(first.await.unwrap_err().is_cancelled(), "the oldest goes first");
        let admission = admit(&slots, OTHER, later, true);
        assert!(matches!(admission, Admission::Later), "{admission:?}");
        // What was taken away is not given back once more.
        drop((stuck, others));
        let table = slots.lock();
        assert!(table.taken == 0 && table.accounts.is_empty(), "{table:?}");
    }

    #[test]
    fn seats_that_were_just_taken_are_kept() {
        let (slots, began) = (Slots::new(8), Instant::now());
        let _old = sit(&slots, HOG, began, 3);
        let _young = sit(&slots, HOG, began + STUCK, 5);
        // Its share would be four.
        let admission = admit(&slots, OTHER, began + STUCK, true);
        assert!(matches!(admission, Admission::Later), "{admission:?}");
    }

    #[test]
    fn at_the_end_everything_is_denied() {
        let (slots, began) = (Slots::new(1), Instant::now());
        let _only = sit(&slots, HOG, began, 1);
        assert!(matches!(admit(&slots, HOG, began, false), Admission::Later));
        slots.close();
        assert!(matches!(admit(&slots, HOG, began, false), Admission::Denied));
    }

    #[test]
    fn more_images_than_seats() {
        let (slots, began) = (Slots::new(2), Instant::now());
        let _all = [sit(&slots, HOG, began, 1), sit(&slots, OTHER, began, 1)];
        let admission = admit(&slots, THIRD, began + STUCK, true);
        assert!(matches!(admission, Admission::Later), "{admission:?}");
    }
}
