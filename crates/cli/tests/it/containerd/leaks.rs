//! Everything is released after its removal.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    mount::{UnmountFlags, unmount},
    process::{Pid, Signal, kill_process},
};

use super::{names, rig::Rig};

/// How long removal may go on in the background.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Tolerance for connections that come and go during a count: of clients, and to registries, of
/// which 32 are kept for a while, for each server and protocol.
const CONNECTIONS: usize = 80;

/// The type of descriptor whose marks are counted.
const FANOTIFY: &str = "anon_inode:[fanotify]";

/// Resources held at a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    /// Mount points of this test, in the order in which they were mounted.
    mounts: Vec<String>,
    /// The descriptors of keeper and worker by target, without connections.
    descriptors: BTreeMap<(&'static str, String), usize>,
    /// Their connections.
    connections: usize,
    /// Files that raise events.
    marks: usize,
    /// Records of mounts and file systems, and directories of snapshots.
    files: Vec<String>,
    /// containerd's leases.
    leases: Vec<String>,
}

/// Looks at everything.
pub(super) fn held(rig: &Rig) -> Held {
    let pids = rig.wait_for(|pids| pids.worker != 0 && pids.keeper != 0);
    let mut held = Held { mounts: mounts(rig), ..Held::default() };
    for (process, pid) in [("keeper", pids.keeper), ("worker", pids.worker)] {
        let directory = format!("/proc/{pid}/fd");
        let standard = |name: &String| ["0", "1", "2"].contains(&&**name);
        for name in names(Path::new(&directory)).into_iter().filter(|name| !standard(name)) {
            let Ok(target) = fs::read_link(format!("{directory}/{name}")) else { continue };
            let target = target.to_string_lossy().into_owned();
            if target.starts_with("socket:") {
                held.connections += 1;
                continue;
            }
            if process == "keeper" && target == FANOTIFY {
                let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{name}"));
                let info = info.unwrap_or_default();
                held.marks += info.lines().filter(|line| line.starts_with("fanotify ino")).count();
            }
            // Pipes have numbers in their names.
            let of = if target.starts_with("pipe:") { "pipe".to_owned() } else { target };
            *held.descriptors.entry((process, of)).or_default() += 1;
        }
    }
    let root = rig.lazuli.root();
    for directory in ["mounts", "filesystems", "snapshots", "snapshots/trash", "lazy"] {
        let found = names(&root.join(directory)).into_iter();
        held.files.extend(found.map(|name| format!("{directory}/{name}")));
    }
    held.files.sort();
    let (_, leases) = rig.try_ctr(&["leases", "ls", "-q"]);
    held.leases = leases.lines().map(str::to_owned).collect();
    held
}

fn mounts(rig: &Rig) -> Vec<String> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let base = rig.lazuli.path("");
    let points = table.lines().filter_map(|line| line.split(' ').nth(4));
    points.filter(|point| Path::new(point).starts_with(&base)).map(str::to_owned).collect()
}

/// Waits until no more is held than in `idle`: removal continues in the background.
#[track_caller]
pub(super) fn assert_none(rig: &Rig, idle: &Held) {
    let mut last = held(rig);
    let began = Instant::now();
    while let Some(left) = difference(idle, &last) {
        let log = || rig.lazuli.log();
        assert!(
            began.elapsed() < TIMEOUT,
            "left: {left}\nholders: {:#?}\nidle: {idle:#?}\nnow: {last:#?}\n{}",
            holders(rig),
            log()
        );
        thread::sleep(Duration::from_millis(100));
        last = held(rig);
    }
}

/// A process in a mount namespace of its own that has something of the node in it.
#[derive(Debug)]
struct Holder {
    process: Pid,
    command: String,
    /// The first such mount, for messages.
    #[expect(dead_code)]
    mount: String,
}

fn holders(rig: &Rig) -> Vec<Holder> {
    let base = rig.lazuli.path("").to_string_lossy().into_owned();
    let own = fs::read_link("/proc/self/ns/mnt").unwrap();
    let holder = |number: String| {
        let read = |file: &str| fs::read_to_string(format!("/proc/{number}/{file}")).ok();
        let space = fs::read_link(format!("/proc/{number}/ns/mnt")).ok()?;
        let mounts = read("mountinfo").filter(|_| space != own)?;
        let mount = mounts.lines().find(|line| line.contains(&base))?.to_owned();
        let command = read("cmdline")?.replace('\0', " ").trim_end().to_owned();
        Some(Holder { process: Pid::from_raw(number.parse().ok()?)?, command, mount })
    };
    names(Path::new("/proc")).into_iter().filter_map(holder).collect()
}

/// Ends containers that were created but not started when containerd was killed: it forgets some of
/// them, and they keep their mounts for as long as they wait. Returns their number.
pub(super) fn end_forgotten(rig: &Rig) -> usize {
    let mut forgotten = holders(rig);
    forgotten.retain(|holder| holder.command == "runc init");
    for holder in &forgotten {
        let _ = kill_process(holder.process, Signal::KILL);
    }
    forgotten.len()
}

/// Describes what is held beyond the idle state.
fn difference(idle: &Held, now: &Held) -> Option<String> {
    if now.connections > idle.connections + CONNECTIONS {
        return Some(format!("{} connections, not {}", now.connections, idle.connections));
    }
    for (of, count) in &now.descriptors {
        let before = idle.descriptors.get(of).copied().unwrap_or(0);
        // Threads have an eventfd or epoll each, and there are as many as there was work.
        if *count > before && !of.1.starts_with("anon_inode:[event") {
            return Some(format!("{count} descriptors of {of:?}, not {before}"));
        }
    }
    if now.marks > idle.marks {
        return Some(format!("{} marks, not {}", now.marks, idle.marks));
    }
    for (what, before, now) in [
        ("mount", &idle.mounts, &now.mounts),
        ("file", &idle.files, &now.files),
        ("lease", &idle.leases, &now.leases),
    ] {
        if let Some(left) = now.iter().find(|name| !before.contains(name)) {
            return Some(format!("{what} {left}"));
        }
    }
    None
}

/// Ends whatever still runs, for the end of a test that may have failed anywhere.
pub(super) fn end_containers(rig: &Rig) {
    for sandbox in rig.cri.sandboxes().unwrap_or_default() {
        let _ = rig.cri.remove(&sandbox.id);
    }
    for verb in [&["task", "rm", "--force"][..], &["container", "rm"]] {
        let (_, left) = rig.try_ctr(&["container", "ls", "-q"]);
        for id in left.lines() {
            let _ = rig.try_ctr(&[verb, &[id]].concat());
        }
    }
    // containerd may be dead: its shims are known by its socket, and containers are their children.
    let socket = rig.lazuli.path("");
    for shim in
        processes(|_, line| line.contains("shim-runc") && line.contains(&*socket.to_string_lossy()))
    {
        let of_it = processes(|parent, _| parent == shim.as_raw_nonzero().get());
        for process in of_it.into_iter().chain([shim]) {
            let _ = kill_process(process, Signal::KILL);
        }
    }
    if thread::panicking() {
        for point in mounts(rig).iter().rev() {
            let _ = unmount(point, UnmountFlags::DETACH);
        }
    }
}

/// All processes with parent and command line.
fn processes(wanted: impl Fn(i32, &str) -> bool) -> Vec<Pid> {
    let numbers = names(Path::new("/proc")).into_iter().filter_map(|name| name.parse().ok());
    let found = numbers.filter(|number: &i32| {
        let read = |file: &str| fs::read_to_string(format!("/proc/{number}/{file}")).ok();
        let parent = read("stat").and_then(|stat| {
            let after_name = stat.rsplit_once(") ")?.1.to_owned();
            after_name.split(' ').nth(1)?.parse().ok()
        });
        parent.is_some_and(|parent| wanted(parent, &read("cmdline").unwrap_or_default()))
    });
    found.filter_map(Pid::from_raw).collect()
}
