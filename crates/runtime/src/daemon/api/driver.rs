//! Names of kernel drivers.

use serde::{Deserialize, Serialize};

/// Which kernel interface serves a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriverChoice {
    /// The best one that works here.
    #[default]
    Auto,
    /// EROFS over files that are filled on fanotify pre-content events.
    Fanotify,
    /// EROFS over loop devices, on files of the daemon until everything is here.
    Loop,
    /// FUSE.
    Fuse,
}
