//! The command under the name `nydusd`, called as nydus-snapshotter calls it.

use std::{
    fs::{self, File},
    io::{IoSliceMut, Read as _, Write as _},
    mem::MaybeUninit,
    os::fd::OwnedFd,
    os::unix::{
        fs::FileExt as _,
        net::{UnixListener, UnixStream},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use lazuli_testkit::{
    kernel::{Feature, require},
    listing, odd,
    registry::{FakeRegistry, Login},
};
use rustix::{
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
    process::{Pid, Signal, kill_process},
};
use serde_json::{Value, json};

use crate::{lazuli::Lazuli, policy::signer::Signer, reliability::forge::Forge};

/// A node with a daemon, a registry with an image, and the image's bootstrap in a file.
struct Rig {
    lazuli: Lazuli,
    registry: FakeRegistry,
    bootstrap: PathBuf,
}

impl Rig {
    fn new() -> Self {
        let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
        let source = lazuli.directory("source");
        fs::create_dir(source.join("directory")).unwrap();
        for number in 0..4 {
            fs::write(source.join(format!("directory/{number}")), odd::random(number, 300_000))
                .unwrap();
        }
        // In a registry and in a layout, with the same blobs.
        let image = format!("{}/some/image:1", registry.host());
        for target in ["oci:layout:latest", &image] {
            lazuli.ok(["convert", "dir:source", target]);
        }
        let bootstrap = lazuli.path("image.boot");
        fs::write(&bootstrap, Forge::new(lazuli.path("layout")).bootstrap()).unwrap();
        // Later commands find a daemon with the test's configuration.
        let first = lazuli.directory("first");
        lazuli.ok(["mount", "oci:layout:latest", first.to_str().unwrap(), "--driver", "fuse"]);
        lazuli.ok(["umount", first.to_str().unwrap()]);
        Rig { lazuli, registry, bootstrap }
    }

    fn config(&self, more: &Value) -> String {
        config(&self.registry.host(), "some/image", more)
    }

    /// Starts the command with these further arguments, and waits for its socket.
    fn start(&self, socket: &str, more: &[&str]) -> Nydusd {
        let socket = self.lazuli.path(socket);
        let mountpoint = self.lazuli.directory("mnt");
        let mut command = Command::new(env!("CARGO_BIN_EXE_lazuli"));
        command.arg0("/usr/local/bin/nydusd").arg("--root").arg(self.lazuli.root());
        command.args(["fuse", "--thread-num", "4", "--log-level", "info"]);
        command.args(["--failover-policy", "resend", "--mountpoint"]).arg(&mountpoint);
        command.arg("--apisock").arg(&socket).args(more);
        let child = command.current_dir(self.lazuli.path("")).spawn().unwrap();
        let nydusd = Nydusd { child, socket, mountpoint };
        wait(|| UnixStream::connect(&nydusd.socket).is_ok());
        nydusd
    }

    /// A process with the image at its mount point.
    fn dedicated(&self, socket: &str, more: &[&str]) -> Nydusd {
        fs::write(self.lazuli.path("config.json"), self.config(&json!({}))).unwrap();
        let image = ["--bootstrap", "image.boot", "--config", "config.json"];
        self.start(socket, &[&image, more].concat())
    }

    fn mount(&self, nydusd: &Nydusd, place: &str, config: &str) -> (u16, Value) {
        let body = json!({ "fs_type": "rafs", "source": self.bootstrap, "config": config });
        nydusd.call("POST", &format!("/api/v1/mount?mountpoint={place}"), &body)
    }

    fn assert_shows(&self, directory: &Path) {
        listing::assert_equal(self.lazuli.path("source"), directory);
    }
}

/// What nydus-snapshotter writes for an image, with further fields of its registry.
pub(crate) fn config(host: &str, repository: &str, more: &Value) -> String {
    let mut registry = json!({
        "readahead": false,
        "host": host,
        "repo": repository,
        "scheme": "http",
        "proxy": { "fallback": false },
        "timeout": 5,
    });
    registry.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({
        "device": {
            "id": "/1",
            "backend": { "type": "registry", "config": registry },
            "cache": { "type": "blobcache", "config": { "work_dir": "/cache" } },
        },
        "mode": "direct",
        "digest_validate": false,
        "enable_xattr": true,
        "fs_prefetch": { "enable": true, "prefetch_all": true },
    })
    .to_string()
}

struct Nydusd {
    child: Child,
    socket: PathBuf,
    mountpoint: PathBuf,
}

impl Nydusd {
    #[track_caller]
    fn call(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        call(&self.socket, method, path, body)
    }

    #[track_caller]
    fn get(&self, path: &str) -> Value {
        let (status, body) = self.call("GET", path, &Value::Null);
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    #[track_caller]
    fn put(&self, path: &str) {
        let (status, body) = self.call("PUT", path, &Value::Null);
        assert_eq!(status, 204, "{path}: {body}");
    }

    fn state(&self) -> String {
        self.get("/api/v1/daemon")["state"].as_str().unwrap().to_owned()
    }

    fn signal(&mut self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Nydusd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Status and body of an answer.
#[track_caller]
pub(crate) fn call(socket: &Path, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let mut stream = UnixStream::connect(socket).unwrap();
    let length = body.len();
    let head = format!("{method} {path} HTTP/1.1\r\nHost: unix\r\nConnection: close");
    write!(stream, "{head}\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap_or_default())
}

#[track_caller]
pub(crate) fn wait(mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(60), "waited in vain");
        thread::sleep(Duration::from_millis(20));
    }
}

fn is_mounted(directory: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().any(|line| line.split(' ').nth(4) == directory.to_str())
}

/// A supervisor, which keeps what it was sent last.
struct Supervisor {
    listener: UnixListener,
    kept: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Supervisor {
    fn new(rig: &Rig) -> Self {
        let listener = UnixListener::bind(rig.lazuli.path("supervisor.sock")).unwrap();
        Supervisor { listener, kept: Vec::new(), descriptors: Vec::new() }
    }

    fn receive_from(&mut self, nydusd: &Nydusd) {
        self.kept.clear();
        thread::scope(|scope| {
            scope.spawn(|| nydusd.put("/api/v1/daemon/fuse/sendfd"));
            let stream = self.listener.accept().unwrap().0;
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut buffer = [0; 4096];
            // The descriptor stays open, while the connection has to end.
            loop {
                let mut parts = [IoSliceMut::new(&mut buffer)];
                let flags = RecvFlags::CMSG_CLOEXEC;
                let read = recvmsg(&stream, &mut parts, &mut control, flags).unwrap().bytes;
                for message in control.drain() {
                    let RecvAncillaryMessage::ScmRights(sent) = message else { continue };
                    self.descriptors.extend(sent);
                }
                if read == 0 {
                    break;
                }
                self.kept.extend(&buffer[..read]);
            }
        });
        assert!(!self.descriptors.is_empty() && !self.kept.is_empty());
    }

    fn send_to(&self, nydusd: &Nydusd) {
        thread::scope(|scope| {
            scope.spawn(|| nydusd.put("/api/v1/daemon/fuse/takeover"));
            self.listener.accept().unwrap().0.write_all(&self.kept).unwrap();
        });
    }
}

#[test]
fn a_process_for_one_image_shows_it_until_it_is_ended() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let rig = Rig::new();
    let mut nydusd = rig.dedicated("api.sock", &[]);
    assert_eq!(nydusd.state(), "RUNNING");
    // Another one would make the snapshotter replace the process.
    let commit = &nydusd.get("/api/v1/daemon")["version"]["git_commit"];
    let mut version = Command::new(env!("CARGO_BIN_EXE_lazuli"));
    let said = version.arg0("nydusd").arg("--version").output().unwrap().stdout;
    let said = String::from_utf8(said).unwrap();
    let line = said.lines().find_map(|line| line.strip_prefix("Git Commit:"));
    assert_eq!(line.map(str::trim), commit.as_str(), "{said}");
    assert_eq!(nydusd.get("/api/v1/metrics/blobcache")["data_all_ready"], false);
    rig.assert_shows(&nydusd.mountpoint);
    assert_eq!(nydusd.get("/api/v1/metrics/blobcache?id=/")["data_all_ready"], true);
    assert_eq!(nydusd.get("/api/v1/metrics")["fop_hits"].as_array().unwrap().len(), 18);
    assert_eq!(nydusd.call("GET", "/api/v1/metrics/inflight", &Value::Null).0, 204);
    let status = rig.lazuli.mount_status(&nydusd.mountpoint);
    assert_eq!(status["image"], format!("{}/some/image", rig.registry.host()));
    nydusd.signal(Signal::TERM);
    assert!(!is_mounted(&nydusd.mountpoint) && !nydusd.socket.exists());
}

#[test]
fn a_process_for_many_images_mounts_and_unmounts_them() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let rig = Rig::new();
    let nydusd = rig.start("api.sock", &[]);
    // As the snapshotter waits for a death.
    let mut idle = UnixStream::connect(&nydusd.socket).unwrap();
    let config = rig.config(&json!({}));
    for place in ["/1", "/2", "/2"] {
        assert_eq!(rig.mount(&nydusd, place, &config), (204, Value::Null));
    }
    let [first, second] = ["1", "2"].map(|name| nydusd.mountpoint.join(name));
    [&first, &second].into_iter().for_each(|directory| rig.assert_shows(directory));
    let open = File::open(first.join("directory/3")).unwrap();
    let unmount = |place: &str| {
        nydusd.call("DELETE", &format!("/api/v1/mount?mountpoint={place}"), &Value::Null)
    };
    assert_eq!(unmount("/1").0, 204);
    assert!(!is_mounted(&first) && !first.exists());
    let mut content = vec![0; 300_000];
    open.read_exact_at(&mut content, 0).unwrap();
    assert!(content == odd::random(3, 300_000));
    drop(open);
    assert_eq!(unmount("/1").0, 500);
    rig.assert_shows(&second);
    idle.set_nonblocking(true).unwrap();
    let silent = idle.read(&mut [0]).unwrap_err();
    assert_eq!(silent.kind(), std::io::ErrorKind::WouldBlock);
    assert_eq!(unmount("/2").0, 204);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let rig = Rig::new();
    let nydusd = rig.start("api.sock", &[]);
    let config = rig.config(&json!({}));
    let source = &rig.bootstrap;
    for (place, body, expected) in [
        ("/1", json!({ "fs_type": "passthrough_fs", "source": "/" }), "to guests only"),
        ("/1", json!({ "fs_type": "other", "source": "/" }), "expected `rafs` or"),
        ("/1", json!({ "fs_type": "rafs", "source": "/nowhere", "config": config }), "/nowhere"),
        ("/1", json!({ "fs_type": "rafs", "source": "/dev/null", "config": config }), "regular"),
        ("/1", json!({ "fs_type": "rafs", "source": "x", "config": config }), "an absolute path"),
        ("/1", json!({ "fs_type": "rafs", "source": source, "config": "" }), "not nydusd's"),
        ("/1/../..", json!({ "fs_type": "rafs", "source": source, "config": config }), "`..`"),
        ("1", json!({ "fs_type": "rafs", "source": source, "config": config }), "absolute path"),
        ("/1", json!({}), "fs_type"),
    ] {
        let path = format!("/api/v1/mount?mountpoint={place}");
        let (status, answer) = nydusd.call("POST", &path, &body);
        let message = answer["message"].as_str().unwrap();
        assert!(status >= 400 && message.contains(expected), "{status}: {message}");
    }
    // A file that is no bootstrap.
    let file = rig.lazuli.path("source/directory/1");
    let body = json!({ "fs_type": "rafs", "source": file, "config": config });
    let (status, answer) = nydusd.call("POST", "/api/v1/mount?mountpoint=/1", &body);
    assert!(status == 500 && answer["message"].as_str().unwrap().contains("invalid bootstrap"));
    assert_eq!(nydusd.call("PUT", "/api/v2/blobs", &json!({})).0, 404);
    assert_eq!(nydusd.call("PUT", "/api/v1/daemon/fuse/takeover", &Value::Null).0, 500);
    assert!(
        nydusd.mountpoint.read_dir().unwrap().all(|entry| { !is_mounted(&entry.unwrap().path()) })
    );
}

/// As after `kill -9`: the snapshotter starts another one, which finds the socket of the first.
#[test]
fn a_successor_takes_the_mounts_over_and_readers_notice_nothing() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let rig = Rig::new();
    let mut supervisor = Supervisor::new(&rig);
    let supervised = ["--supervisor", "supervisor.sock", "--id", "one"];
    let mut first = rig.dedicated("api.sock", &supervised);
    supervisor.receive_from(&first);
    let open = File::open(first.mountpoint.join("directory/2")).unwrap();
    first.signal(Signal::KILL);
    let second = rig.dedicated("api.sock", &supervised);
    assert_eq!(second.state(), "INIT");
    assert_eq!(second.call("PUT", "/api/v1/daemon/start", &Value::Null).0, 500);
    supervisor.send_to(&second);
    assert_eq!(second.state(), "READY");
    second.put("/api/v1/daemon/start");
    assert_eq!(second.get("/api/v1/daemon")["id"], "one");
    let mut content = vec![0; 300_000];
    open.read_exact_at(&mut content, 0).unwrap();
    assert!(content == odd::random(2, 300_000));
    // An upgrade: the old one ends and leaves its mounts.
    supervisor.receive_from(&second);
    let mut third = rig.dedicated("api1.sock", &[&supervised[..], &["--upgrade"]].concat());
    supervisor.send_to(&third);
    let mut second = second;
    second.put("/api/v1/daemon/exit");
    assert!(second.child.wait().unwrap().success());
    third.put("/api/v1/daemon/start");
    assert_eq!(third.state(), "RUNNING");
    rig.assert_shows(&third.mountpoint);
    drop(open);
    third.signal(Signal::TERM);
    assert!(!is_mounted(&third.mountpoint));
}

/// The list of mounts is older than the login, and names one image that is gone.
#[test]
fn a_takeover_keeps_newer_logins_and_what_can_be_kept() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let rig = Rig::new();
    let mut supervisor = Supervisor::new(&rig);
    let supervised = ["--supervisor", "supervisor.sock", "--id", "one"];
    let mut first = rig.start("api.sock", &supervised);
    let auth = |secret: &str| json!({ "auth": BASE64_STANDARD.encode(format!("me:{secret}")) });
    assert_eq!(rig.mount(&first, "/1", &rig.config(&auth("old"))), (204, Value::Null));
    let gone = rig.lazuli.path("gone.boot");
    fs::copy(&rig.bootstrap, &gone).unwrap();
    let config = rig.config(&json!({}));
    let body = json!({ "fs_type": "rafs", "source": gone, "config": config });
    assert_eq!(first.call("POST", "/api/v1/mount?mountpoint=/2", &body), (204, Value::Null));
    supervisor.receive_from(&first);
    rig.registry.require(Login::Basic("me".into(), "new".into()));
    let renewed = json!({ "registry_auth": auth("new")["auth"] });
    assert_eq!(first.call("PUT", "/api/v1/config?id=/1", &renewed).0, 204);
    first.signal(Signal::KILL);
    rig.lazuli.ok(["umount", first.mountpoint.join("2").to_str().unwrap()]);
    fs::remove_file(gone).unwrap();

    let mut second = rig.start("api.sock", &supervised);
    supervisor.send_to(&second);
    second.put("/api/v1/daemon/start");
    rig.assert_shows(&second.mountpoint.join("1"));
    // Another repository's bootstrap is none of this mount's.
    let config = config.replace("some/image", "other/image");
    let (status, answer) = rig.mount(&second, "/1", &config);
    assert_eq!(status, 500, "{answer}");
    let unmount = |place: &str| {
        second.call("DELETE", &format!("/api/v1/mount?mountpoint={place}"), &Value::Null)
    };
    assert_eq!(unmount("/2"), (204, Value::Null));
    second.signal(Signal::TERM);
    assert_eq!(rig.lazuli.status()["mounts"], json!([]));
}

/// Without a monitor, which the tests of guests have.
#[test]
fn what_a_process_for_a_guest_left_is_unmounted_by_the_next() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let rig = Rig::new();
    let start = |name: &str| {
        let (socket, monitor) = (rig.lazuli.path(name), rig.lazuli.path("monitor.sock"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_lazuli"));
        command.arg0("nydusd").arg("--root").arg(rig.lazuli.root()).arg("virtiofs");
        let child = command.arg("--apisock").arg(&socket).arg("--sock").arg(monitor).spawn();
        let nydusd = Nydusd { child: child.unwrap(), socket, mountpoint: PathBuf::new() };
        wait(|| UnixStream::connect(&nydusd.socket).is_ok());
        let config = rig.config(&json!({}));
        assert_eq!(rig.mount(&nydusd, "/rafs/one/lowerdir", &config), (204, Value::Null));
        let body = json!({ "fs_type": "passthrough_fs", "source": rig.lazuli.path("source") });
        let containers = nydusd.call("POST", "/api/v1/mount?mountpoint=/containers", &body);
        assert_eq!(containers, (204, Value::Null));
        nydusd
    };
    let mounts = || rig.lazuli.status()["mounts"].as_array().unwrap().len();
    let guests = || rig.lazuli.root().join("guests").read_dir().unwrap().count();
    let mut first = start("first.sock");
    let mut second = start("second.sock");
    assert_eq!((mounts(), guests()), (2, 2));
    first.signal(Signal::KILL);
    let mut third = start("third.sock");
    wait(|| (mounts(), guests()) == (2, 2));
    for nydusd in [&mut second, &mut third] {
        nydusd.signal(Signal::TERM);
    }
    assert_eq!((mounts(), guests()), (0, 0));
}

#[test]
fn a_login_is_used_for_the_image_and_can_be_changed() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let rig = Rig::new();
    rig.lazuli.ok(["stop"]);
    rig.lazuli.configure("[fetch]\ndeadline_seconds = 1\n");
    let first = rig.lazuli.directory("first");
    rig.lazuli.ok(["mount", "oci:layout:latest", first.to_str().unwrap(), "--driver", "fuse"]);
    rig.lazuli.ok(["umount", first.to_str().unwrap()]);
    let nydusd = rig.start("api.sock", &[]);
    rig.registry.require(Login::Basic("me".into(), "good".into()));
    let auth = |secret: &str| BASE64_STANDARD.encode(format!("me:{secret}"));
    let config = rig.config(&json!({ "auth": auth("bad") }));
    assert_eq!(rig.mount(&nydusd, "/1", &config), (204, Value::Null));
    let directory = nydusd.mountpoint.join("1");
    let error = fs::read(directory.join("directory/1")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5));
    let change = json!({ "registry_auth": auth("good") });
    assert_eq!(nydusd.call("PUT", "/api/v1/config?id=/1", &change).0, 204);
    rig.assert_shows(&directory);
    let logins = rig.lazuli.root().join("logins");
    assert_eq!(logins.read_dir().unwrap().count(), 1);
    let path = "/api/v1/mount?mountpoint=/1";
    assert_eq!(nydusd.call("DELETE", path, &Value::Null).0, 204);
    assert_eq!(logins.read_dir().unwrap().count(), 0);
}

/// A client hands over a bootstrap without the name and the digest that signatures are about.
#[test]
fn a_policy_that_demands_signatures_refuses_every_image() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let rig = Rig::new();
    rig.lazuli.ok(["stop"]);
    let key = Signer::new(&rig.lazuli.path(""), "signer").public();
    let policy = rig.lazuli.path("rules.toml");
    fs::write(&policy, format!("[default]\nkeys = [\"{}\"]\n", key.display())).unwrap();
    rig.lazuli.configure(&format!("policy = \"{}\"\n", policy.display()));
    let first = rig.lazuli.directory("first");
    let error = rig.lazuli.fails(["mount", "oci:layout:latest", first.to_str().unwrap()]);
    assert!(error.contains("signature"), "{error}");
    let nydusd = rig.start("api.sock", &[]);
    let (status, answer) = rig.mount(&nydusd, "/1", &rig.config(&json!({})));
    let message = answer["message"].as_str().unwrap();
    assert!(status == 500 && message.contains("signature"), "{message}");
    assert!(!is_mounted(&nydusd.mountpoint.join("1")));
}

#[test]
fn a_bootstrap_of_version_5_shows_the_same_files() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let rig = Rig::new();
    let forge = Forge::new(rig.lazuli.path("layout"));
    forge.make_v5();
    fs::write(&rig.bootstrap, forge.bootstrap()).unwrap();
    let mut nydusd = rig.dedicated("api.sock", &[]);
    rig.assert_shows(&nydusd.mountpoint);
    nydusd.signal(Signal::TERM);
}
