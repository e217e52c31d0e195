//! Events that were read and not answered, in memory that outlives the process.
//!
//! The kernel identifies a delivered event by the number of the descriptor that came with it, and
//! keeps it when the process that read it dies: the reader waits until some process answers with
//! that number. So the journal records what an answer needs, under that number, before the event is
//! handled, and strikes it out after the answer:
//!
//! ```text
//! read ─▶ note ─▶ fetch … ─▶ answer ─▶ strike ─▶ close the descriptor
//! ```
//!
//! If a process dies between `answer` and `strike`, the note has no reader any more, and the kernel
//! refuses the second answer. If it dies between `read` and `note`, a window of microseconds, the
//! event is unknown and gets denied. A denied event is nearly always read-ahead: the kernel then
//! reads the page on its own, which raises a new event.
//!
//! An answer goes to the oldest event with its number. So a successor keeps every recorded number
//! in use until its event is answered, and no new event gets that number.

use std::{
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd},
    sync::atomic::Ordering,
};

use lazuli_sys::{limit::DESCRIPTORS, shared::Shared};
use rustix::io::fcntl_dupfd_cloexec;

/// Numbers per event: device and inode of its file, offset, and count plus one, which is 0 when
/// there is no event.
const FIELDS: usize = 4;

/// Index of the highest number ever noted. It takes the place of event 0, which cannot exist:
/// descriptors 0 to 2 are always in use.
const HIGHEST: usize = 0;

/// Index of the highest limit of descriptors among all processes that wrote here.
const LIMIT: usize = 1;

/// Index of the group whose events are being read. Versions with one group leave it 0, which stands
/// for that group.
const READING: usize = 2;

/// Stands for every group in [`READING`].
const ALL: u64 = u64::MAX;

/// Device and inode: which file an event is about.
pub(super) type FileId = (u64, u64);

/// See the module.
#[derive(Debug)]
pub struct Journal(Shared);

/// An event that an earlier process read and did not answer.
#[derive(Debug)]
pub struct Unanswered {
    pub(super) number: RawFd,
    /// Keeps the number in use. `None` when no new event can get it, because it is above the limit
    /// of this process.
    pub(super) placeholder: Option<OwnedFd>,
    pub(super) file: FileId,
    pub(super) offset: u64,
    pub(super) count: u64,
}

impl Journal {
    /// Makes an empty journal.
    pub fn create() -> io::Result<Self> {
        let journal = Journal(Shared::create("lazuli-journal", DESCRIPTORS as usize * FIELDS)?);
        journal.0[LIMIT].store(lazuli_sys::limit::raise_descriptors()?.into(), Ordering::Release);
        Ok(journal)
    }

    /// All events have lower numbers than this.
    pub(super) fn limit(&self) -> RawFd {
        self.0[LIMIT].load(Ordering::Acquire).min(DESCRIPTORS.into()) as RawFd
    }

    /// Events of the group with this key are read from now on.
    pub(super) fn reads(&self, group: u64) {
        self.0[READING].store(group, Ordering::Release);
    }

    /// Events of all groups are read from now on.
    pub(super) fn reads_all(&self) {
        self.reads(ALL);
    }

    /// Returns whether the previous process may have read an event of the group with this key
    /// without noting it.
    pub(super) fn may_have_read(&self, group: u64) -> bool {
        [group, ALL].contains(&self.0[READING].load(Ordering::Acquire))
    }

    /// Opens the journal of a dead process, and returns the events that it left unanswered. Call it
    /// before this process opens anything, since the numbers of those events have to be free.
    /// Returns at most `most` events; all others are forgotten.
    pub fn open(file: OwnedFd, most: usize) -> io::Result<(Self, Vec<Unanswered>)> {
        let limit = RawFd::try_from(lazuli_sys::limit::raise_descriptors()?).unwrap_or(RawFd::MAX);
        let journal = Journal(Shared::open(file, DESCRIPTORS as usize * FIELDS)?);
        journal.0[LIMIT].fetch_max(limit.unsigned_abs().into(), Ordering::AcqRel);
        let highest = journal.0[HIGHEST].load(Ordering::Acquire).min(DESCRIPTORS.into());
        let noted: Vec<_> =
            (1..=highest as RawFd).filter(|n| journal.noted(*n).is_some()).collect();
        // Out of the way of all of them.
        let free = (0..limit).rfind(|number| noted.binary_search(number).is_err()).unwrap_or(0);
        let moved = fcntl_dupfd_cloexec(&journal.0, free)?;
        drop(journal);
        let journal = Journal(Shared::open(moved, DESCRIPTORS as usize * FIELDS)?);
        let mut left = Vec::new();
        for number in noted {
            let Some((file, offset, count)) = journal.noted(number) else { continue };
            let placeholder = match number < limit {
                // The lowest number that is free and not below this one: this one.
                true => Some(fcntl_dupfd_cloexec(&journal.0, number)?),
                false => None,
            };
            let reserved = placeholder.as_ref().is_none_or(|fd| fd.as_raw_fd() == number);
            if reserved && left.len() < most {
                left.push(Unanswered { number, placeholder, file, offset, count });
            } else {
                tracing::error!(number, reserved, "an unanswered event will be denied");
                journal.strike(number);
            }
        }
        Ok((journal, left))
    }

    fn noted(&self, number: RawFd) -> Option<(FileId, u64, u64)> {
        let at = slot(number)?;
        let read = |field: usize| self.0[at + field].load(Ordering::Relaxed);
        let count = self.0[at + 3].load(Ordering::Acquire).checked_sub(1)?;
        Some(((read(0), read(1)), read(2), count))
    }

    /// Records the range of event `number`. The process may die after any of these stores: only the
    /// last one makes the record valid.
    pub(super) fn note(&self, number: RawFd, file: FileId, offset: u64, count: u64) {
        let Some(at) = slot(number) else { return };
        self.0[HIGHEST].fetch_max(number.unsigned_abs().into(), Ordering::Relaxed);
        for (field, value) in [file.0, file.1, offset].into_iter().enumerate() {
            self.0[at + field].store(value, Ordering::Relaxed);
        }
        self.0[at + 3].store(count.saturating_add(1), Ordering::Release);
    }

    /// Forgets an event that was answered.
    pub(super) fn strike(&self, number: RawFd) {
        if let Some(at) = slot(number) {
            self.0[at + 3].store(0, Ordering::Release);
        }
    }
}

/// Returns the place of an event's fields. No process has numbers above the limit.
fn slot(number: RawFd) -> Option<usize> {
    let number = usize::try_from(number).ok()?;
    (1..DESCRIPTORS as usize).contains(&number).then_some(number * FIELDS)
}

impl AsFd for Journal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_finds_unanswered_requests() {
        let journal = Journal::create().unwrap();
        // Numbers that nothing in this test process has.
        for number in [900, 901, 950, 999] {
            journal.note(number, (1, u64::from(number.unsigned_abs())), 4096, 0);
        }
        journal.strike(901);
        journal.note(950, (7, 8), 1 << 40, 1 << 20);
        let copy = journal.as_fd().try_clone_to_owned().unwrap();
        let (again, left) = Journal::open(copy, 100).unwrap();
        let found: Vec<_> = left.iter().map(|e| (e.number, e.file, e.offset, e.count)).collect();
        let expected =
            [(900, (1, 900), 4096, 0), (950, (7, 8), 1 << 40, 1 << 20), (999, (1, 999), 4096, 0)];
        assert_eq!(found, expected);
        // The numbers stay taken: a new event cannot get them.
        assert!(fcntl_dupfd_cloexec(&again, 950).unwrap().as_raw_fd() > 950);
        again.strike(900);
        assert_eq!(journal.noted(900), None);
    }

    #[test]
    fn a_successor_with_fewer_descriptors_answers_all_the_same() {
        let journal = Journal::create().unwrap();
        let above = lazuli_sys::limit::raise_descriptors().unwrap() as RawFd + 7;
        let numbers = if above < DESCRIPTORS as RawFd { vec![950, above] } else { vec![950] };
        numbers.iter().for_each(|number| journal.note(*number, (1, 2), 0, 1));
        let copy = || journal.as_fd().try_clone_to_owned().unwrap();
        let (_, left) = Journal::open(copy(), 100).unwrap();
        assert_eq!(left.iter().map(|event| event.number).collect::<Vec<_>>(), numbers);
        drop(left);
        // An event that cannot be answered is not kept, so that it is denied.
        assert_eq!(Journal::open(copy(), 0).unwrap().1.len(), 0);
        assert_eq!(journal.noted(950), None);
    }

    #[test]
    fn events_that_were_not_noted_are_of_the_group_that_was_read() {
        let journal = Journal::create().unwrap();
        assert!(journal.may_have_read(0) && !journal.may_have_read(7));
        journal.reads(7);
        assert!(journal.may_have_read(7) && !journal.may_have_read(0));
        journal.reads_all();
        assert!(journal.may_have_read(7) && journal.may_have_read(0));
    }

    #[test]
    fn numbers_out_of_range_are_ignored() {
        let journal = Journal::create().unwrap();
        for number in [-1, 0, DESCRIPTORS as RawFd, RawFd::MAX] {
            journal.note(number, (1, 2), 3, 4);
            assert_eq!(journal.noted(number), None);
            journal.strike(number);
        }
    }
}
