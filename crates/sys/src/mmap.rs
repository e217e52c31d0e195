//! Files with final content, and read-only views of them.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read},
    ops::Deref,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::Path,
    ptr::NonNull,
};

use rustix::{
    fs::StatVfsMountFlags,
    mm::{MapFlags, ProtFlags},
};

/// A file whose content is final, so that it can be mapped.
///
/// Such a file is written once, by [`create`](FinishedFile::create), and replaced but never
/// changed. The type guarantees that its own descriptor is read-only; the descriptor with which
/// `create` writes is closed before the value exists, and the file's mode denies all writes.
/// Processes with `CAP_DAC_OVERRIDE`, to which modes don't apply, remain trusted, and so do those
/// of the same user, which could change the memory of this process anyway.
#[derive(Debug)]
pub struct FinishedFile(File);

impl FinishedFile {
    /// Writes the new file `path`, which is read-only afterwards.
    ///
    /// # Errors
    /// The file exists, or `content` cannot be read or written; a part of it may be left.
    pub fn create(path: &Path, mut content: impl Read) -> io::Result<Self> {
        // The mode is for later opens: this descriptor can write.
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o444).open(path)?;
        io::copy(&mut content, &mut file)?;
        drop(file);
        Self::open(path)
    }

    /// Opens a file that is finished already: on a read-only file system, or written by `create` or
    /// by a version of this program that left the mode as it was. No file that this program changes
    /// may be opened so.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(FinishedFile(File::open(path)?))
    }
}

/// The bytes of a whole file, for metadata with scattered reads.
///
/// A file is mapped if no other user can change it: this user owns it and its mode denies writing
/// to all others, or its file system is read-only. Any other file is copied into memory.
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
    /// Maps all of `file`, or copies it, see the type.
    pub fn of(FinishedFile(mut file): FinishedFile) -> io::Result<Self> {
        let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        if len == 0 || !is_stable(&file)? {
            // mmap(2) refuses to map nothing.
            let mut bytes = Vec::with_capacity(len);
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
                &file,
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
        // readable mapping of `len` bytes that lives as long as `self`, and `Map::of` maps only
        // finished files that no other user can change.
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
        // SAFETY: needed to give the memory back. Sound because `Map::of` mapped exactly this
        // range, and slices of it borrow from `self`, so none is left.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        os::unix::fs::PermissionsExt as _,
    };

    use super::*;

    #[test]
    fn shows_the_bytes_of_the_file_after_it_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        for mode in [0o444, 0o600, 0o666] {
            for content in [&b""[..], b"x", &[7; 10_000]] {
                let file = FinishedFile::create(&path, content).unwrap();
                fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
                let map = Map::of(file).unwrap();
                fs::remove_file(&path).unwrap();
                assert_eq!(&*map, content, "mode {mode:o}");
            }
        }
    }

    #[test]
    fn a_finished_file_is_written_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let FinishedFile(mut file) = FinishedFile::create(&path, &b"once"[..]).unwrap();
        assert_eq!(file.metadata().unwrap().mode() & 0o222, 0);
        assert!(io::Write::write_all(&mut file, b"again").is_err());
        let again = FinishedFile::create(&path, &b"again"[..]).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(&*Map::of(FinishedFile::open(&path).unwrap()).unwrap(), b"once");
    }

    #[test]
    fn a_file_that_others_can_write_to_is_copied() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let with_mode = |mode| {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            Map::of(FinishedFile::open(&path).unwrap()).unwrap()
        };
        fs::write(&path, b"before").unwrap();
        let map = with_mode(0o606);
        fs::write(&path, b"after").unwrap();
        assert_eq!(&*map, b"before");
        assert!(matches!(map.0, Bytes::Copied(_)));
        assert!(matches!(with_mode(0o644).0, Bytes::Mapped(_)));
    }
}
