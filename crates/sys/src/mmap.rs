//! A read-only view of a file.

use std::{
    fs::File,
    io::{self, Read as _, Seek as _},
    ops::Deref,
    os::unix::fs::MetadataExt as _,
    ptr::NonNull,
};

use rustix::{
    fs::StatVfsMountFlags,
    mm::{MapFlags, ProtFlags},
};

/// The bytes of a whole file, for metadata with scattered reads.
///
/// A file is mapped if no other user can change it: this user owns it and its mode denies writing
/// to all others, or its file system is read-only. (A process of this user could change the memory
/// of this process anyway.) Any other file is copied into memory.
#[derive(Debug)]
pub struct Map(Bytes);

#[derive(Debug)]
enum Bytes {
    Mapped(Mapping),
    Copied(Vec<u8>),
}

/// Memory that the kernel has mapped to a file, read-only; given back when it is dropped.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: needed because raw pointers are not Send. Sound because the mapping is read-only memory
// that belongs to the process and not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: needed because raw pointers are not Sync. Sound because nothing writes through the
// pointer.
unsafe impl Sync for Mapping {}

impl Map {
    /// Maps all of `file`, or copies it, see the type. This program must not change the file as
    /// long as the map lives.
    pub fn new(file: &File) -> io::Result<Self> {
        let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        if len == 0 || !is_stable(file)? {
            // mmap(2) refuses to map nothing.
            let mut bytes = Vec::with_capacity(len);
            let mut file = file;
            file.rewind()?;
            file.read_to_end(&mut bytes)?;
            return Ok(Map(Bytes::Copied(bytes)));
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
        Ok(Map(Bytes::Mapped(Mapping { start, len })))
    }
}

/// Returns whether no other user can change the file.
fn is_stable(file: &File) -> io::Result<bool> {
    let metadata = file.metadata()?;
    let owner = rustix::process::geteuid().as_raw();
    let is_private = metadata.uid() == owner && metadata.mode() & 0o022 == 0;
    Ok(is_private || rustix::fs::fstatvfs(file)?.f_flag.contains(StatVfsMountFlags::RDONLY))
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: needed to see mapped memory as a slice. Sound because `start` is the begin of a
        // readable mapping of `len` bytes that lives as long as `self`, and `Map::new` maps only
        // files that no other user can change.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Bytes::Mapped(mapping) => mapping,
            Bytes::Copied(bytes) => bytes,
        }
    }
}

impl AsRef<[u8]> for Map {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: needed to give the memory back. Sound because `Map::new` mapped exactly this
        // range, and slices of it borrow from `self`, so none is left.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::Permissions, io::Write as _, os::unix::fs::PermissionsExt as _};

    use super::*;

    #[test]
    fn shows_the_bytes_of_the_file_after_it_is_closed() {
        for mode in [0o600, 0o666] {
            for content in [&b""[..], b"x", &[7; 10_000]] {
                let mut file = tempfile::tempfile().unwrap();
                file.set_permissions(Permissions::from_mode(mode)).unwrap();
                file.write_all(content).unwrap();
                let map = Map::new(&file).unwrap();
                drop(file);
                assert_eq!(&*map, content, "mode {mode:o}");
            }
        }
    }

    #[test]
    fn a_file_that_others_can_write_to_is_copied() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"before").unwrap();
        file.set_permissions(Permissions::from_mode(0o606)).unwrap();
        let map = Map::new(&file).unwrap();
        file.set_len(0).unwrap();
        assert_eq!(&*map, b"before");
        assert!(matches!(map.0, Bytes::Copied(_)));
        file.write_all(b"x").unwrap();
        file.set_permissions(Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(Map::new(&file).unwrap().0, Bytes::Mapped(_)));
    }
}
