//! Read-only view of a file.

use std::{fs::File, io, ops::Deref, ptr::NonNull};

use rustix::mm::{MapFlags, ProtFlags};

/// A whole file mapped read-only, for metadata that is read here and there.
///
/// The file has to be private to this process and finished: nobody writes to it or shortens it
/// while it is mapped. Bootstraps in a daemon's private directory are: they are written under
/// another name, renamed, and never changed.
#[derive(Debug)]
pub struct Map {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: needed because raw pointers are not Send. Sound because the mapping is read-only memory
// that belongs to the process and not to a thread.
unsafe impl Send for Map {}
// SAFETY: needed because raw pointers are not Sync. Sound because nothing writes through the
// pointer.
unsafe impl Sync for Map {}

impl Map {
    /// Maps all of `file`. See the type for what the caller promises about it.
    pub fn new(file: &File) -> io::Result<Self> {
        let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        if len == 0 {
            // mmap(2) refuses to map nothing.
            return Ok(Map { start: NonNull::dangling(), len });
        }
        // SAFETY: needed because mapping memory cannot be checked by the compiler. Sound because
        // the kernel chooses the address, so nothing of ours is replaced, and the mapping outlives
        // the descriptor on its own.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ,
                MapFlags::PRIVATE,
                file,
                0,
            )?
        };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at null"))?;
        Ok(Map { start, len })
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: needed to see mapped memory as a slice. Sound because `start` is the begin of a
        // readable mapping of `len` bytes (or dangling with length 0) that lives as long as `self`,
        // and the file behind it does not change (see the type).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for Map {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: needed to give the memory back. Sound because `new` mapped exactly this
            // range, and slices of it borrow from `self`, so none is left.
            let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn shows_the_bytes_of_the_file_after_it_is_closed() {
        for content in [&b""[..], b"x", &[7; 10_000]] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(content).unwrap();
            let map = Map::new(&file).unwrap();
            drop(file);
            assert_eq!(&*map, content);
        }
    }
}
