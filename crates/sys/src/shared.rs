//! Memory that outlives a process.

use std::{
    fs::File,
    io,
    ops::{Deref, Range},
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::AtomicU64,
};

use rustix::{
    fs::{
        FallocateFlags, MemfdFlags, SealFlags, SeekFrom, fallocate, fcntl_add_seals,
        fcntl_get_seals, memfd_create, seek,
    },
    mm::{MapFlags, MlockFlags, ProtFlags},
};

/// Numbers in memory shared by all processes that have the descriptor. A value that a process has
/// stored survives the process, however it ends. Untouched pages take no memory.
#[derive(Debug)]
pub struct Shared {
    file: OwnedFd,
    start: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: needed because raw pointers are not Send. Sound because the mapping belongs to the
// process and not to a thread.
unsafe impl Send for Shared {}
// SAFETY: needed because raw pointers are not Sync. Sound because everything behind the pointer is
// atomic.
unsafe impl Sync for Shared {}

impl Shared {
    /// Memory for `count` numbers, all 0. `name` shows up in /proc.
    pub fn create(name: &str, count: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create(name, flags)?;
        rustix::fs::ftruncate(&file, (count * size_of::<AtomicU64>()) as u64)?;
        // A mapping behind the end of its file kills a process that touches it.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL)?;
        Self::open(file, count)
    }

    /// Memory that another process made with the same `count`. Anything else is
    /// [`io::ErrorKind::InvalidData`].
    pub fn open(file: OwnedFd, count: usize) -> io::Result<Self> {
        let len = count * size_of::<AtomicU64>();
        let file = File::from(file);
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if count == 0 || file.metadata()?.len() != len as u64 || !sealed {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: needed because mapping memory cannot be checked by the compiler. Sound because
        // the kernel chooses the address, so nothing of ours is replaced, and the mapping outlives
        // the descriptor.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, &file, 0)? };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at null"))?;
        Ok(Shared { file: file.into(), start, count })
    }

    /// Reads from `source` into the numbers of `range`, and the excess into `rest`, like readv(2).
    /// Returns the number of bytes read.
    ///
    /// # Panics
    /// When `range` is outside.
    pub fn read(
        &self,
        source: BorrowedFd<'_>,
        range: Range<usize>,
        rest: &mut [u8],
    ) -> io::Result<usize> {
        let numbers = &self[range];
        let parts = [
            libc::iovec {
                iov_base: numbers.as_ptr().cast_mut().cast(),
                iov_len: size_of_val(numbers),
            },
            libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() },
        ];
        // SAFETY: needed because the kernel writes to memory that may change at any time, of which
        // there is no `&mut`. Sound because both parts are as long as said and outlive the call,
        // atomics may be written behind a shared reference, and every bit pattern is a number.
        let read = unsafe { libc::readv(source.as_raw_fd(), parts.as_ptr(), 2) };
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
    }

    /// Locks each page into memory from its first use, so that access never waits for swap. The
    /// kernel may refuse this to users other than root.
    pub fn lock(&self) -> io::Result<()> {
        let len = self.count * size_of::<AtomicU64>();
        // SAFETY: needed because the kernel is told about an address. Sound because `open` mapped
        // exactly this range, and locking changes no bytes.
        unsafe { rustix::mm::mlock_with(self.start.as_ptr().cast(), len, MlockFlags::ONFAULT)? };
        Ok(())
    }

    /// Returns the index of a number at or after `from` before which all are 0. Asks the kernel for
    /// the first allocated page, because reading an untouched page allocates it.
    pub fn first_used(&self, from: usize) -> Option<usize> {
        let from = SeekFrom::Data((from * size_of::<AtomicU64>()) as u64);
        // Fails with ENXIO if no page from there on is allocated.
        let at = usize::try_from(seek(&self.file, from).ok()?).ok()?;
        Some(at / size_of::<AtomicU64>())
    }

    /// Sets the numbers of `range` to 0 and gives the memory of whole pages back.
    pub fn forget(&self, range: Range<usize>) -> io::Result<()> {
        let at = |index: usize| (index * size_of::<AtomicU64>()) as u64;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, flags, at(range.start), at(range.len()))?)
    }
}

impl Deref for Shared {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: needed to see mapped memory as a slice. Sound because `start` is the page-aligned
        // begin of a mapping of `count` numbers that lives as long as `self`, its file cannot
        // shrink (sealed), every bit pattern is a number, and other processes that map it write
        // through atomics as well.
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
        // SAFETY: needed to give the memory back. Sound because `open` mapped exactly this range,
        // and slices of it borrow from `self`, so none is left.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), len) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn a_stored_value_is_seen_through_another_mapping_after_the_first_is_gone() {
        let one = Shared::create("test", 1000).unwrap();
        let two = Shared::open(one.as_fd().try_clone_to_owned().unwrap(), 1000).unwrap();
        assert!(two.iter().all(|number| number.load(Ordering::Relaxed) == 0));
        one[999].store(7, Ordering::Release);
        drop(one);
        assert_eq!(two[999].load(Ordering::Acquire), 7);
    }

    #[test]
    fn bytes_read_are_seen_through_another_mapping_until_they_are_forgotten() {
        let one = Shared::create("test", 2048).unwrap();
        let two = Shared::open(one.as_fd().try_clone_to_owned().unwrap(), 2048).unwrap();
        one.lock().unwrap();
        assert_eq!(one.first_used(0), None);
        let message: Vec<u8> = (0..100).collect();
        let (source, sender) = io::pipe().unwrap();
        rustix::io::write(&sender, &message).unwrap();
        let mut rest = [0; 50];
        // A page is 512 numbers, or more.
        let used = |from: usize| two.first_used(from).map(|first| (512..=1024).contains(&first));
        assert_eq!(one.read(source.as_fd(), 1024..1032, &mut rest).unwrap(), 100);
        let numbers = two[1024..1032].iter().map(|number| number.load(Ordering::Acquire));
        assert_eq!(numbers.flat_map(u64::to_ne_bytes).collect::<Vec<_>>(), message[..64]);
        assert_eq!(rest[..36], message[64..]);
        assert_eq!(used(0), Some(true));
        assert!(two[..1024].iter().chain(&two[1032..]).all(|n| n.load(Ordering::Acquire) == 0));
        one.forget(0..2048).unwrap();
        assert_eq!(used(0), None);
        assert!(two.iter().all(|number| number.load(Ordering::Acquire) == 0));
        drop(source);
        let failed = one.read(sender.as_fd(), 0..1, &mut []).unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn files_that_could_be_truncated_are_refused() {
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
