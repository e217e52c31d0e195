//! Whether a file is still the one that was read.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

/// Inode, size, and seconds and nanoseconds of the last change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileVersion(u64, u64, i64, i64);

impl FileVersion {
    /// That of the file `path`; `None` if there is none.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let file = fs::metadata(path).ok()?;
        Some(FileVersion(file.ino(), file.size(), file.mtime(), file.mtime_nsec()))
    }
}
