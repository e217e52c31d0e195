//! Requests that were read and not answered, in memory that outlives the process.
//!
//! The kernel sends a request once. When the process that read it dies, the reader that caused it
//! waits until the kernel gets an answer over the same connection, which the keeper holds, from any
//! process. So every thread reads requests into a slot of memory that the keeper holds as well:
//!
//! ```text
//! empty the slot ─▶ read into it ─▶ ensure … ─▶ answer ─▶ empty the slot
//! ```
//!
//! `read` does all of its work in the kernel: either the request is still in the kernel's queue, or
//! all of it is in the slot. There is no instant at which a process that dies takes a request with
//! it. A successor answers what is in the slots, and reads on. A process that dies between the
//! answer and the emptying leaves a request that is answered twice: the kernel refuses the second
//! answer, since it gives each number to one request only.

use std::{
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, atomic::Ordering},
};

use lazuli_sys::shared::Shared;
use tracing::debug;

/// The number of requests in a journal, and their maximum size. A driver never changes its own: the
/// next version has to find the slots of this one.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel) struct Shape {
    /// Maximum number of requests in progress.
    pub(in crate::kernel) slots: usize,
    /// Bytes of a slot, a multiple of 8. Longer requests are truncated.
    pub(in crate::kernel) size: usize,
}

impl Shape {
    /// Numbers in a slot.
    const fn numbers(self) -> usize {
        self.size / size_of::<u64>()
    }
}

/// Place of the request's number in its slot: after 4 bytes of length and 4 of opcode, see `struct
/// fuse_in_header`.
const UNIQUE: usize = 1;

/// See the module.
#[derive(Debug)]
pub(in crate::kernel) struct Journal {
    memory: Shared,
    shape: Shape,
    taken: Mutex<Vec<bool>>,
    /// Told when a slot is free again.
    freed: Condvar,
}

impl Journal {
    /// An empty one.
    pub(in crate::kernel) fn create(shape: Shape) -> io::Result<Arc<Self>> {
        Ok(Self::new(Shared::create("lazuli-fuse", shape.slots * shape.numbers())?, shape))
    }

    /// Opens the journal of a dead process, with the requests that it left.
    pub(in crate::kernel) fn open(
        file: OwnedFd,
        shape: Shape,
    ) -> io::Result<(Arc<Self>, Vec<Slot>)> {
        let numbers = shape.numbers();
        let journal = Self::new(Shared::open(file, shape.slots * numbers)?, shape);
        let (mut left, mut next) = (Vec::new(), 0);
        while next < shape.slots
            && let Some(number) = journal.memory.first_used(next * numbers)
        {
            let index = number / numbers;
            journal.taken()[index] = true;
            let slot = Slot { journal: journal.clone(), index, is_left: true };
            if !slot.is_empty() {
                left.push(slot);
            }
            next = index + 1;
        }
        Ok((journal, left))
    }

    fn new(memory: Shared, shape: Shape) -> Arc<Self> {
        // The kernel does not bring a page back from the disk for a process that is being killed:
        // it would fail the request. Where this is refused that is a matter of microseconds, on a
        // machine that swaps.
        if let Err(error) = memory.lock() {
            debug!("the journal may be swapped out: {error}");
        }
        let taken = Mutex::new(vec![false; shape.slots]);
        Arc::new(Journal { memory, shape, taken, freed: Condvar::new() })
    }

    /// Takes a free slot; `None` if there is none.
    pub(in crate::kernel) fn take(self: &Arc<Self>) -> Option<Slot> {
        self.take_free(&mut self.taken())
    }

    /// Waits for a free slot.
    pub(in crate::kernel) fn wait_for_slot(self: &Arc<Self>) -> Slot {
        let mut taken = self.taken();
        loop {
            if let Some(slot) = self.take_free(&mut taken) {
                return slot;
            }
            taken = self.freed.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn take_free(self: &Arc<Self>, taken: &mut [bool]) -> Option<Slot> {
        let index = taken.iter().position(|taken| !taken)?;
        taken[index] = true;
        Some(Slot { journal: self.clone(), index, is_left: false })
    }

    fn taken(&self) -> MutexGuard<'_, Vec<bool>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Journal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// Memory for one request. A slot that holds a request when it is dropped stays taken, for the next
/// process.
#[derive(Debug)]
pub(in crate::kernel) struct Slot {
    journal: Arc<Journal>,
    index: usize,
    /// Whether an earlier process left the request.
    is_left: bool,
}

impl Slot {
    fn range(&self) -> Range<usize> {
        let numbers = self.journal.shape.numbers();
        self.index * numbers..(self.index + 1) * numbers
    }

    /// Returns whether the slot holds no request.
    pub(in crate::kernel) fn is_empty(&self) -> bool {
        self.journal.memory[self.range().start + UNIQUE].load(Ordering::Acquire) == 0
    }

    /// Forgets a request that was answered.
    pub(in crate::kernel) fn empty(&self) {
        self.journal.memory[self.range().start + UNIQUE].store(0, Ordering::Release);
    }

    /// Returns whether an earlier process left the request; true at most once.
    pub(in crate::kernel) fn take_left(&mut self) -> bool {
        std::mem::take(&mut self.is_left)
    }

    /// Waits for a request, and returns its length. `rest` gets the excess over a slot: the kernel
    /// insists on a buffer for the longest request, written data included, before it returns any.
    pub(in crate::kernel) fn read(
        &self,
        device: BorrowedFd<'_>,
        rest: &mut [u8],
    ) -> io::Result<usize> {
        // Also makes the page be there.
        self.empty();
        self.journal.memory.read(device, self.range(), rest)
    }

    /// The request.
    pub(in crate::kernel) fn request(&self) -> Vec<u8> {
        let numbers = &self.journal.memory[self.range()];
        // The length is the first field.
        let [a, b, c, d, ..] = numbers[0].load(Ordering::Acquire).to_ne_bytes();
        let len = (u32::from_ne_bytes([a, b, c, d]) as usize).min(self.journal.shape.size);
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
        self.journal.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    const SLOTS: usize = 256;
    const SLOT: usize = 8192;
    const SHAPE: Shape = Shape { slots: SLOTS, size: SLOT };

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
        Journal::open(journal.as_fd().try_clone_to_owned().unwrap(), SHAPE).unwrap()
    }

    #[test]
    fn a_successor_finds_unanswered_events() {
        let journal = Journal::create(SHAPE).unwrap();
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
        let journal = Journal::create(SHAPE).unwrap();
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
        assert_eq!(Journal::open(other, SHAPE).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    /// Several of these share a page.
    #[test]
    fn small_slots_are_told_apart() {
        let shape = Shape { slots: 32, size: 512 };
        let journal = Journal::create(shape).unwrap();
        let slots: Vec<_> = std::iter::from_fn(|| journal.take()).collect();
        assert_eq!(slots.len(), 32);
        for (index, slot) in slots.iter().enumerate() {
            read(slot, &request(1 + index as u64, 80));
        }
        slots.iter().step_by(2).for_each(Slot::empty);
        drop(slots);
        let file = journal.as_fd().try_clone_to_owned().unwrap();
        let (again, left) = Journal::open(file, shape).unwrap();
        let found: Vec<_> = left.iter().map(|slot| (slot.index, slot.request())).collect();
        let odd = (1..32).step_by(2).map(|index| (index, request(1 + index as u64, 80)));
        assert_eq!(found, odd.collect::<Vec<_>>());
        assert_eq!(again.take().unwrap().index, 0);
    }

    #[test]
    fn a_slot_is_waited_for() {
        let shape = Shape { slots: 1, size: 512 };
        let journal = Journal::create(shape).unwrap();
        let only = journal.take().unwrap();
        let waiting = journal.clone();
        let waiter = std::thread::spawn(move || waiting.wait_for_slot().index);
        assert!(journal.take().is_none());
        drop(only);
        assert_eq!(waiter.join().unwrap(), 0);
    }
}
