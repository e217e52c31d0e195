//! Requests that were read and not answered, in memory that outlives the process.
//!
//! The kernel sends a request once. When the process that read it dies, the reader who caused it waits until the
//! kernel gets an answer over the same connection, which the keeper holds, from whoever gives it. So every thread reads requests
//! into a slot of memory that the keeper holds as well:
//!
//! ```text
//! empty the slot ─▶ read into it ─▶ ensure … ─▶ answer ─▶ empty the slot
//! ```
//!
//! `read` does all of its work in the kernel: either the request is still in the kernel's queue, or all of it is in the slot.
//! There is no instant at which a process that dies takes a request with it. A successor answers what is in the slots, and
//! reads on. A process that dies between the answer and the emptying leaves a request that is answered twice: the kernel
//! refuses the second answer, since it gives each number to one request only.

use std::{
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
};

use lazuli_sys::shared::Shared;
use tracing::debug;

/// Threads of one session that read requests. A read of missing data holds its thread until the data is there, so this is
/// how many reads can wait at once before other requests wait for them; one that waits costs some 50 KiB. Never changed:
/// the next version has to find the slots of this one.
pub(super) const SLOTS: usize = 256;

/// Bytes of a slot. Of what is sent for a file system that cannot be written to, only the kernel's list of forgotten nodes
/// is longer, which needs no answer. Never changed.
pub(super) const SLOT: usize = 8192;

const NUMBERS: usize = SLOT / size_of::<u64>();

/// Where the number of the request is in its slot: after 4 bytes of length and 4 of opcode, see `struct fuse_in_header`.
const UNIQUE: usize = 1;

/// See the module.
#[derive(Debug)]
pub(super) struct Journal {
    memory: Shared,
    taken: Mutex<[bool; SLOTS]>,
}

impl Journal {
    /// An empty one.
    pub(super) fn create() -> io::Result<Arc<Self>> {
        Ok(Self::new(Shared::create("lazuli-fuse", SLOTS * NUMBERS)?))
    }

    /// The journal of a process that is gone, and what it left.
    pub(super) fn open(file: OwnedFd) -> io::Result<(Arc<Self>, Vec<Slot>)> {
        let journal = Self::new(Shared::open(file, SLOTS * NUMBERS)?);
        let (mut left, mut next) = (Vec::new(), 0);
        while let Some(number) = journal.memory.first_used(next * NUMBERS) {
            let index = number / NUMBERS;
            journal.taken()[index] = true;
            let slot = Slot { journal: journal.clone(), index };
            if !slot.is_empty() {
                left.push(slot);
            }
            next = index + 1;
        }
        Ok((journal, left))
    }

    fn new(memory: Shared) -> Arc<Self> {
        // The kernel does not bring a page back from the disk for a process that is being killed: it would fail the
        // request. Where this is refused that is a matter of microseconds, on a machine that swaps.
        if let Err(error) = memory.lock() {
            debug!("the journal may be swapped out: {error}");
        }
        Arc::new(Journal { memory, taken: Mutex::new([false; SLOTS]) })
    }

    /// A slot that nobody has; `None` when there is none.
    pub(super) fn take(self: &Arc<Self>) -> Option<Slot> {
        let mut taken = self.taken();
        let index = taken.iter().position(|taken| !taken)?;
        taken[index] = true;
        Some(Slot { journal: self.clone(), index })
    }

    fn taken(&self) -> MutexGuard<'_, [bool; SLOTS]> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Journal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// Room for one request. One that still has a request when it is dropped stays taken, for the next process.
#[derive(Debug)]
pub(super) struct Slot {
    journal: Arc<Journal>,
    index: usize,
}

impl Slot {
    fn range(&self) -> Range<usize> {
        self.index * NUMBERS..(self.index + 1) * NUMBERS
    }

    /// Whether there is no request in it.
    pub(super) fn is_empty(&self) -> bool {
        self.journal.memory[self.range().start + UNIQUE].load(Ordering::Acquire) == 0
    }

    /// Forgets a request that was answered.
    pub(super) fn empty(&self) {
        self.journal.memory[self.range().start + UNIQUE].store(0, Ordering::Release);
    }

    /// Waits for a request, and returns its length. `rest` gets what is longer than a slot: the kernel
    /// insists on room for the longest request, written data included, before it gives out any.
    pub(super) fn read(&self, device: BorrowedFd<'_>, rest: &mut [u8]) -> io::Result<usize> {
        // Also makes the page be there.
        self.empty();
        self.journal.memory.read(device, self.range(), rest)
    }

    /// The request.
    pub(super) fn request(&self) -> Vec<u8> {
        let numbers = &self.journal.memory[self.range()];
        // The length comes first.
        let [a, b, c, d, ..] = numbers[0].load(Ordering::Acquire).to_ne_bytes();
        let len = (u32::from_ne_bytes([a, b, c, d]) as usize).min(SLOT);
        let used = &numbers[..len.div_ceil(size_of::<u64>())];
        let bytes = used.iter().flat_map(|number| number.load(Ordering::Relaxed).to_ne_bytes());
        bytes.take(len).collect()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if !self.is_empty() {
            return;
        }
        if let Err(error) = self.journal.memory.forget(self.range()) {
            debug!("a slot keeps its memory: {error}");
        }
        self.journal.taken()[self.index] = false;
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// A request of `len` bytes as the kernel would write it.
    fn request(unique: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![7; len];
        bytes[..4].copy_from_slice(&(len as u32).to_ne_bytes());
        bytes[8..16].copy_from_slice(&unique.to_ne_bytes());
        bytes
    }

    fn read(slot: &Slot, bytes: &[u8]) {
        let (source, mut sender) = io::pipe().unwrap();
        sender.write_all(bytes).unwrap();
        assert_eq!(slot.read(source.as_fd(), &mut [0; 4096]).unwrap(), bytes.len());
    }

    fn successor(journal: &Journal) -> (Arc<Journal>, Vec<Slot>) {
        Journal::open(journal.as_fd().try_clone_to_owned().unwrap()).unwrap()
    }

    #[test]
    fn a_successor_finds_what_was_read_and_not_answered() {
        let journal = Journal::create().unwrap();
        let slots: Vec<_> = std::iter::from_fn(|| journal.take()).collect();
        assert_eq!(slots.len(), SLOTS);
        let sizes = [40, 41, 48, SLOT, SLOT + 16];
        for (slot, len) in slots.iter().zip(sizes) {
            read(slot, &request(100 + len as u64, len));
        }
        slots[2].empty();
        let (_, left) = successor(&journal);
        let found: Vec<_> = left.iter().map(|slot| (slot.index, slot.request())).collect();
        let expected = |index: usize, len: usize| {
            (index, request(100 + len as u64, len)[..len.min(SLOT)].to_vec())
        };
        assert_eq!(
            found,
            [expected(0, 40), expected(1, 41), expected(3, SLOT), expected(4, SLOT + 16)]
        );
    }

    #[test]
    fn a_slot_is_free_again_only_when_its_request_was_answered() {
        let journal = Journal::create().unwrap();
        let slot = journal.take().unwrap();
        read(&slot, &request(1, 40));
        drop(slot);
        let other = journal.take().unwrap();
        assert_eq!(other.index, 1);
        let (again, left) = successor(&journal);
        assert_eq!(left.len(), 1);
        assert_eq!(again.take().unwrap().index, 1);
        left.iter().for_each(Slot::empty);
        drop(left);
        assert_eq!(again.take().unwrap().index, 0);
        assert_eq!(successor(&journal).1.len(), 0);
    }

    #[test]
    fn refuses_memory_that_is_no_journal() {
        let other = Shared::create("test", 1000).unwrap();
        let other = other.as_fd().try_clone_to_owned().unwrap();
        assert_eq!(Journal::open(other).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
