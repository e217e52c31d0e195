//! The cost of one tenant's readers and registry for another one.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::mpsc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use lazuli_testkit::{
    odd,
    registry::{FakeRegistry, Fault},
};
use serde_json::{Value, json};

use super::{
    alone,
    processes::{kill, pids},
    report,
    scale::{Daemon, Limits, images, seed},
    soak,
};
use crate::drivers::able;

/// Bytes of a file, which is a chunk.
const FILE: u64 = 5000;

/// Longer than any expected wait, since test machines are busy.
const LONG: Duration = Duration::from_secs(60);

/// Mounts the image with a number of `registry`.
fn mount(daemon: &Daemon, registry: &FakeRegistry, image: u64) -> PathBuf {
    let lazuli = &daemon.lazuli;
    let at = lazuli.directory(&format!("mnt-{image}"));
    let name = format!("{}/scale:{image}", registry.host());
    lazuli.ok(["mount", &name, at.to_str().unwrap(), "--driver", "fanotify"]);
    at
}

/// A thread that reads a file.
fn reader(path: PathBuf) -> JoinHandle<std::io::Result<Vec<u8>>> {
    thread::Builder::new().stack_size(64 << 10).spawn(move || fs::read(path)).unwrap()
}

/// Waits until this many readers of an image wait for data, up to the daemon's limit.
fn wait_for_events(daemon: &Daemon, at: &Path, count: u64) {
    let began = Instant::now();
    while daemon.lazuli.mount_status(at)["events"].as_u64().unwrap() < count {
        assert!(began.elapsed() < LONG, "{}", daemon.lazuli.log());
        thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until this many threads of this process wait in the kernel, uninterruptible except for
/// signals that kill.
fn wait_for_blocked_threads(daemon: &Daemon, count: u64) {
    let began = Instant::now();
    let is_blocked = |task: &fs::DirEntry| {
        let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('D'))
    };
    let blocked =
        || fs::read_dir("/proc/self/task").unwrap().flatten().filter(is_blocked).count() as u64;
    while blocked() < count {
        assert!(began.elapsed() < LONG, "{} of {count}\n{}", blocked(), daemon.lazuli.log());
        thread::sleep(Duration::from_millis(100));
    }
}

/// Reads all files of an image, one after the other, and returns the measurements.
fn start(daemon: &Daemon, at: &Path, image: u64, files: u64) -> Value {
    let before = daemon.lazuli.mount_status(at);
    let worker = pids(&daemon.lazuli.status()).worker;
    let processor = cpu_ms(worker);
    let began = Instant::now();
    for file in 0..files {
        let content = fs::read(at.join(file.to_string())).unwrap();
        assert!(content == odd::random(seed(image, file), FILE as usize), "{file}");
    }
    let (took, processor) = (began.elapsed(), cpu_ms(worker) - processor);
    let after = daemon.lazuli.mount_status(at);
    let counted = |what: &str| after[what].as_u64().unwrap() - before[what].as_u64().unwrap();
    json!({
        "ms": took.as_millis() as u64,
        "events": counted("events"),
        "requests": counted("requests"),
        "worker_cpu_ms": processor,
    })
}

/// Processor time of a process, all threads and both modes.
fn cpu_ms(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    // utime and stime in hundredths of a second.
    fields[11..13].iter().map(|ticks| ticks.parse::<u64>().unwrap() * 10).sum()
}

/// Mounts an image once more with another manifest, so that its blob is one of several images.
fn share(daemon: &Daemon, registry: &FakeRegistry, image: u64) {
    let manifest = registry.manifest("scale", &image.to_string()).unwrap();
    let mut manifest: Value = serde_json::from_slice(&manifest).unwrap();
    manifest["annotations"] = json!({ "shared": "by two images" });
    let kind = manifest["mediaType"].as_str().unwrap().to_owned();
    let twin = format!("{image}-twin");
    registry.put_manifest("scale", &twin, &kind, manifest.to_string().as_bytes());
    let at = daemon.lazuli.directory(&twin);
    let name = format!("{}/scale:{twin}", registry.host());
    daemon.lazuli.ok(["mount", &name, at.to_str().unwrap(), "--driver", "fanotify"]);
}

/// Thousands of readers wait for the registry of one image, while another image starts.
#[test]
fn readers_of_an_image_whose_registry_hangs_do_not_slow_another_one_down() {
    readers_slow_no_other_image_down(false);
}

/// As nodes are, where most images share their base with others.
#[test]
fn readers_of_a_shared_blob_whose_registry_hangs_do_not_slow_another_one_down() {
    readers_slow_no_other_image_down(true);
}

fn readers_slow_no_other_image_down(is_shared: bool) {
    if !able("fanotify") {
        return;
    }
    let _alone = alone();
    let (readers, files, rounds) = if soak() { (10_000, 400, 5) } else { (1500, 200, 3) };
    let hog_registry = images(1, (readers, FILE));
    // Image 0 of this registry is not used: images share no chunks.
    let registry = images(2, (files, FILE));
    let mut runs = [const { Vec::new() }; 2];
    for _ in 0..rounds {
        for (is_beside, runs) in [false, true].into_iter().zip(&mut runs) {
            let daemon = Daemon::start(&Limits::default());
            hog_registry.set_latency(Duration::ZERO);
            let hog = mount(&daemon, &hog_registry, 0);
            let victim = mount(&daemon, &registry, 1);
            if is_shared {
                share(&daemon, &hog_registry, 0);
                share(&daemon, &registry, 1);
            }
            hog_registry.set_latency(Duration::from_secs(600));
            let waiting = if is_beside { readers } else { 0 };
            let threads: Vec<_> =
                (0..waiting).map(|file| reader(hog.join(file.to_string()))).collect();
            // More of them than the daemon has descriptors for stay in the kernel's queue.
            wait_for_blocked_threads(&daemon, waiting);
            runs.push(start(&daemon, &victim, 1, files));
            let left = threads.iter().filter(|thread| !thread.is_finished()).count() as u64;
            assert_eq!(left, waiting, "no reader is denied");
            // The kernel lets them all go at once. Thousands of errors, each of which wakes all who
            // still wait, would take minutes.
            let daemon_pids = pids(&daemon.lazuli.status());
            kill(daemon_pids.keeper);
            kill(daemon_pids.worker);
            threads.into_iter().for_each(|thread| drop(thread.join().unwrap()));
        }
    }
    let best = |runs: &[Value], what: &str| {
        runs.iter().map(|run| run[what].as_u64().unwrap()).min().unwrap()
    };
    let [alone, beside] = &runs;
    let name = if is_shared { "fairness-shared" } else { "fairness" };
    report(name, &json!({ "readers": readers, "alone": alone, "beside": beside }));
    // In a common group each answer would wake all the others: five milliseconds for 1500 of them,
    // forty for 10,000.
    let (alone, beside) = (best(alone, "ms"), best(beside, "ms"));
    let most = if soak() { alone + alone / 10 } else { 2 * alone + 200 };
    assert!(beside <= most, "{beside} ms instead of {alone} ms");
}

/// The readers of an image need more slots than there are.
#[test]
fn an_image_is_served_at_once_beside_one_that_needs_all_slots() {
    if !able("fanotify") {
        return;
    }
    let _alone = alone();
    // A quarter of the descriptors may wait for data, and an eighth of these is kept for others.
    let (readers, waiting) = (300, 512 / 4 - 512 / 4 / 8);
    let registries = [images(1, (readers, FILE)), images(2, (1, FILE))];
    let daemon = Daemon::start(&Limits { descriptors: Some(512), ..Limits::default() });
    let [stuck, other] = [(0, 0), (1, 1)].map(|(at, image)| mount(&daemon, &registries[at], image));
    registries[0].set_latency(Duration::from_secs(600));
    let threads: Vec<_> = (0..readers).map(|file| reader(stuck.join(file.to_string()))).collect();
    wait_for_events(&daemon, &stuck, waiting);
    let (sender, content) = mpsc::channel();
    thread::spawn(move || sender.send(fs::read(other.join("0")).unwrap()));
    // After a minute the readers of the first image give up by themselves.
    let content = content.recv_timeout(Duration::from_secs(30)).expect("the other image is served");
    assert!(content == odd::random(seed(1, 0), FILE as usize));
    let left = threads.iter().filter(|thread| !thread.is_finished()).count() as u64;
    assert_eq!(left, readers, "no reader is denied");
    drop(daemon);
    threads.into_iter().for_each(|thread| drop(thread.join().unwrap().unwrap_err()));
}

/// Two registries have the same image. The first one hangs.
#[test]
fn a_reader_does_not_wait_for_the_registry_that_another_one_has_named() {
    if !able("fanotify") {
        return;
    }
    let _alone = alone();
    let registries = [images(1, (4, FILE)), images(1, (4, FILE))];
    let daemon = Daemon::start(&Limits::default());
    let lazuli = &daemon.lazuli;
    let mount = |registry: &FakeRegistry, name: &str| {
        let at = lazuli.directory(name);
        let image = format!("{}/scale:0", registry.host());
        lazuli.ok(["mount", &image, at.to_str().unwrap(), "--driver", "fanotify"]);
        at
    };
    let first = mount(&registries[0], "first");
    registries[0].set_latency(Duration::from_secs(600));
    let waits = reader(first.join("0"));
    wait_for_events(&daemon, &first, 1);
    thread::sleep(Duration::from_millis(300));
    let second = mount(&registries[1], "second");
    let (sender, content) = mpsc::channel();
    thread::spawn(move || sender.send(fs::read(second.join("0")).unwrap()));
    let content = content.recv_timeout(Duration::from_secs(20)).expect("it is in the other one");
    assert!(content == odd::random(seed(0, 0), FILE as usize));
    waits.join().unwrap().unwrap();
}

/// A registry lets its answers trickle: they take up all the memory that answers may have.
#[test]
fn answers_that_trickle_leave_memory_to_another_image() {
    if !able("fanotify") {
        return;
    }
    let _alone = alone();
    const LARGE: u64 = 1 << 20;
    let slow = images(1, (96, LARGE));
    let registry = images(2, (1, FILE));
    let daemon = Daemon::start(&Limits::default());
    let [hog, other] = [mount(&daemon, &slow, 0), mount(&daemon, &registry, 1)];
    slow.fault("GET", "/blobs/", usize::MAX, Fault::Drip(Duration::from_millis(100)));
    let threads: Vec<_> = (0..96).map(|file| reader(hog.join(file.to_string()))).collect();
    wait_for_events(&daemon, &hog, 96);
    thread::sleep(Duration::from_secs(2));
    let (sender, content) = mpsc::channel();
    let began = Instant::now();
    thread::spawn(move || sender.send(fs::read(other.join("0")).unwrap()));
    // A request that delivers too little is given up after 15 seconds.
    let content = content.recv_timeout(Duration::from_secs(10)).expect("there is room for it");
    assert!(content == odd::random(seed(1, 0), FILE as usize), "{:?}", began.elapsed());
    drop(daemon);
    threads.into_iter().for_each(|thread| drop(thread.join().unwrap()));
}
