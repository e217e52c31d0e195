//! Memory that outlives a process.

use std::{
    fs::File,
    io,
    ops::Deref,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::AtomicU64,
};

use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create},
    mm::{MapFlags, ProtFlags},
};

/// Numbers in memory that every process sees which has the descriptor. What one process has stored is there
/// for the others, whenever and however it ends. Pages that nobody touched take no memory.
#[derive(Debug)]
pub struct Shared {
    file: OwnedFd,
    start: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: needed because raw pointers are not Send. Sound because the mapping belongs to the process and not
// to a thread.
unsafe impl Send for Shared {}
// SAFETY: needed because raw pointers are not Sync. Sound because everything behind the pointer is atomic.
unsafe impl Sync for Shared {}

impl Shared {
    /// Memory for `count` numbers, all 0. `name` shows up in /proc.
    pub fn create(name: &str, count: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create(name, flags)?;
        rustix::fs::ftruncate(&file, (count * size_of::<AtomicU64>()) as u64)?;
        // A mapping behind the end of its file kills who touches it.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL)?;
        Self::open(file, count)
    }

    /// Memory that another process made with the same `count`. Anything else is [`io::ErrorKind::InvalidData`].
    pub fn open(file: OwnedFd, count: usize) -> io::Result<Self> {
        let len = count * size_of::<AtomicU64>();
        let file = File::from(file);
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if count == 0 || file.metadata()?.len() != len as u64 || !sealed {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: needed because mapping memory cannot be checked by the compiler. Sound because the kernel
        // chooses the address, so nothing of ours is replaced, and the mapping outlives the descriptor.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, &file, 0)? };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at null"))?;
        Ok(Shared { file: file.into(), start, count })
    }
}

impl Deref for Shared {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: needed to see mapped memory as a slice. Sound because `start` is the page-aligned begin of a
        // mapping of `count` numbers that lives as long as `self`, its file cannot shrink (sealed), every bit
        // pattern is a number, and whoever else has it mapped writes through atomics as well.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

impl AsFd for Shared {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let len = self.count * size_of::<AtomicU64>();
        // SAFETY: needed to give the memory back. Sound because `open` mapped exactly this range, and slices of
        // it borrow from `self`, so none is left.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), len) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn two_mappings_are_the_same_memory() {
        let one = Shared::create("test", 1000).unwrap();
        let two = Shared::open(one.as_fd().try_clone_to_owned().unwrap(), 1000).unwrap();
        assert!(two.iter().all(|number| number.load(Ordering::Relaxed) == 0));
        one[999].store(7, Ordering::Release);
        drop(one);
        assert_eq!(two[999].load(Ordering::Acquire), 7);
    }

    #[test]
    fn refuses_what_could_vanish_under_it() {
        let shared = Shared::create("test", 1000).unwrap();
        let file = || shared.as_fd().try_clone_to_owned().unwrap();
        for count in [0, 999, 1001] {
            assert!(Shared::open(file(), count).is_err(), "{count}");
        }
        assert!(rustix::fs::ftruncate(file(), 0).is_err());
        let unsealed = tempfile::tempfile().unwrap();
        unsealed.set_len(8000).unwrap();
        assert!(Shared::open(unsealed.into(), 1000).is_err());
    }
}
