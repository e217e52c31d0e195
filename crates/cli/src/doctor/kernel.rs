//! Checks which driver works on this kernel, and why no better one does.

use std::fs;

use lazuli_runtime::daemon::DriverChoice;

use super::{Node, Row};

pub(super) fn driver(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "kernel";
    let daemon = &node.status.as_ref().ok()?.daemon;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let found = format!("Linux {}: {}", release.trim(), daemon.driver_reason);
    Some(match daemon.driver {
        DriverChoice::Auto | DriverChoice::Fanotify | DriverChoice::Disks => {
            Row::fine(CHECK, found)
        }
        DriverChoice::Loop => Row::fine(CHECK, format!("{found}; images are on loop devices")),
        DriverChoice::Ext4 => Row::fine(CHECK, format!("{found}; images are ext4 on loop devices")),
        DriverChoice::Fuse => Row::advice(
            CHECK,
            format!("{found}; images are served by FUSE, also when they are complete"),
            "docs/drivers.md says what the other drivers need",
        ),
    })
}
