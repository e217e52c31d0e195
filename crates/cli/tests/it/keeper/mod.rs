//! Readers while the daemon's processes die or are replaced.

use std::{
    fs::File,
    io::Read as _,
    os::unix::{fs::FileExt as _, net::UnixDatagram},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use lazuli_sys::mmap::{FinishedFile, Map};
use lazuli_testkit::{
    kernel::{Feature, require},
    listing, odd,
    registry::FakeRegistry,
};
use rustix::{
    net::{AddressFamily, SocketFlags, SocketType},
    process::{Pid, Signal, kill_process},
};

use crate::{drivers, lazuli::Lazuli};

mod fuse;

/// Longer than any step takes on the busiest machine.
const TIMEOUT: Duration = Duration::from_secs(30);

const SIZE: usize = 4 << 20;

struct Node {
    lazuli: Lazuli,
    registry: FakeRegistry,
    mountpoint: PathBuf,
}

/// A mounted image with one file `a` of random bytes, from a registry that can be made slow.
fn mounted(driver: &str) -> Option<Node> {
    if !crate::drivers::able(driver) {
        return None;
    }
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let source = lazuli.directory("source");
    std::fs::write(source.join("a"), odd::random(1, SIZE)).unwrap();
    let image = format!("{}/image:1", registry.host());
    lazuli.ok(["convert", "dir:source", &image]);
    let mountpoint = lazuli.directory("mnt");
    lazuli.ok(["mount", &image, mountpoint.to_str().unwrap(), "--driver", driver]);
    Some(Node { lazuli, registry, mountpoint })
}

impl Node {
    fn file(&self) -> File {
        File::open(self.mountpoint.join("a")).unwrap()
    }

    fn pids(&self) -> [Pid; 2] {
        let daemon = self.lazuli.status()["daemon"].clone();
        ["keeper_pid", "worker_pid"].map(|key| {
            let pid = daemon[key].as_i64().unwrap_or_else(|| panic!("{key} in {daemon:#}"));
            Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
        })
    }

    /// Starts to read a megabyte that takes a second to arrive, and acts meanwhile.
    fn read_while(&self, at: u64, act: impl FnOnce(&Self)) -> std::io::Result<Vec<u8>> {
        self.registry.set_latency(Duration::from_secs(1));
        let file = self.file();
        let reader = thread::spawn(move || {
            let mut bytes = vec![0; 1 << 20];
            file.read_exact_at(&mut bytes, at).map(|()| bytes)
        });
        thread::sleep(Duration::from_millis(300));
        act(self);
        self.registry.set_latency(Duration::ZERO);
        reader.join().unwrap()
    }
}

fn kill(pid: Pid) {
    kill_process(pid, Signal::KILL).unwrap();
}

/// Kills both at the same instant: neither gets to replace the other. A thread runs on until it is
/// scheduled with the signal, so all have to have stopped first. The worker is killed before the
/// keeper: the kernel continues a stopped process group when the parent of its leader ends.
pub(crate) fn kill_both([keeper, worker]: [Pid; 2]) {
    let pids = [worker, keeper];
    for pid in pids {
        kill_process(pid, Signal::STOP).unwrap();
    }
    for pid in pids {
        until("all threads have stopped", || {
            let threads = std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero()));
            threads.unwrap().flatten().all(|thread| is_stopped(&thread.path()))
        });
    }
    pids.into_iter().for_each(kill);
}

/// Returns whether a thread is stopped, or gone.
fn is_stopped(thread: &Path) -> bool {
    let stat = std::fs::read_to_string(thread.join("stat")).unwrap_or_default();
    // The state follows the name, which may have any character.
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['T', 'Z', 'X']))
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < TIMEOUT, "{what}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn part(at: usize) -> Vec<u8> {
    odd::random(1, SIZE)[at..at + (1 << 20)].to_vec()
}

#[test]
fn a_reader_waits_while_the_worker_is_started_again() {
    for driver in drivers::here() {
        let Some(node) = mounted(driver) else { continue };
        let [keeper, worker] = node.pids();
        let bytes = node.read_while(1 << 20, |_| kill(worker)).unwrap();
        assert!(bytes == part(1 << 20), "{driver}: wrong bytes");
        let [same, other] = node.pids();
        assert!(same == keeper && other != worker, "{driver}");
        let status = node.lazuli.status();
        assert_eq!(status["daemon"]["restarts"], 1, "{status:#}");
        assert!(status["daemon"]["last_exit"].as_str().unwrap().contains("signal 9"), "{status:#}");
        listing::assert_equal(node.lazuli.path("source"), node.mountpoint.clone());
    }
}

#[test]
fn a_worker_whose_keeper_dies_gets_another_one() {
    for driver in drivers::here() {
        let Some(node) = mounted(driver) else { continue };
        let [keeper, worker] = node.pids();
        let bytes = node.read_while(0, |_| kill(keeper)).unwrap();
        assert!(bytes == part(0));
        until("another keeper", || node.pids()[0] != keeper);
        let [other, same] = node.pids();
        assert_eq!(same, worker);
        // It is as good as the first one.
        let bytes = node.read_while(1 << 20, |_| kill(worker)).unwrap();
        assert!(bytes == part(1 << 20));
        assert_eq!(node.pids()[0], other);
        umount(&node.lazuli, &node.mountpoint);
        node.lazuli.ok(["stop"]);
        for pid in [other, same] {
            let path = format!("/proc/{}", pid.as_raw_nonzero());
            until("all processes end", || !Path::new(&path).exists());
        }
    }
}

/// Keeper and worker die, and the worker has just started another keeper: it must not go on beside
/// the next daemon.
#[test]
fn a_keeper_without_the_lock_ends() {
    if !require(Feature::Root) {
        return;
    }
    let lazuli = Lazuli::new();
    lazuli.directory("root");
    let (worker, keeper) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let mut child = lazuli.command(["daemon", "--keep"]).stdin(keeper).spawn().unwrap();
    drop(worker);
    let mut ended = None;
    until("the keeper's end", || {
        ended = child.try_wait().unwrap();
        ended.is_some()
    });
    assert!(!ended.unwrap().success());
}

#[test]
fn the_keeper_stays_small() {
    let Some(node) = mounted("fanotify") else { return };
    // The kernel maps code in pieces of up to 2 MiB: that of a debug build does not fit.
    // Its relocations alone take 2.6 MB.
    let (what, limit) = match cfg!(debug_assertions) {
        true => ("RssAnon:", 4 << 10),
        false => ("VmRSS:", 2 << 10),
    };
    for _ in 0..3 {
        let [keeper, worker] = node.pids();
        let status = format!("/proc/{}/status", keeper.as_raw_nonzero());
        until("it is small", || {
            let text = std::fs::read_to_string(&status).unwrap();
            let line = text.lines().find(|line| line.starts_with(what)).unwrap();
            line.split_ascii_whitespace().nth(1).unwrap().parse::<u64>().unwrap() < limit
        });
        kill(worker);
    }
}

#[test]
fn zeros_that_were_read_without_a_daemon_are_dropped() {
    let Some(node) = mounted("fanotify") else { return };
    let pids = node.pids();
    kill_both(pids);
    until("the group is closed", || pids.into_iter().all(is_gone));
    let mut seen = vec![0; SIZE];
    node.file().read_exact_at(&mut seen, 0).unwrap();
    assert!(seen.iter().all(|byte| *byte == 0), "or there is nothing to forget");
    // A page that is mapped is not dropped as others are.
    let file = FinishedFile::open(&node.mountpoint.join("a")).unwrap();
    let map = Map::of(file).unwrap();
    assert_eq!(map[1 << 20], 0);
    let status = node.lazuli.mount_status(&node.mountpoint);
    if status["stale_pages"] == 0 {
        assert!(map[..] == odd::random(1, SIZE)[..], "the mapping has other bytes");
    } else {
        assert!(!Path::new("/sys/devices/system/node/node0/reclaim").exists(), "{status:#}");
        drop(map);
    }
    listing::assert_equal(node.lazuli.path("source"), node.mountpoint.clone());
}

#[test]
fn a_reader_notices_nothing_of_a_takeover() {
    for driver in drivers::here() {
        let Some(node) = mounted(driver) else { continue };
        let [keeper, worker] = node.pids();
        let bytes = node.read_while(2 << 20, |node| {
            node.lazuli.ok(["daemon", "--takeover"]);
        });
        assert!(bytes.unwrap() == part(2 << 20), "{driver}: wrong bytes");
        let [new_keeper, new_worker] = node.pids();
        assert!(new_keeper != keeper && new_worker != worker, "{driver}");
        listing::assert_equal(node.lazuli.path("source"), node.mountpoint.clone());
        umount(&node.lazuli, &node.mountpoint);
        node.lazuli.ok(["stop"]);
    }
}

/// The file of the image's metadata on this node.
fn bootstrap(node: &Node) -> PathBuf {
    let images = std::fs::read_dir(node.lazuli.root().join("images")).unwrap();
    images.into_iter().next().unwrap().unwrap().path().join("bootstrap.digest")
}

#[test]
fn a_program_that_cannot_serve_takes_nothing_over() {
    let Some(node) = mounted("fanotify") else { return };
    let before = node.pids();
    // Simulates a version that cannot read the records.
    let path = bootstrap(&node);
    let digest = std::fs::read(&path).unwrap();
    std::fs::write(&path, "other").unwrap();
    let error = node.lazuli.fails(["daemon", "--takeover"]);
    assert!(error.contains("failed its check"), "{error}");
    assert_eq!(node.pids(), before);
    std::fs::write(&path, digest).unwrap();
    listing::assert_equal(node.lazuli.path("source"), node.mountpoint.clone());
}

#[test]
fn readers_of_an_image_that_cannot_be_served_again_get_errors() {
    let Some(node) = mounted("fanotify") else { return };
    let file = node.file();
    let mut first = [0; 4096];
    file.read_exact_at(&mut first, 0).unwrap();
    std::fs::write(bootstrap(&node), "other").unwrap();
    let [_, worker] = node.pids();
    kill(worker);
    until("another worker", || node.pids()[1] != worker);
    let mut later = [0; 4096];
    let error = file.read_exact_at(&mut later, 3 << 20).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5));
    assert_eq!(node.lazuli.status()["mounts"].as_array().unwrap().len(), 0);
    drop(file);
    // The image itself can be had again.
    let image = format!("{}/image:1", node.registry.host());
    node.lazuli.ok(["mount", &image, node.mountpoint.to_str().unwrap()]);
    listing::assert_equal(node.lazuli.path("source"), node.mountpoint.clone());
}

#[test]
fn workers_that_keep_ending_are_reported_and_their_readers_wait() {
    let Some(node) = mounted("fanotify") else { return };
    let [keeper, worker] = node.pids();
    // No worker can open the cache as long as another process has it.
    let path = node.lazuli.root().join("cache/lock");
    let lock = File::open(path).unwrap();
    let bytes = node.read_while(0, |node| {
        kill_process(keeper, Signal::STOP).unwrap();
        kill(worker);
        until("the lock is free", || lock.try_lock().is_ok());
        kill_process(keeper, Signal::CONT).unwrap();
        let error = node.lazuli.fails(["status"]);
        assert!(error.contains("worker does not answer"), "{error}");
        lock.unlock().unwrap();
    });
    assert!(bytes.unwrap() == part(0));
    node.lazuli.status();
}

/// A takeover whose new worker blocks until released: one of the records that it reads is a pipe.
struct Stuck {
    pipe: PathBuf,
    takeover: std::process::Child,
}

impl Stuck {
    fn new(node: &Node) -> Self {
        let [_, worker] = node.pids();
        let pipe = node.lazuli.root().join("filesystems/stuck.json");
        run("mkfifo", &[&pipe]);
        let takeover = node.lazuli.command(["daemon", "--takeover"]).spawn().unwrap();
        until("the old worker leaves", || is_gone(worker));
        // The new one opens the pipe by now; if not, it will.
        thread::sleep(Duration::from_millis(300));
        Stuck { pipe, takeover }
    }

    fn go_on(&self) {
        drop(File::options().write(true).open(&self.pipe).unwrap());
        std::fs::remove_file(&self.pipe).unwrap();
    }

    fn ended(mut self) -> bool {
        self.takeover.wait().unwrap().success()
    }
}

fn run(program: &str, arguments: &[&Path]) {
    assert!(Command::new(program).args(arguments).status().unwrap().success(), "{program}");
}

/// A program that another test starts has copies of our open files until it is executed.
fn unmount(path: &Path) {
    let unmounted = || Command::new("umount").arg(path).status().unwrap().success();
    until("the mount is unused", unmounted);
}

/// The same for an image.
fn umount(lazuli: &Lazuli, path: &Path) {
    let unmounted = || lazuli.output([Path::new("umount"), path]).status.success();
    until("the image is unused", unmounted);
}

pub(crate) fn is_gone(pid: Pid) -> bool {
    // No descriptor of a process that was not waited for is left.
    !Path::new(&format!("/proc/{}/fd/0", pid.as_raw_nonzero())).exists()
}

/// The process of this state directory that was started with `flag`.
fn process(node: &Node, flag: &str) -> Pid {
    let root = node.lazuli.root();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_it = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        line.contains(root.to_str().unwrap()) && line.split('\0').any(|word| word == flag)
    };
    Pid::from_raw(pids.find(is_it).unwrap_or_else(|| panic!("no process runs with {flag}")))
        .unwrap()
}

#[test]
fn a_takeover_survives_the_old_keepers_death() {
    for driver in drivers::here() {
        let Some(node) = mounted(driver) else { continue };
        let before = node.pids();
        let bytes = node.read_while(1 << 20, |node| {
            let stuck = Stuck::new(node);
            kill(before[0]);
            stuck.go_on();
            assert!(stuck.ended());
        });
        assert!(bytes.unwrap() == part(1 << 20));
        assert!(node.pids().iter().all(|pid| !before.contains(pid)));
        listing::assert_equal(node.lazuli.path("source"), node.mountpoint.clone());
    }
}

#[test]
fn the_old_daemon_goes_on_when_its_successor_dies() {
    for driver in drivers::here() {
        let Some(node) = mounted(driver) else { continue };
        let before = node.pids();
        let bytes = node.read_while(1 << 20, |node| {
            let stuck = Stuck::new(node);
            let [successor, worker] = ["--succeed", "--worker"].map(|flag| process(node, flag));
            kill(successor);
            // Once it serves, it continues without its keeper.
            until("the new worker gives up", || is_gone(worker));
            stuck.go_on();
            assert!(!stuck.ended());
        });
        assert!(bytes.unwrap() == part(1 << 20));
        assert_eq!(node.pids()[0], before[0]);
        listing::assert_equal(node.lazuli.path("source"), node.mountpoint.clone());
    }
}

#[test]
fn a_stop_in_the_middle_of_a_takeover_stops_both() {
    let Some(node) = mounted("fanotify") else { return };
    let before = node.pids();
    let bytes = node.read_while(1 << 20, |node| {
        let stuck = Stuck::new(node);
        kill_process(before[0], Signal::TERM).unwrap();
        thread::sleep(Duration::from_millis(100));
        stuck.go_on();
        stuck.ended();
    });
    // The reader had its file open: it may be served to the end, or get an error.
    assert!(bytes.is_ok_and(|bytes| bytes == part(1 << 20)) || !node.mountpoint.join("a").exists());
    until("nothing is mounted", || !node.mountpoint.join("a").exists());
    until("nothing runs", || node.lazuli.output(["status"]).status.code() == Some(1));
    assert!(is_gone(before[0]));
}

#[test]
fn a_mount_that_is_covered_is_served() {
    let Some(node) = mounted("fanotify") else { return };
    let file = node.file();
    let [_, worker] = node.pids();
    let tmpfs = ["-t", "tmpfs", "tmpfs"].map(Path::new);
    run("mount", &[&tmpfs[..], &[node.mountpoint.as_path()]].concat());
    kill(worker);
    until("another worker", || node.pids()[1] != worker);
    let mut bytes = vec![0; 1 << 20];
    file.read_exact_at(&mut bytes, 3 << 20).unwrap();
    unmount(&node.mountpoint);
    assert!(bytes == part(3 << 20));
    drop(file);
    listing::assert_equal(node.lazuli.path("source"), node.mountpoint.clone());
    unmount(&node.mountpoint);
}

#[test]
fn a_mount_inside_is_not_mistaken_for_the_image() {
    let Some(node) = mounted("fanotify") else { return };
    let inside = node.mountpoint.join("a");
    let other = node.lazuli.path("config.toml");
    run("mount", &[Path::new("--bind"), &other, &inside]);
    kill_both(node.pids());
    let status = node.lazuli.mount_status(&node.mountpoint);
    run("umount", &[&inside]);
    assert_eq!(status["stale_pages"], 0, "{status:#}");
    listing::assert_equal(node.lazuli.path("source"), node.mountpoint.clone());
}

/// The service manager's side: takes the descriptors that the daemon stores.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
    store: Vec<(String, std::os::fd::OwnedFd)>,
    ready: bool,
}

impl Manager {
    fn new(path: PathBuf) -> Self {
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_nonblocking(true).unwrap();
        Manager { socket, path, store: Vec::new(), ready: false }
    }

    fn listen(&mut self) {
        use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
        loop {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut bytes = [0; 4096];
            let mut parts = [std::io::IoSliceMut::new(&mut bytes)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let Ok(received) = recvmsg(&self.socket, &mut parts, &mut control, flags) else {
                return;
            };
            let descriptor = control.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
                _ => None,
            });
            let text = String::from_utf8(bytes[..received.bytes].to_vec()).unwrap();
            let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
            self.ready |= text.lines().any(|line| line == "READY=1");
            match (text.contains("FDSTORE=1"), name, descriptor) {
                (true, Some(name), Some(descriptor)) => {
                    self.store.retain(|(known, _)| known != name);
                    self.store.push((name.to_owned(), descriptor));
                }
                (_, Some(name), None) => self.store.retain(|(known, _)| known != name),
                _ => {}
            }
        }
    }

    /// Starts the daemon as the service manager does: with the store from descriptor 3 on.
    fn start(&mut self, lazuli: &Lazuli) -> std::process::Child {
        let names: Vec<_> = self.store.iter().map(|(name, _)| name.as_str()).collect();
        let daemon = lazuli.command(["daemon"]);
        let mut command = Command::new("python3");
        let script = "import os, sys\n\
            from socket import socket, AF_UNIX, SOCK_STREAM, recv_fds\n\
            s = socket(AF_UNIX, SOCK_STREAM, fileno=0)\n\
            n, fds = int(sys.argv[1]), []\n\
            while len(fds) < n: fds += recv_fds(s, 1, 1)[1]\n\
            fds = [os.dup2(fd, 100 + i) for i, fd in enumerate(fds)]\n\
            for i, fd in enumerate(fds): os.dup2(fd, 3 + i)\n\
            os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(n))\n\
            os.execv(sys.argv[2], sys.argv[2:])\n";
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        command.args(["-c", script, &names.len().to_string()]).arg(daemon.get_program());
        command.args(daemon.get_args()).env("NOTIFY_SOCKET", &self.path);
        command.env("LISTEN_FDNAMES", names.join(":")).stdin(std::os::fd::OwnedFd::from(theirs));
        let log = File::options().create(true).append(true).open(lazuli.path("log")).unwrap();
        let child = command.stderr(log).spawn().unwrap();
        for (_, descriptor) in &self.store {
            use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
            use std::os::fd::AsFd as _;
            let rights = [descriptor.as_fd()];
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(&rights));
            let parts = [std::io::IoSlice::new(b"x")];
            sendmsg(&ours, &parts, &mut control, SendFlags::empty()).unwrap();
        }
        self.ready = false;
        until("the daemon is ready", || {
            self.listen();
            self.ready
        });
        child
    }
}

#[test]
fn with_a_service_manager_readers_wait_also_when_both_die() {
    if !require(Feature::Program("python3")) {
        return;
    }
    for driver in drivers::here() {
        let Some(node) = mounted(driver) else { continue };
        let mountpoint = node.mountpoint.to_str().unwrap().to_owned();
        umount(&node.lazuli, &node.mountpoint);
        node.lazuli.ok(["stop"]);
        let mut manager = Manager::new(node.lazuli.path("notify"));
        let mut first = manager.start(&node.lazuli);
        let image = format!("{}/image:1", node.registry.host());
        node.lazuli.ok(["mount", &image, &mountpoint, "--driver", driver]);
        manager.listen();
        let names: Vec<_> = manager.store.iter().map(|(name, _)| name.clone()).collect();
        for expected in ["fanotify", "journal", "lock", "keeper", "control"] {
            assert!(names.iter().any(|name| name == expected), "{expected} in {names:?}");
        }
        let journals = names.iter().filter(|name| name.starts_with("fuse-journal-"));
        assert_eq!(journals.count(), usize::from(driver == "fuse"), "{names:?}");
        let mut second = None;
        let bytes = node.read_while(1 << 20, |node| {
            kill_both(node.pids());
            first.wait().unwrap();
            thread::sleep(Duration::from_millis(100));
            second = Some(manager.start(&node.lazuli));
        });
        let mut log = String::new();
        File::open(node.lazuli.path("log")).unwrap().read_to_string(&mut log).unwrap();
        assert!(bytes.unwrap() == part(1 << 20), "wrong bytes; {log}");
        listing::assert_equal(node.lazuli.path("source"), node.mountpoint.clone());
        umount(&node.lazuli, &node.mountpoint);
        drop(manager);
        node.lazuli.ok(["stop"]);
        assert!(second.unwrap().wait().unwrap().success());
    }
}

/// The same, and reloads, with the unit that is shipped and a real systemd.
#[test]
fn the_service_lives_under_systemd() {
    let needed = [Feature::Root, Feature::Fanotify, Feature::ErofsFileBacked];
    if !needed.into_iter().chain([Feature::Program("systemctl")]).all(require) {
        return;
    }
    let run = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/systemd/run");
    let output = Command::new(run).arg(env!("CARGO_BIN_EXE_lazuli")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{error}");
    assert!(text.contains("both killed: same bytes"), "{text}");
}
