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
pub(crate) trait Beside: Debug + Send + Sync {
    /// Files that nothing uses, and when each of them was used last. Blocks.
    fn unused(&self) -> Vec<(SystemTime, PathBuf)>;

    /// Removes a file unless it is in use by now. Returns the bytes that it occupied. Blocks.
    fn remove(&self, path: &Path) -> io::Result<u64>;
}

impl Cache {
    /// Lets eviction remove files of `beside` as well. Only the first call counts.
    pub(crate) fn evict_beside(&self, beside: Arc<dyn Beside>) {
        let _ = self.beside.set(beside);
    }

    pub(super) fn unused_beside(&self) -> Vec<(SystemTime, PathBuf)> {
        self.beside.get().map(|beside| beside.unused()).unwrap_or_default()
    }

    pub(super) fn remove_beside(&self, path: &Path) -> u64 {
        let Some(beside) = self.beside.get() else { return 0 };
        let cannot = |error: &io::Error| {
            tracing::warn!(path = %path.display(), %error, "cannot remove what is not in use");
        };
        let freed = beside.remove(path).inspect_err(cannot).unwrap_or(0);
        self.budget.count_bytes(freed);
        freed
    }
}
