//! Mounts whose reads are FUSE requests, without features that only some kernels have.

use std::{
    io::ErrorKind,
    process::{Child, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::fs::Advice;

use super::*;

/// A part of the image that is read in one round of a test, and not before.
const PART: usize = 256 << 10;

/// Requests that workers took over from the ones before them, by the log.
fn taken_over(lazuli: &Lazuli) -> usize {
    let log = lazuli.log();
    let lines = log.lines().filter(|line| line.contains("left by the worker before this one"));
    let count = |line: &str| {
        let number = line.split("requests=").nth(1)?;
        number.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<usize>().ok()
    };
    lines.map(|line| count(line).unwrap_or_else(|| panic!("{line}"))).sum()
}

/// Threads that do something over and over, until this is dropped.
#[derive(Default)]
struct Readers {
    enough: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<usize>>,
}

impl Readers {
    fn start(&mut self, mut step: impl FnMut(usize) + Send + 'static) {
        let enough = self.enough.clone();
        self.threads.push(thread::spawn(move || {
            let mut count = 0;
            while !enough.load(Ordering::Relaxed) {
                step(count);
                count += 1;
            }
            count
        }));
    }

    fn end(mut self) {
        self.enough.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            until("a reader gets its answer", || thread.is_finished());
            assert!(thread.join().unwrap() > 0);
        }
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.enough.store(true, Ordering::Relaxed);
    }
}

/// A process with its working directory in a mount, which ends when something there is not as in
/// `source`.
struct Resident(Child);

impl Resident {
    fn start(directory: &Path, source: &Path) -> Self {
        let script = "while :; do cmp part-0 \"$1/part-0\" && ls -l . > /dev/null || exit 1; done";
        let mut shell = Command::new("sh");
        shell.args(["-c", script, "sh"]).arg(source).current_dir(directory);
        Resident(shell.stdin(Stdio::null()).spawn().unwrap())
    }

    fn is_well(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn part(number: usize) -> Vec<u8> {
    odd::random(number as u64, PART)
}

#[test]
fn containers_notice_nothing_of_kills_and_takeovers() {
    notice_nothing("fuse");
}

#[test]
fn containers_notice_nothing_of_kills_and_takeovers_with_loop() {
    notice_nothing("loop");
}

fn notice_nothing(driver: &str) {
    const KILLS: usize = 12;
    const ROUNDS: usize = KILLS + 3;
    if !crate::drivers::able(driver) {
        return;
    }
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    lazuli.configure("[fetch]\namplify_bytes = 0\n");
    let source = lazuli.directory("source");
    for number in 0..=ROUNDS {
        std::fs::write(source.join(format!("part-{number}")), part(number)).unwrap();
    }
    let image = format!("{}/image:1", registry.host());
    lazuli.ok(["convert", "dir:source", &image]);
    let [root, upper, work, merged] =
        ["mnt", "upper", "work", "merged"].map(|name| lazuli.directory(name));
    lazuli.ok(["mount", &image, root.to_str().unwrap(), "--driver", driver]);
    let [lower, upper, work] = [&root, &upper, &work].map(|path| path.to_str().unwrap());
    let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
    run(
        "mount",
        &["-t", "overlay", "-o", &options, "overlay"].map(Path::new)[..]
            .iter()
            .copied()
            .chain([merged.as_path()])
            .collect::<Vec<_>>(),
    );

    let mut readers = Readers::default();
    for directory in [root.clone(), merged.clone()] {
        let file = File::open(directory.join("part-0")).unwrap();
        let expected = part(0);
        readers.start(move |count| {
            rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
            let at = count * 7919 % PART;
            let mut bytes = vec![0; (PART - at).min(50_000)];
            file.read_exact_at(&mut bytes, at as u64).unwrap();
            assert!(bytes == expected[at..at + bytes.len()], "wrong bytes at {at}");
        });
        // The kernel has to ask for names that it has not seen before.
        readers.start(move |count| {
            let error = std::fs::metadata(directory.join(format!("absent-{count}"))).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        });
    }
    let mut residents = [&root, &merged].map(|directory| Resident::start(directory, &source));
    for number in 1..=ROUNDS {
        registry.set_latency(Duration::from_secs(5));
        registry.reset_stats();
        let path = merged.join(format!("part-{number}"));
        let reader = thread::spawn(move || std::fs::read(path));
        // The worker has read the request then, and cannot answer it yet.
        until("the registry is asked", || registry.stats().requests > 0);
        if number <= KILLS {
            kill(lazuli.worker());
            registry.set_latency(Duration::ZERO);
        } else {
            registry.set_latency(Duration::ZERO);
            lazuli.ok(["daemon", "--takeover"]);
        }
        // Don't block on it: this process could not end while one of its threads waits for the
        // daemon.
        until("the reader has its bytes", || reader.is_finished());
        assert!(reader.join().unwrap().unwrap() == part(number), "round {number}: wrong bytes");
        assert!(residents.iter_mut().all(Resident::is_well), "round {number}");
    }
    readers.end();
    drop(residents);
    let taken_over = taken_over(&lazuli);
    assert!(taken_over >= ROUNDS, "{taken_over} requests were taken over");
    unmount(&merged);
    listing::assert_equal(&source, &root);
    umount(&lazuli, &root);
    lazuli.ok(["stop"]);
}

#[test]
fn workers_that_serve_fuse_alone_have_not_failed() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let lazuli = Lazuli::new();
    // A file system on which the other driver does not work.
    let state = lazuli.directory("root");
    run("mount", &[Path::new("-t"), Path::new("tmpfs"), Path::new("tmpfs"), &state]);
    std::fs::write(lazuli.directory("source").join("a"), "content").unwrap();
    lazuli.ok(["convert", "dir:source", "oci:layout:1"]);
    let mountpoint = lazuli.directory("mnt");
    lazuli.ok(["mount", "oci:layout:1", mountpoint.to_str().unwrap(), "--driver", "fuse"]);
    assert_eq!(lazuli.mount_status(&mountpoint)["driver"], "fuse");
    for _ in 0..5 {
        let worker = lazuli.worker();
        thread::sleep(Duration::from_millis(500));
        lazuli.kill(worker);
    }
    assert_eq!(std::fs::read(mountpoint.join("a")).unwrap(), b"content");
    assert_eq!(lazuli.status()["daemon"]["restarts"], 5);
    let log = lazuli.log();
    assert!(!log.contains("workers keep ending"), "{log}");
    umount(&lazuli, &mountpoint);
    lazuli.ok(["stop"]);
    unmount(&state);
}

#[test]
fn a_mount_point_is_never_empty() {
    if !require(Feature::MountsBeneath) {
        return;
    }
    let Some(node) = mounted("fuse") else { return };
    let file = node.mountpoint.join("a");
    let mut readers = Readers::default();
    readers.start(move |_| {
        // While both are dead there are errors, and the directory below stays hidden.
        let kind = std::fs::metadata(&file).err().map(|error| error.kind());
        assert_ne!(kind, Some(ErrorKind::NotFound));
    });
    for round in 0..5 {
        let pids = node.pids();
        kill_both(pids);
        until("the connection is closed", || pids.into_iter().all(is_gone));
        // The kernel has not cached this name.
        let error = std::fs::metadata(node.mountpoint.join(format!("{round}"))).unwrap_err();
        let closed = [ErrorKind::NotConnected, ErrorKind::ConnectionAborted];
        assert!(closed.contains(&error.kind()), "{error}");
        node.lazuli.mount_status(&node.mountpoint);
        listing::assert_equal(node.lazuli.path("source"), node.mountpoint.clone());
    }
    readers.end();
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let place = format!(" {} ", node.mountpoint.display());
    assert_eq!(table.lines().filter(|line| line.contains(&place)).count(), 1, "{table}");
}
