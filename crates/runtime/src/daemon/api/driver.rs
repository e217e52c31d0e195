//! Names of kernel drivers.

use serde::{Deserialize, Serialize};

/// The kernel interface that serves a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriverChoice {
    /// The best driver that works here.
    #[default]
    Auto,
    /// EROFS over files that are filled on fanotify pre-content events.
    Fanotify,
    /// EROFS over loop devices, backed by files of the daemon until every chunk is ready.
    Loop,
    /// ext4 made on the node, over the same loop devices.
    Ext4,
    /// FUSE.
    Fuse,
    /// FUSE files that are disks for virtual machines.
    Disks,
}
