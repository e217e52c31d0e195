//! Keeps part of the file system free for the rest of the node.

use rustix::fs::statvfs;

use super::Cache;

/// A part of the file system that the cache is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepFree {
    /// In hundredths of its size.
    Percent(u8),
    /// In bytes.
    Bytes(u64),
}

impl KeepFree {
    /// Its bytes on a file system of `size` bytes.
    pub fn of(self, size: u64) -> u64 {
        match self {
            KeepFree::Percent(percent) => size / 100 * u64::from(percent),
            KeepFree::Bytes(bytes) => bytes,
        }
    }
}

impl Cache {
    /// Returns the number of bytes to evict for [`super::Settings::keep_free`] to hold when the
    /// cache takes `more` bytes. Blocks, briefly.
    pub(super) fn lacking(&self, more: u64) -> u64 {
        let Some(keep_free) = self.settings.keep_free else { return 0 };
        statvfs(&self.dir).map_or(0, |disk| {
            let free = disk.f_bavail * disk.f_frsize;
            keep_free.of(disk.f_blocks * disk.f_frsize).saturating_sub(free.saturating_sub(more))
        })
    }
}
