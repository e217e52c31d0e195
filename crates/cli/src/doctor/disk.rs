//! Checks the file system of the state directory, and its free space.

use indicatif::BinaryBytes;
use lazuli_runtime::cache::KeepFree;
use rustix::fs::{statfs, statvfs};

use super::{Node, Row};

/// The kubelet evicts pods when less is available, in hundredths.
const EVICTION: u64 = 15;

/// Names of file systems by `f_type`, see statfs(2).
const NAMES: &[(u64, &str)] = &[
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0x0102_1994, "tmpfs"),
    (0x794c_7630, "overlayfs"),
    (0x6969, "nfs"),
    (0x2fc1_2fc1, "zfs"),
];

/// Those that lose data at a restart, or are not of this machine.
const UNFIT: &[&str] = &["tmpfs", "overlayfs", "nfs"];

pub(super) fn file_system(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "file-system";
    let root = &node.session.root;
    let kind = u64::try_from(statfs(root).ok()?.f_type).ok()?;
    let name = NAMES.iter().find(|(number, _)| *number == kind);
    let name = name.map_or_else(|| format!("type {kind:#x}"), |(_, name)| (*name).to_owned());
    let found = format!("{} is on {name}", root.display());
    if UNFIT.contains(&&*name) {
        let fix = "root = \"DIRECTORY\" in /etc/lazuli/config.toml, on a disk of the node";
        return Some(Row::advice(CHECK, found, fix));
    }
    Some(Row::fine(CHECK, found))
}

pub(super) fn room(node: &Node<'_>) -> Option<Row> {
    let disk = statvfs(&node.session.root).ok()?;
    let (free, size) = (disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize);
    Some(row(free, size, node.session.config.cache.keep_free().ok()?))
}

fn row(free: u64, size: u64, keep_free: KeepFree) -> Row {
    const CHECK: &str = "disk";
    let mut found = format!("{} of {} are free", BinaryBytes(free), BinaryBytes(size));
    let keep = keep_free.of(size);
    let is_short = free < keep;
    if is_short {
        let keep = BinaryBytes(keep);
        found += &format!("; below {keep} ([cache] keep_free) the rest of an image is not fetched");
    }
    if free * 100 / size.max(1) < EVICTION {
        found += &format!("; kubelets evict pods below {EVICTION} %");
        return Row::advice(CHECK, found, "[cache] max_bytes bounds what images in use take");
    }
    if is_short {
        return Row::advice(CHECK, found, "free space, or lower [cache] keep_free");
    }
    Row::fine(CHECK, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_of_images_needs_what_is_to_stay_free() {
        let says = |free, keep_free| format!("{:?}", row(free, 1000, keep_free));
        let part = KeepFree::Percent(20);
        assert!(says(149, part).contains("evict pods") && says(149, part).contains("keep_free"));
        assert!(says(199, part).contains("keep_free") && says(199, part).contains("Advice"));
        assert!(!says(200, part).contains("keep_free"));
        assert!(!says(199, KeepFree::Bytes(100)).contains("keep_free"));
    }
}
