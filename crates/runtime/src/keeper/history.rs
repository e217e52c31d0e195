//! The history of this daemon's processes.
//!
//! A file keeps it, so that it outlives keeper and worker together. The keeper writes the file when
//! it starts, and when a process died or was replaced; a daemon that stops on request removes it.
//! So a keeper that finds the file at its start follows a daemon whose processes all died.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

/// In the root directory.
const NAME: &str = "history.json";

/// How the last worker ended, if its keeper ended with it.
pub(super) const TOGETHER: &str = "keeper and worker died together";

/// The same, if only the keeper did.
const KEEPER: &str = "the keeper before this one died";

/// See the module. The default is that of a daemon that has just been started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct History {
    /// The boot id of the kernel that it was written under.
    boot: String,
    /// Workers that died and were started again.
    pub(super) restarts: u64,
    /// The same of keepers.
    pub(super) keeper_restarts: u64,
    /// Takeovers by another program, or by the same one.
    pub(super) takeovers: u64,
    /// How the last worker ended, in words.
    pub(super) last_exit: Option<String>,
    /// When, in seconds since 1970.
    pub(super) last_exit_at: Option<u64>,
    #[serde(skip)]
    path: PathBuf,
    /// Whether the file existed.
    #[serde(skip)]
    is_found: bool,
}

impl History {
    /// Reads the history in `root`, if it is from this boot.
    pub(super) fn of(root: &Path) -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self::since(root, boot.trim_end().to_owned())
    }

    fn since(root: &Path, boot: String) -> Self {
        let path = root.join(NAME);
        let found = fs::read(&path).ok();
        let found: Option<Self> = found.and_then(|json| serde_json::from_slice(&json).ok());
        match found.filter(|found| found.boot == boot) {
            Some(found) => History { path, is_found: true, ..found },
            None => History { boot, path, ..Self::default() },
        }
    }

    /// Records the start of a keeper that took nothing over: an existing file means that a daemon
    /// died.
    pub(super) fn begin(&mut self) {
        if self.is_found {
            self.keeper_restarts = self.keeper_restarts.saturating_add(1);
            self.worker_died(TOGETHER.to_owned());
        } else {
            self.save();
        }
    }

    /// Records the death of a worker, described by `exit`.
    pub(super) fn worker_died(&mut self, exit: String) {
        self.restarts = self.restarts.saturating_add(1);
        self.exited(exit);
        self.save();
    }

    /// Records that a worker ended or could not be started, described by `exit`.
    pub(super) fn exited(&mut self, exit: String) {
        self.last_exit = Some(exit);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last_exit_at = Some(now.as_secs());
    }

    /// Records that this keeper replaces one that died.
    pub(super) fn keeper_died(&mut self) {
        self.keeper_restarts = self.keeper_restarts.saturating_add(1);
        self.exited(KEEPER.to_owned());
        self.save();
    }

    /// The daemon ends as it was told.
    pub(super) fn end(&self) {
        // A file that remains counts a death that did not happen.
        let _ = fs::remove_file(&self.path);
    }

    /// Writes it. Without it only numbers are lost.
    pub(super) fn save(&self) {
        if let Err(error) = self.try_save() {
            tracing::warn!(path = %self.path.display(), %error, "deaths may be counted too low");
        }
    }

    fn try_save(&self) -> io::Result<()> {
        let new = self.path.with_extension("new");
        fs::write(&new, serde_json::to_vec(self)?)?;
        fs::rename(new, &self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn since(root: &Path, boot: &str) -> History {
        History::since(root, boot.to_owned())
    }

    #[test]
    fn a_keeper_that_finds_it_counts_the_deaths_of_both() {
        let root = tempfile::tempdir().unwrap();
        let mut first = since(root.path(), "a");
        first.begin();
        assert_eq!((first.restarts, first.keeper_restarts), (0, 0));
        first.worker_died("killed".to_owned());
        let mut second = since(root.path(), "a");
        second.begin();
        assert_eq!((second.restarts, second.keeper_restarts), (2, 1));
        assert_eq!(second.last_exit.as_deref(), Some(TOGETHER));
        assert!(second.last_exit_at >= first.last_exit_at && first.last_exit_at.is_some());
    }

    #[test]
    fn an_end_as_told_and_a_new_start_of_the_kernel_begin_anew() {
        let root = tempfile::tempdir().unwrap();
        let mut first = since(root.path(), "a");
        first.begin();
        first.keeper_died();
        assert_eq!(since(root.path(), "b").keeper_restarts, 0);
        assert_eq!(since(root.path(), "a").keeper_restarts, 1);
        first.end();
        assert_eq!(since(root.path(), "a").keeper_restarts, 0);
    }

    #[test]
    fn a_damaged_file_counts_as_none() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join(NAME), "{\"restarts\": -1").unwrap();
        let mut history = since(root.path(), "a");
        history.begin();
        assert_eq!(history.restarts, 0);
    }
}
