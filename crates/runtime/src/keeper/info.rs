//! A keeper's report on itself and its worker.

use std::io;

use serde::{Deserialize, Serialize};

/// The state of a keeper and its worker.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct KeeperInfo {
    /// Process that holds the descriptors.
    pub pid: u32,
    /// Process that serves readers; `None` while it is being restarted.
    pub worker_pid: Option<u32>,
    /// Workers that died and were started again, since the daemon was started.
    pub restarts: u64,
    /// How the last of them ended.
    pub last_exit: Option<String>,
    /// When, in seconds since 1970.
    #[serde(default)]
    pub last_exit_at: Option<u64>,
    /// Keepers that died, since then.
    #[serde(default)]
    pub keeper_restarts: u64,
    /// Takeovers since then.
    #[serde(default)]
    pub takeovers: u64,
    /// Seconds until the next start, after several that failed.
    pub next_start_seconds: Option<f32>,
}

impl KeeperInfo {
    pub(super) fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    pub(super) fn from_json(text: &str) -> io::Result<Self> {
        Ok(serde_json::from_str(text)?)
    }
}
