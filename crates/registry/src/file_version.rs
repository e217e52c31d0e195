//! Whether a file is still the one that was read.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

/// Device, inode, size, and seconds and nanoseconds of the last change. Reproducible file systems
/// have the same files with the same times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileVersion(u64, u64, u64, i64, i64);

impl FileVersion {
    /// That of the file `path`; `None` if there is none.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let file = fs::metadata(path).ok()?;
        let (ctime, nanoseconds) = (file.ctime(), file.ctime_nsec());
        Some(FileVersion(file.dev(), file.ino(), file.size(), ctime, nanoseconds))
    }
}
