//! Finds the processes that keep a mount busy, for messages.

use std::{fs, path::Path};

use crate::kernel::mount;

/// More names than this are cut.
const SHOWN: usize = 5;

/// Lists the processes with open files under `mountpoint`: ` by NAME (pid N), …`. Empty when none
/// is found, as with processes of another mount namespace.
pub(in crate::daemon) fn of(mountpoint: &Path) -> String {
    mount::device(mountpoint)
        .map_or_else(|_| String::new(), |device| list(device, Some(mountpoint)))
}

/// The same for a file system that has no mount point any more.
pub(super) fn of_device(device: u64) -> String {
    list(device, None)
}

fn list(device: u64, mountpoint: Option<&Path>) -> String {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let holders: Vec<_> = processes
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| uses(*pid, device, mountpoint))
        .map(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("{} (pid {pid})", name.trim_end())
        })
        .collect();
    match holders.len() {
        0 => String::new(),
        count if count > SHOWN => {
            format!(" by {} and {} more", holders[..SHOWN].join(", "), count - SHOWN)
        }
        _ => format!(" by {}", holders.join(", ")),
    }
}

/// Returns whether a process has its directory, root, program or an open file there. The device
/// identifies a file system, the path one of its mounts.
fn uses(pid: u32, device: u64, mountpoint: Option<&Path>) -> bool {
    let below = |target: &Path| mountpoint.is_none_or(|mountpoint| target.starts_with(mountpoint));
    let links = ["cwd", "root", "exe"].map(|name| format!("/proc/{pid}/{name}").into());
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    links.into_iter().chain(descriptors.map(|entry| entry.path())).any(|link| {
        fs::read_link(&link).is_ok_and(|target| below(&target))
            && mount::device(&link).is_ok_and(|found| found == device)
    })
}
