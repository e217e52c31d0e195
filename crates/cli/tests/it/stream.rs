//! Pushes of data that is still being read, and their clean-up after failures.

use std::{
    fs,
    io::Write as _,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use lazuli_testkit::{
    odd,
    registry::{FakeRegistry, Fault},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{lazuli::Lazuli, mount::tar_of};

/// Three requests' worth.
const SIZE: usize = 30 << 20;

/// `lazuli convert tar:-` with temporary files in a directory of its own.
struct Conversion {
    lazuli: Lazuli,
    registry: FakeRegistry,
    temporary: PathBuf,
}

impl Conversion {
    fn new() -> Self {
        let lazuli = Lazuli::new();
        let temporary = lazuli.directory("temporary");
        Conversion { lazuli, registry: FakeRegistry::start().unwrap(), temporary }
    }

    fn start(&self) -> Child {
        self.spawn(self.lazuli.command(["convert", "tar:-", &self.image()]))
    }

    fn spawn(&self, mut command: Command) -> Child {
        command.env("TMPDIR", &self.temporary).stdin(Stdio::piped());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn image(&self) -> String {
        format!("{}/app:x", self.registry.host())
    }

    fn requests(&self, method: &str) -> usize {
        self.registry.log().iter().filter(|logged| logged.method == method).count()
    }

    /// Waits until the registry was sent the beginning of a blob.
    fn begun(&self) {
        self.wait_for("PATCH", 2);
    }

    fn wait_for(&self, method: &str, requests: usize) {
        let started = Instant::now();
        while self.requests(method) < requests {
            assert!(started.elapsed() < Duration::from_secs(60), "nothing is pushed while reading");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[track_caller]
    fn nothing_left(&self) {
        let left: Vec<_> = fs::read_dir(&self.temporary).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
        assert_eq!(self.requests("DELETE"), 1, "the upload goes on");
        assert_eq!(self.registry.open_uploads(), 0);
        assert!(self.registry.manifest("app", "x").is_none());
    }
}

#[test]
fn a_tar_is_pushed_while_it_is_read() {
    for compress in [false, true] {
        let conversion = Conversion::new();
        let mut tar = tar_of("file", &odd::random(1, SIZE));
        if compress {
            tar = zstd::bulk::compress(&tar, 1).unwrap();
        }
        let mut converting = conversion.start();
        let mut input = converting.stdin.take().unwrap();
        let (first, rest) = tar.split_at(tar.len() - 1_000_000);
        input.write_all(first).unwrap();
        conversion.begun();
        input.write_all(rest).unwrap();
        drop(input);
        let output = converting.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let lazuli = &conversion.lazuli;
        fs::write(lazuli.path("x.tar"), &tar).unwrap();
        lazuli.ok(["check", &conversion.image(), "--against", "tar:x.tar"]);
        // The same bytes as from a tar file on disk.
        lazuli.ok(["convert", "tar:x.tar", "oci:lazy:x"]);
        let digest = |image: &str| {
            let said = lazuli.ok(["inspect", image, "--json"]);
            serde_json::from_str::<Value>(&said).unwrap()["manifest_digest"].clone()
        };
        assert_eq!(digest(&conversion.image()), digest("oci:lazy:x"));
        let left: Vec<_> = fs::read_dir(&conversion.temporary).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn a_damaged_tar_leaves_nothing_behind() {
    let conversion = Conversion::new();
    let mut converting = conversion.start();
    let mut input = converting.stdin.take().unwrap();
    input.write_all(&tar_of("file", &odd::random(1, SIZE))[..SIZE - 4096]).unwrap();
    conversion.begun();
    drop(input);
    let output = converting.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("tar:-"), "{error}");
    conversion.nothing_left();
}

/// However slow the registry is. Not with INT, which may be ignored where the tests run.
#[test]
fn a_signal_leaves_nothing_behind() {
    let conversion = Conversion::new();
    conversion.registry.fault("PATCH", "", 1, Fault::Latency(Duration::ZERO));
    conversion.registry.fault("PATCH", "", 9, Fault::Latency(Duration::from_secs(20)));
    let mut converting = conversion.start();
    let mut input = converting.stdin.take().unwrap();
    input.write_all(&tar_of("file", &odd::random(1, SIZE))[..SIZE - 4096]).unwrap();
    conversion.begun();
    kill_process(Pid::from_child(&converting), Signal::TERM).unwrap();
    assert_eq!(converting.wait().unwrap().code(), Some(143));
    conversion.nothing_left();
    assert_eq!(conversion.requests("PATCH"), 2);
}

#[test]
fn a_signal_while_the_rest_is_stored_leaves_nothing_behind() {
    let conversion = Conversion::new();
    conversion.registry.fault("PUT", "", 9, Fault::Latency(Duration::from_secs(20)));
    let mut converting = conversion.start();
    let mut input = converting.stdin.take().unwrap();
    input.write_all(&tar_of("file", &odd::random(1, SIZE))).unwrap();
    drop(input);
    conversion.wait_for("PUT", 1);
    kill_process(Pid::from_child(&converting), Signal::TERM).unwrap();
    let output = converting.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    conversion.nothing_left();
}

#[test]
fn a_signal_that_is_to_be_ignored_ends_nothing() {
    let conversion = Conversion::new();
    let lazuli = conversion.lazuli.command(["convert", "tar:-", &conversion.image()]);
    let mut command = Command::new("nohup");
    command.arg(lazuli.get_program()).args(lazuli.get_args());
    command.env("XDG_CACHE_HOME", conversion.lazuli.path("cache"));
    let mut converting = conversion.spawn(command);
    let mut input = converting.stdin.take().unwrap();
    let tar = tar_of("file", &odd::random(1, SIZE));
    let (first, rest) = tar.split_at(SIZE - 4096);
    input.write_all(first).unwrap();
    conversion.begun();
    kill_process(Pid::from_child(&converting), Signal::HUP).unwrap();
    input.write_all(rest).unwrap();
    drop(input);
    let output = converting.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The reader stops, so the tar is written in part.
#[test]
fn a_signal_takes_the_tar_that_unpack_writes() {
    let lazuli = Lazuli::new();
    let source = lazuli.directory("source");
    fs::write(source.join("file"), odd::random(1, SIZE)).unwrap();
    let registry = FakeRegistry::start().unwrap();
    let image = format!("{}/app:x", registry.host());
    lazuli.ok(["convert", "dir:source", &image]);
    let temporary = |name: &str| name.starts_with(".lazuli-unpack-");
    let left = || {
        let entries = fs::read_dir(lazuli.path("")).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| temporary(name)).count()
    };
    let said = lazuli.ok(["inspect", &image, "--json"]);
    let said: Value = serde_json::from_str(&said).unwrap();
    let blob = said["blobs"][0]["id"].as_str().unwrap();
    registry.fault("GET", blob, 100, Fault::Hang(Duration::from_secs(60)));
    let mut unpacking = lazuli.command(["unpack", &image, "tar:x.tar"]).spawn().unwrap();
    let started = Instant::now();
    while left() == 0 {
        assert!(started.elapsed() < Duration::from_secs(60), "no file");
        thread::sleep(Duration::from_millis(10));
    }
    kill_process(Pid::from_child(&unpacking), Signal::TERM).unwrap();
    assert_eq!(unpacking.wait().unwrap().code(), Some(143));
    assert_eq!(left(), 0);
    assert!(!lazuli.path("x.tar").exists());
}
