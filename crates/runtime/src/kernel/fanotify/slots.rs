//! Slots for waiting readers, shared out by image.
//!
//! Each event that waits for data holds a descriptor, and the kernel denies an event for which
//! there is none. So a process lets some number of events wait, its slots, and leaves the others in
//! the kernel's queues. Images share the slots out:
//!
//! ```text
//! the image has less than its share   it waits in a slot; if none is free, an image that is stuck
//!                                     loses its oldest one
//! it has its share                    it waits in a slot; an eighth of the slots is reserved for
//!                                     other images
//!   … and no slot is free             its queue waits
//!   … its queue is also that of others, and it is stuck
//!                                     denied (EIO)
//! ```
//!
//! The share is the slots divided by the images that have any, and seven eighths for a single one.
//! An image is stuck when as many of its events as its share have waited for [`STUCK`]. A single
//! image, and images whose data arrives, are never denied anything.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use tokio::task::AbortHandle;

use crate::{sharing::Account, sync::lock};

/// Maximum wait for a slot. Well above the time of an answer on a busy machine, and well below the
/// deadline of a read.
const STUCK: Duration = Duration::from_secs(5);

/// One in this many slots is kept for images with less than their share.
const RESERVE: usize = 8;

/// The decision about an event.
#[derive(Debug)]
pub(super) enum Admission {
    /// It may wait for its data.
    Slot(Slot),
    /// Try again in a moment.
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

    /// Asks for a slot for an event that an earlier process has read: it cannot be left in the
    /// kernel's queue.
    pub(super) fn admit_left(self: &Arc<Self>, account: Account, now: Instant) -> Admission {
        let mut table = self.lock();
        match table.is_closed || table.taken >= self.limit {
            true => Admission::Denied,
            false => Admission::Slot(self.take(&mut table, account, now)),
        }
    }

    /// Asks for a slot. `others` tells whether readers of other images queue behind this one.
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
        let own = table.accounts.get(&account).map_or(0, BTreeMap::len);
        let active = table.accounts.len() + usize::from(own == 0);
        let reserve = self.limit / RESERVE;
        let share = (self.limit / active).min(self.limit - reserve).max(1);
        let free = self.limit.saturating_sub(table.taken);
        let may_take = match own < share {
            true => free > 0 || table.take_from_stuck(share, now),
            false => free > reserve,
        };
        if may_take {
            return Admission::Slot(self.take(&mut table, account, now));
        }
        let is_stuck = own >= share && table.is_stuck(&account, share, now);
        if is_stuck && others() { Admission::Denied } else { Admission::Later }
    }

    fn take(self: &Arc<Self>, table: &mut Table, account: Account, now: Instant) -> Slot {
        let number = table.next;
        table.next += 1;
        table.taken += 1;
        let waiting = Waiting { since: now, task: None };
        table.accounts.entry(account).or_default().insert(number, waiting);
        Slot { slots: self.clone(), account, number }
    }

    /// Denies everything from now on. At the end of a daemon, readers get errors in any case, and
    /// an event that waits for a slot would block the events that truncating files causes.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }
}

impl Table {
    fn is_stuck(&self, account: &Account, share: usize, now: Instant) -> bool {
        let slots = self.accounts.get(account);
        let last = slots.and_then(|slots| slots.values().nth(share - 1));
        last.is_some_and(|last| now.duration_since(last.since) >= STUCK)
    }

    /// Takes the oldest slot from the account that has most, of those that are stuck with more than
    /// their share.
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
    /// A handle through which others can take the slot away.
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
    use lazuli_image::Digest;

    use super::*;

    const HOG: Account = Account::Image(Digest::sha256([1; 32]));
    const OTHER: Account = Account::Image(Digest::sha256([2; 32]));
    const THIRD: Account = Account::Shared(Digest::sha256([3; 32]));

    fn admit(slots: &Arc<Slots>, account: Account, now: Instant, others: bool) -> Admission {
        slots.admit(account, now, || others)
    }

    fn wait(slots: &Arc<Slots>, account: Account, now: Instant, count: usize) -> Vec<Slot> {
        let wait = |_| match admit(slots, account, now, true) {
            Admission::Slot(slot) => slot,
            other => panic!("{other:?}"),
        };
        (0..count).map(wait).collect()
    }

    #[test]
    fn a_single_image_leaves_an_eighth_and_is_denied_nothing() {
        let (slots, began) = (Slots::new(16), Instant::now());
        let mut waiting = wait(&slots, HOG, began, 14);
        for later in [Duration::ZERO, 10 * STUCK] {
            let admission = admit(&slots, HOG, began + later, false);
            assert!(matches!(admission, Admission::Later), "{admission:?}");
        }
        waiting.pop();
        assert!(matches!(admit(&slots, HOG, began, false), Admission::Slot(_)));
    }

    #[test]
    fn an_image_that_comes_later_finds_slots_at_once() {
        let (slots, began) = (Slots::new(16), Instant::now());
        let _hog = wait(&slots, HOG, began, 14);
        let _other = wait(&slots, OTHER, began, 2);
        // Below its share, but nothing is free, and no image is stuck yet.
        let admission = admit(&slots, OTHER, began + STUCK / 2, true);
        assert!(matches!(admission, Admission::Later), "{admission:?}");
    }

    #[test]
    fn images_whose_data_arrives_wait_for_each_other() {
        let (slots, began) = (Slots::new(8), Instant::now());
        let _waiting = [wait(&slots, HOG, began, 6), wait(&slots, OTHER, began, 2)];
        let soon = began + STUCK / 2;
        for account in [HOG, OTHER, THIRD] {
            let admission = admit(&slots, account, soon, true);
            assert!(matches!(admission, Admission::Later), "{account:?}: {admission:?}");
        }
    }

    #[tokio::test]
    async fn an_image_that_is_stuck_makes_room() {
        let (slots, began) = (Slots::new(8), Instant::now());
        let stuck = wait(&slots, HOG, began, 7);
        let first = tokio::spawn(std::future::pending::<()>());
        stuck[0].holder().is(first.abort_handle());
        let later = began + STUCK;
        assert!(matches!(admit(&slots, HOG, later, true), Admission::Denied));
        // Half of the slots are its share by now.
        let others = wait(&slots, OTHER, later, 4);
        assert!(first.await.unwrap_err().is_cancelled(), "the oldest goes first");
        let admission = admit(&slots, OTHER, later, true);
        assert!(matches!(admission, Admission::Later), "{admission:?}");
        // A slot that was taken away is not released twice.
        drop((stuck, others));
        let table = slots.lock();
        assert!(table.taken == 0 && table.accounts.is_empty(), "{table:?}");
    }

    #[test]
    fn slots_that_were_just_taken_are_kept() {
        let (slots, began) = (Slots::new(8), Instant::now());
        let _old = wait(&slots, HOG, began, 3);
        let _young = wait(&slots, HOG, began + STUCK, 4);
        let _reserve = wait(&slots, THIRD, began + STUCK, 1);
        // Its share would be two, and the image has had two for long, but they are not above the
        // share.
        let admission = admit(&slots, OTHER, began + STUCK / 2, true);
        assert!(matches!(admission, Admission::Later), "{admission:?}");
    }

    #[test]
    fn at_the_end_everything_is_denied() {
        let (slots, began) = (Slots::new(1), Instant::now());
        let _only = wait(&slots, HOG, began, 1);
        assert!(matches!(admit(&slots, HOG, began, false), Admission::Later));
        slots.close();
        assert!(matches!(admit(&slots, HOG, began, false), Admission::Denied));
        assert!(matches!(slots.admit_left(OTHER, began), Admission::Denied));
    }

    #[test]
    fn events_of_an_earlier_process_take_what_is_free() {
        let (slots, began) = (Slots::new(8), Instant::now());
        let left: Vec<_> = (0..8).map(|_| slots.admit_left(HOG, began)).collect();
        assert!(left.iter().all(|admission| matches!(admission, Admission::Slot(_))));
        assert!(matches!(slots.admit_left(HOG, began), Admission::Denied));
    }

    #[test]
    fn an_image_waits_when_others_hold_all_slots() {
        let (slots, began) = (Slots::new(2), Instant::now());
        let _all = [wait(&slots, HOG, began, 1), wait(&slots, OTHER, began, 1)];
        let admission = admit(&slots, THIRD, began + STUCK, true);
        assert!(matches!(admission, Admission::Later), "{admission:?}");
    }
}
