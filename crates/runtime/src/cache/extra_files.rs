//! Files beside the cache that count in its budget, and may be given up like blobs.

use std::{
    fmt::Debug,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use super::Cache;

/// Keeps such files, in a directory of [`super::Settings::metadata`].
pub(crate) trait ExtraFiles: Debug + Send + Sync {
    /// Files that nothing uses, and when each of them was used last. Blocks.
    fn unused(&self) -> Vec<(SystemTime, PathBuf)>;

    /// Removes a file unless it is in use by now. Returns the bytes that it occupied. Blocks.
    fn remove(&self, path: &Path) -> io::Result<u64>;
}

impl Cache {
    /// Lets eviction remove these files as well. Only the first call counts.
    pub(crate) fn evict_extra_files(&self, files: Arc<dyn ExtraFiles>) {
        let _ = self.extra_files.set(files);
    }

    pub(super) fn unused_extra_files(&self) -> Vec<(SystemTime, PathBuf)> {
        self.extra_files.get().map(|files| files.unused()).unwrap_or_default()
    }

    pub(super) fn remove_extra_file(&self, path: &Path) -> u64 {
        let Some(files) = self.extra_files.get() else { return 0 };
        let cannot = |error: &io::Error| {
            tracing::warn!(path = %path.display(), %error, "cannot remove what is not in use");
        };
        let freed = files.remove(path).inspect_err(cannot).unwrap_or(0);
        self.budget.count_bytes(freed);
        freed
    }
}
