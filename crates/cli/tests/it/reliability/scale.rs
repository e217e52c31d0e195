//! Many images, many mounts, many readers, on a node that has little to spare.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use lazuli_testkit::{
    odd,
    reading::{Mode, Readable, Task},
    registry::FakeRegistry,
};
use serde_json::{Value, json};

use super::{
    alone,
    image::LATENCY,
    processes::{Pids, pids},
    readers::Readers,
    report, soak,
};
use crate::{drivers::able, lazuli::Lazuli};

/// Each image has a blob of its own with small files, of a chunk each.
const SMALL: (u64, u64) = (64, 60_000);
/// Or with files of the default maximum chunk size: data in flight adds up.
const LARGE: (u64, u64) = (6, 1 << 20);
/// Processes that the readers are threads of.
const PROCESSES: usize = 10;

/// The scale of the test.
#[derive(Clone, Copy)]
struct Scale {
    images: u64,
    mounts: u64,
    readers: u64,
    /// Files of each image, and the bytes of each.
    files: (u64, u64),
    /// How long readers read.
    duration: Duration,
    /// The daemon's memory limit, including page cache of its writes, in MiB.
    memory: u64,
}

impl Scale {
    fn now() -> Self {
        if soak() {
            let duration = Duration::from_secs(20);
            Scale { images: 100, mounts: 200, readers: 1000, files: SMALL, duration, memory: 256 }
        } else {
            let duration = Duration::from_secs(2);
            Scale { images: 20, mounts: 40, readers: 100, files: SMALL, duration, memory: 192 }
        }
    }
}

/// The daemon's limits.
#[derive(Default)]
pub(super) struct Limits {
    /// Descriptors of one process, soft and hard.
    pub(super) descriptors: Option<u64>,
    pub(super) memory: Option<Cgroup>,
}

/// A memory cgroup, removed with the value.
pub(super) struct Cgroup {
    path: PathBuf,
    unified: bool,
}

impl Cgroup {
    /// Creates it in the hierarchy that has the memory controller on this machine.
    fn new(mebibytes: u64) -> Self {
        let unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        let parent = if unified { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/memory" };
        let path = Path::new(parent).join(format!("lazuli-test-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        let limit = if unified { "memory.max" } else { "memory.limit_in_bytes" };
        fs::write(path.join(limit), (mebibytes << 20).to_string()).unwrap();
        Cgroup { path, unified }
    }

    /// The number of processes in it that the kernel killed.
    fn kills(&self) -> u64 {
        let file = if self.unified { "memory.events" } else { "memory.oom_control" };
        let text = fs::read_to_string(self.path.join(file)).unwrap();
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.unwrap().parse().unwrap()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Its processes end at about the same time.
        for _ in 0..100 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A daemon with limits.
pub(super) struct Daemon {
    pub(super) lazuli: Lazuli,
    child: Child,
}

impl Daemon {
    pub(super) fn start(limits: &Limits) -> Self {
        let lazuli = Lazuli::new();
        fs::create_dir(lazuli.root()).unwrap();
        let own = lazuli.command(["daemon"]);
        let mut command = Command::new("sh");
        let group = limits.memory.as_ref().map(|group| group.path.join("cgroup.procs"));
        command.args([
            "-c",
            r#"[ -z "$1" ] || echo $$ >"$1"; [ -z "$2" ] || ulimit -n "$2"; shift 2; exec "$@""#,
            "sh",
        ]);
        command.arg(group.unwrap_or_default());
        command.arg(limits.descriptors.map_or_else(String::new, |limit| limit.to_string()));
        command.arg(own.get_program()).args(own.get_args());
        command.stderr(fs::File::create(lazuli.root().join("daemon.log")).unwrap());
        let child = command.spawn().unwrap();
        let began = Instant::now();
        while !lazuli.output(["status"]).status.success() {
            assert!(began.elapsed() < Duration::from_secs(30), "{}", lazuli.log());
            thread::sleep(Duration::from_millis(20));
        }
        Daemon { lazuli, child }
    }

    fn usage(&self) -> Value {
        let Pids { keeper, worker } = pids(&self.lazuli.status());
        let named = [("keeper", keeper), ("worker", worker)].into_iter();
        named.filter(|(_, pid)| *pid != 0).map(|(name, pid)| (name, usage(pid))).collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.lazuli.output(["stop", "--force"]);
        let _ = self.child.wait();
    }
}

/// The memory and descriptors of a process.
pub(super) fn usage(pid: u32) -> Value {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let fields: BTreeMap<&str, &str> =
        status.lines().filter_map(|line| line.split_once(':')).collect();
    let number =
        |key: &str| -> u64 { fields[key].split_whitespace().next().unwrap().parse().unwrap() };
    json!({
        "rss_kib": number("VmRSS"),
        "anonymous_kib": number("RssAnon"),
        "peak_rss_kib": number("VmHWM"),
        "threads": number("Threads"),
        "descriptors": fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count(),
    })
}

/// Puts `count` images into a new registry.
pub(super) fn images(count: u64, (files, size): (u64, u64)) -> FakeRegistry {
    let registry = FakeRegistry::start().unwrap();
    let lazuli = Lazuli::new();
    let source = lazuli.directory("source");
    for image in 0..count {
        for file in 0..files {
            let content = odd::random(seed(image, file), size as usize);
            fs::write(source.join(file.to_string()), content).unwrap();
        }
        lazuli.ok(["convert", "dir:source", &format!("{}/scale:{image}", registry.host())]);
    }
    registry.set_latency(LATENCY);
    registry
}

pub(super) fn seed(image: u64, file: u64) -> u64 {
    (image + 1) << 32 | file << 16
}

/// Mounts everything, reads everything concurrently, and returns the measurements.
fn run(scale: Scale, limits: &Limits) -> Value {
    let registry = images(scale.images, scale.files);
    let daemon = Daemon::start(limits);
    let lazuli = &daemon.lazuli;
    let idle = daemon.usage();
    let mut files: Vec<Vec<Readable>> = vec![Vec::new(); PROCESSES];
    for mount in 0..scale.mounts {
        let image = mount % scale.images;
        let mountpoint = lazuli.directory(&format!("mnt-{mount}"));
        let name = format!("{}/scale:{image}", registry.host());
        lazuli.ok(["mount", &name, mountpoint.to_str().unwrap(), "--driver", "fanotify"]);
        files[mount as usize % PROCESSES].extend((0..scale.files.0).map(|file| Readable {
            path: mountpoint.join(file.to_string()),
            seed: seed(image, file),
            size: scale.files.1,
        }));
    }
    let mounted = daemon.usage();
    let tasks = files.into_iter().enumerate().map(|(index, files)| Task {
        mode: if index % 3 == 2 { Mode::Mmap } else { Mode::Read },
        files,
        seed: index as u64,
        threads: scale.readers / PROCESSES as u64,
        code: String::new(),
        once: false,
    });
    let readers = Readers::start(tasks);
    let began = Instant::now();
    let mut busy = daemon.usage();
    while began.elapsed() < scale.duration {
        thread::sleep(Duration::from_millis(100));
        let now = daemon.usage();
        if now["worker"]["descriptors"].as_u64() > busy["worker"]["descriptors"].as_u64() {
            busy = now;
        }
    }
    let seen = readers.stop();
    let after = daemon.usage();
    seen.assert_clean();
    if let Some(group) = &limits.memory {
        assert_eq!(group.kills(), 0, "the kernel killed a process of the daemon");
    }
    let per_mount = |process: &str| {
        let rss = |usage: &Value| usage[process]["anonymous_kib"].as_f64();
        let growth = rss(&mounted)? - rss(&idle)?;
        Some((growth / scale.mounts as f64 * 10.0).round() / 10.0)
    };
    let longest = seen.waits.iter().map(|wait| wait.took().as_millis()).max();
    json!({
        "images": scale.images,
        "mounts": scale.mounts,
        "readers": scale.readers,
        "bytes_checked": seen.bytes,
        "accesses": seen.accesses,
        "wrong_bytes": seen.wrong_bytes(),
        "errors": seen.errors.len(),
        "longest_access_ms": longest.map(|longest| longest as u64),
        "worker_kib_per_mount": per_mount("worker"),
        "keeper_kib_per_mount": per_mount("keeper"),
        "idle": idle,
        "mounted": mounted,
        "most_descriptors": busy,
        "afterwards": after,
    })
}

#[test]
fn many_images_mounts_and_readers() {
    if !able("fanotify") {
        return;
    }
    let _alone = alone();
    report("scale", &run(Scale::now(), &Limits::default()));
}

/// More readers wait than a process may have descriptors, and each waiting reader's event holds
/// one.
#[test]
fn a_thousand_and_twentyfour_descriptors_are_enough() {
    if !able("fanotify") {
        return;
    }
    let _alone = alone();
    let limits = Limits { descriptors: Some(1024), ..Limits::default() };
    // The limit is the point of this test, even in the short form.
    let scale = Scale { readers: 1000, ..Scale::now() };
    report("scale-1024-descriptors", &run(scale, &limits));
}

#[test]
fn little_memory_is_enough() {
    if !able("fanotify") {
        return;
    }
    let _alone = alone();
    let scale = Scale { files: LARGE, ..Scale::now() };
    let limits = Limits { memory: Some(Cgroup::new(scale.memory)), ..Limits::default() };
    let mut figures = run(scale, &limits);
    figures["memory_limit_mib"] = scale.memory.into();
    report("scale-little-memory", &figures);
}
