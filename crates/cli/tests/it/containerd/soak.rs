//! A node's life: pods and images come and go, and every process of the node dies repeatedly. All
//! reads are right, and everything is released in the end.

use std::{
    collections::{BTreeMap, VecDeque},
    env,
    io::{self, Write},
    panic,
    sync::Once,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use lazuli_testkit::{
    content::Choices,
    cri::{CriError, Output, Pod},
    listing::Listing,
};
use rustix::process::Signal;
use serde_json::json;

use super::{
    leaks,
    programs::{Containerd, on_both},
    rig::Rig,
};
use crate::{
    lazuli::corpus,
    reliability::{alone, report, soak},
};

on_both!(a_node_lives_and_leaves_nothing);

/// Pods at the same time.
const PODS: usize = 12;

/// Images of the corpus, and whether they are converted.
const IMAGES: [(&str, bool); 4] =
    [("debian-slim", true), ("redis", true), ("lua", true), ("debian-slim", false)];

/// Number of recent events shown after a failure.
const LATEST: usize = 30;

/// How long containerd may go on to refuse starts after something died: it tries to connect again
/// every 3 s at least.
const RETURN: Duration = Duration::from_secs(15);

/// The endless command of a container.
const FOREVER: [&str; 2] = ["sleep", "1000000"];

/// Writes in a container.
const WRITES: &str = "rm -rf /usr/share/doc; mv /usr/share/man /man 2>/dev/null; cp -r /usr/lib/apt /root 2>/dev/null; \
    echo new >> /etc/passwd; mkdir -p /opt/a/b && touch /opt/a/b/c && rm -r /opt; true";

/// Files that Kubernetes replaces in every container.
const FILES_OF_KUBERNETES: [&str; 3] = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];

/// An image and its files.
struct Image {
    name: String,
    /// Path and SHA-256.
    files: Vec<(String, String)>,
}

/// A pod that was started.
struct Running {
    pod: Pod,
    /// Index of its image.
    image: usize,
    /// Whether it has written: its files differ from the image's then.
    written: bool,
    /// Whether its container was killed.
    dead: bool,
}

/// The errors allowed during an operation, by the process that dies meanwhile.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    /// Nothing.
    Quiet,
    /// Lazuli: containers notice nothing, but containerd's requests may fail.
    LazuliDies,
    /// containerd: its clients are told that it is gone.
    ContainerdDies,
}

struct Node<'a> {
    rig: &'a Rig,
    seed: u64,
    choices: Choices,
    images: Vec<Image>,
    pods: Vec<Running>,
    counts: BTreeMap<&'static str, u64>,
    /// Recent events, the latest last.
    latest: VecDeque<String>,
    /// Names that were given to pods.
    named: u64,
    began: Instant,
    /// Longest time from a start that failed because something died to the same start that
    /// succeeded.
    longest_return: Duration,
}

fn a_node_lives_and_leaves_nothing(containerd: Containerd) {
    let Some(rig) = Rig::new(containerd, "debian-slim") else { return };
    let layouts: Option<Vec<_>> = IMAGES.iter().map(|(name, _)| corpus(name)).collect();
    let Some(layouts) = layouts else { return };
    let _alone = alone();
    tell_at_once();
    let seed = match env::var("LAZULI_SEED") {
        Ok(seed) => seed.parse().expect("LAZULI_SEED is a number"),
        Err(_) => SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs(),
    };
    let images = IMAGES.iter().zip(&layouts).map(|((name, lazy), layout)| {
        let ordinary = rig.copy(layout, &format!("{name}:ordinary"));
        let image =
            if *lazy { rig.convert(layout, &format!("{name}:lazy")) } else { ordinary.clone() };
        rig.ctr(&["image", "pull", "--plain-http", "--snapshotter", "overlayfs", &ordinary]);
        let files = files(&rig.tree("overlayfs", &rig.chain_id(&ordinary)));
        rig.ctr(&["image", "rm", "--sync", &ordinary]);
        Image { name: image, files }
    });
    let mut node = Node {
        rig: &rig,
        seed,
        choices: Choices::new(seed),
        images: images.collect(),
        pods: Vec::new(),
        counts: BTreeMap::new(),
        latest: VecDeque::new(),
        named: 0,
        began: Instant::now(),
        longest_return: Duration::ZERO,
    };
    let duration = Duration::from_secs(if soak() { 30 * 60 } else { 20 });
    let began = node.began;
    while began.elapsed() < duration {
        node.step();
    }
    node.end();
    let name = format!("containerd-soak-{containerd:?}").to_lowercase();
    report(
        &name,
        &json!({
            "seed": seed,
            "seconds": began.elapsed().as_secs(),
            "longest_return_ms": node.longest_return.as_millis() as u64,
            "counts": node.counts,
        }),
    );
}

/// Regular files that every user may read, with their digests.
fn files(tree: &Listing) -> Vec<(String, String)> {
    let allows = |path: &str, bit: u32| {
        let mode = tree.get(path.as_bytes()).and_then(|entry| entry.split(' ').nth(1));
        mode.is_some_and(|mode| u32::from_str_radix(mode, 8).is_ok_and(|mode| mode & bit != 0))
    };
    let readable = |path: &str| {
        let below = path.match_indices('/').skip(1).map(|(end, _)| &path[..end]);
        allows(path, 0o4) && below.into_iter().all(|directory| allows(directory, 0o1))
    };
    let of = |path: &[u8]| {
        let entry = tree.get(path)?;
        let digest = entry.split(' ').find_map(|word| word.strip_prefix("sha256:"))?;
        let path = std::str::from_utf8(path).ok()?;
        let plain = path.bytes().all(|byte| byte.is_ascii_graphic());
        let own = plain && readable(path) && !FILES_OF_KUBERNETES.contains(&path);
        (own && entry.starts_with("file")).then(|| (path.to_owned(), digest.to_owned()))
    };
    tree.paths().filter_map(of).collect()
}

/// Reports failures at once, not only after all tests: this sequence of events never happens again,
/// and logs are truncated.
fn tell_at_once() {
    static TOLD: Once = Once::new();
    TOLD.call_once(|| {
        let then = panic::take_hook();
        panic::set_hook(Box::new(move |failure| {
            // The harness captures tests' output until they end, but not writes to stderr itself.
            let _ = writeln!(io::stderr(), "{failure}");
            then(failure);
        }));
    });
}

impl Drop for Node<'_> {
    /// Prints the events before a failure.
    fn drop(&mut self) {
        if thread::panicking() {
            let mut output = io::stderr().lock();
            let _ = writeln!(output, "LAZULI_SEED={}", self.seed);
            for line in &self.latest {
                let _ = writeln!(output, "{line}");
            }
        }
    }
}

impl Node<'_> {
    fn count(&mut self, what: &'static str, times: usize) {
        if self.latest.len() == LATEST {
            self.latest.pop_front();
        }
        let seconds = self.began.elapsed().as_secs_f64();
        self.latest.push_back(format!("{seconds:.3} {what} {times}"));
        *self.counts.entry(what).or_default() += times as u64;
    }

    fn step(&mut self) {
        match self.choices.below(100) {
            0..26 => self.work(Meanwhile::Quiet, || {}),
            26..40 => self.write(),
            40..47 => self.kill_a_container(),
            47..69 => self.remove_pods(),
            69..74 => self.remove_an_image(),
            74..79 => self.collect_garbage(),
            79..84 => {
                self.count("worker killed", 1);
                let rig = self.rig;
                self.work(Meanwhile::LazuliDies, || rig.kill_worker());
            }
            84..88 => {
                self.count("keeper killed", 1);
                let rig = self.rig;
                self.work(Meanwhile::LazuliDies, || rig.kill_keeper());
            }
            88..91 => {
                self.count("takeover", 1);
                let rig = self.rig;
                self.work(Meanwhile::LazuliDies, || drop(rig.lazuli.ok(["daemon", "--takeover"])));
            }
            91..93 => {
                self.count("both killed", 1);
                // No reads meanwhile: the kernel would let them through to holes.
                self.rig.kill_lazuli();
                self.rig.start_daemon();
                self.rig.reconnect();
            }
            93..95 => self.restart_containerd(Signal::TERM),
            95..98 => self.restart_containerd(Signal::KILL),
            _ => {
                self.count("all three killed", 1);
                self.rig.end_containerd(Signal::KILL);
                self.rig.kill_lazuli();
                self.rig.start_daemon();
                self.rig.start_containerd();
                self.forget_strangers();
            }
        }
    }

    fn restart_containerd(&mut self, signal: Signal) {
        self.count(
            if signal == Signal::KILL { "containerd killed" } else { "containerd restarted" },
            1,
        );
        let rig = self.rig;
        self.work(Meanwhile::ContainerdDies, || {
            rig.end_containerd(signal);
            rig.start_containerd();
        });
        self.forget_strangers();
    }

    /// Starts some pods and reads in others, concurrently, while something else happens.
    fn work(&mut self, meanwhile: Meanwhile, happen: impl FnOnce()) {
        let wanted = self.choices.below(5) as usize;
        let starts: Vec<(String, usize)> = (0..wanted.min(PODS - self.pods.len()))
            .map(|_| {
                self.named += 1;
                let image = self.choices.below(self.images.len() as u64) as usize;
                (format!("pod-{}", self.named), image)
            })
            .collect();
        let reads: Vec<_> = (0..4).filter_map(|_| self.choose_reads()).collect();
        let delay = Duration::from_millis(self.choices.below(300));
        let (rig, images) = (self.rig, &self.images);
        let (started, read) = thread::scope(|scope| {
            let starting = starts.iter().map(|(name, image)| {
                let image = &images[*image].name;
                scope.spawn(move || {
                    rig.cri.pull(image, None)?;
                    rig.cri.start(name, image, &FOREVER)
                })
            });
            let starting: Vec<_> = starting.collect();
            let reading = reads.iter().map(|(container, files)| {
                scope.spawn(move || {
                    let paths = files.iter().map(|(path, _)| &**path);
                    let command: Vec<_> = ["sha256sum"].into_iter().chain(paths).collect();
                    rig.cri.exec(container, &command)
                })
            });
            let reading: Vec<_> = reading.collect();
            thread::sleep(delay);
            happen();
            let join = |all: Vec<thread::ScopedJoinHandle<'_, _>>| -> Vec<Result<Pod, CriError>> {
                all.into_iter().map(|one| one.join().unwrap()).collect()
            };
            let read: Vec<Result<Output, CriError>> =
                reading.into_iter().map(|one| one.join().unwrap()).collect();
            (join(starting), read)
        });
        for (started, (name, image)) in started.into_iter().zip(starts) {
            let pod = match started {
                Ok(pod) => pod,
                Err(error) if meanwhile == Meanwhile::Quiet => panic!("{name}: {error}"),
                Err(_) => self.start_again(&name, image),
            };
            self.count("pods started", 1);
            self.pods.push(Running { pod, image, written: false, dead: false });
        }
        for (read, (container, files)) in read.into_iter().zip(reads) {
            match read {
                Ok(output) => {
                    assert_digests(&output, &files);
                    self.count("files checked", files.len());
                }
                Err(error) => {
                    assert!(meanwhile == Meanwhile::ContainerdDies, "{container}: {error}");
                    self.count("reads that failed meanwhile", 1);
                }
            }
        }
    }

    /// Like Kubernetes, which tries again: containerd notices after a while that Lazuli is back.
    fn start_again(&mut self, name: &str, image: usize) -> Pod {
        self.count("starts that failed meanwhile", 1);
        let (began, rig, image) = (Instant::now(), self.rig, &self.images[image].name);
        for attempt in 0.. {
            let pulled = rig.cri.pull(image, None);
            let started =
                pulled.and_then(|_| rig.cri.start(&format!("{name}-{attempt}"), image, &FOREVER));
            match started {
                Ok(pod) => {
                    self.longest_return = self.longest_return.max(began.elapsed());
                    return pod;
                }
                Err(error) => assert!(began.elapsed() < RETURN, "{name}: {error}"),
            }
            thread::sleep(Duration::from_millis(50));
        }
        unreachable!("every attempt ends")
    }

    /// A container and some of its files.
    fn choose_reads(&mut self) -> Option<(String, Vec<(String, String)>)> {
        let alive: Vec<_> = self.pods.iter().filter(|pod| !pod.dead && !pod.written).collect();
        let pod = alive.get(self.choices.below(alive.len() as u64) as usize)?;
        let files = &self.images[pod.image].files;
        let chosen = (0..1 + self.choices.below(20))
            .map(|_| files[self.choices.below(files.len() as u64) as usize].clone());
        Some((pod.pod.container.clone(), chosen.collect()))
    }

    fn write(&mut self) {
        let chosen = self.choices.below(self.pods.len() as u64) as usize;
        let Some(pod) = self.pods.get_mut(chosen).filter(|pod| !pod.dead) else { return };
        pod.written = true;
        let output = self.rig.cri.exec(&pod.pod.container, &["sh", "-c", WRITES]).unwrap();
        assert_eq!(output.status, 0, "{output:?}");
        self.count("writers", 1);
    }

    fn kill_a_container(&mut self) {
        let chosen = self.choices.below(self.pods.len() as u64) as usize;
        let Some(pod) = self.pods.get_mut(chosen).filter(|pod| !pod.dead) else { return };
        pod.dead = true;
        self.rig.ctr(&["task", "kill", "--signal", "KILL", &pod.pod.container]);
        self.count("containers killed", 1);
    }

    fn remove_pods(&mut self) {
        let few = 1 + self.choices.below(4) as usize;
        let rest = self.pods.len().saturating_sub(few);
        let removed = self.pods.split_off(rest);
        let rig = self.rig;
        thread::scope(|scope| {
            for pod in &removed {
                scope.spawn(|| rig.cri.remove(&pod.pod.sandbox).unwrap());
            }
        });
        self.count("pods removed", removed.len());
    }

    /// Even an image in use: its name is removed, and the next pod pulls it again.
    fn remove_an_image(&mut self) {
        let image = self.choices.below(self.images.len() as u64) as usize;
        self.rig.cri.remove_image(&self.images[image].name).unwrap();
        self.count("images removed", 1);
    }

    fn collect_garbage(&mut self) {
        self.rig.ctr(&["content", "prune", "references"]);
        self.count("garbage collected", 1);
    }

    /// Removes unknown pods: those of starts that were cut off.
    fn forget_strangers(&mut self) {
        for sandbox in self.rig.cri.sandboxes().unwrap() {
            if !self.pods.iter().any(|pod| pod.pod.sandbox == sandbox.id) {
                self.rig.cri.remove(&sandbox.id).unwrap();
                self.count("pods that were cut off", 1);
            }
        }
    }

    /// Removes everything.
    fn end(&mut self) {
        while !self.pods.is_empty() {
            self.remove_pods();
        }
        self.forget_strangers();
        let forgotten = leaks::end_forgotten(self.rig);
        self.count("containers that containerd forgot", forgotten);
        for image in &self.images {
            self.rig.cri.remove_image(&image.name).unwrap();
        }
        // Of pulls that containerd died in: it keeps theirs for a day.
        let leases = self.rig.ctr(&["leases", "ls", "-q"]);
        for lease in leases.lines() {
            self.rig.ctr(&["leases", "rm", "--sync", lease]);
        }
        self.rig.nothing_left();
    }
}

/// Compares every line of `sha256sum`.
fn assert_digests(output: &Output, files: &[(String, String)]) {
    let printed = String::from_utf8_lossy(&output.stdout);
    let expected: String =
        files.iter().map(|(path, digest)| format!("{digest}  {path}\n")).collect();
    assert_eq!(printed, expected, "{}", String::from_utf8_lossy(&output.stderr));
}
