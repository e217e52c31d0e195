//! Prometheus' view of the metrics, by a foreign parser, after known events.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use lazuli_testkit::{
    kernel::{Feature, require, skip},
    odd,
    registry::{FakeRegistry, Fault},
};
use rustix::process::{Pid, Signal, kill_process};

use crate::lazuli::Lazuli;

/// Longer than any step takes on the busiest machine.
const TIMEOUT: Duration = Duration::from_secs(60);

const MIB: usize = 1 << 20;

/// A node with a mounted image of two files `a` and `b` of 4 MiB, and its metrics.
struct Scene {
    lazuli: Lazuli,
    registry: FakeRegistry,
    address: String,
    mountpoint: PathBuf,
}

/// `more` is for the configuration.
fn scene(more: &str) -> Option<Scene> {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return None;
    }
    let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    lazuli.configure(&format!("[metrics]\nlisten = \"{address}\"\n{more}"));
    let source = lazuli.directory("source");
    for (name, seed) in [("a", 1), ("b", 2)] {
        fs::write(source.join(name), odd::random(seed, 4 * MIB)).unwrap();
    }
    let image = format!("{}/image:1", registry.host());
    lazuli.ok(["convert", "dir:source", &image]);
    let mountpoint = lazuli.directory("mnt");
    lazuli.ok(["mount", &image, mountpoint.to_str().unwrap(), "--driver", "fuse"]);
    Some(Scene { lazuli, registry, address, mountpoint })
}

fn scrape(address: &str) -> std::io::Result<String> {
    let mut answer = String::new();
    let request = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
    if address.starts_with('/') {
        let mut stream = UnixStream::connect(address)?;
        stream.write_all(request)?;
        stream.read_to_string(&mut answer)?;
    } else {
        let mut stream = TcpStream::connect(address)?;
        stream.write_all(request)?;
        stream.read_to_string(&mut answer)?;
    }
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    Ok(body.to_owned())
}

/// The metrics at an address, once they are served.
fn page(address: &str) -> String {
    let begun = Instant::now();
    loop {
        match scrape(address) {
            Ok(page) => return page,
            Err(error) => assert!(begun.elapsed() < TIMEOUT, "{address}: {error}"),
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Parses a text with Prometheus' own client library for Python: the values of all samples by name
/// and labels.
const PARSER: &str = "
import json, sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
samples = [sample for family in parse(sys.stdin.read()) for sample in family.samples]
key = lambda sample: sample.name + ''.join(f';{k}={v}' for k, v in sorted(sample.labels.items()))
print(json.dumps({key(sample): sample.value for sample in samples}))
";

/// The samples of a text, which has to be OpenMetrics.
struct Samples(BTreeMap<String, f64>);

impl Samples {
    fn of(page: &str) -> Self {
        // Debian's own, for which `make test` installs the library.
        let mut parser = Command::new("/usr/bin/python3")
            .args(["-c", PARSER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        parser.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
        let output = parser.wait_with_output().unwrap();
        assert!(output.status.success(), "not OpenMetrics, or no parser:\n{page}");
        Samples(serde_json::from_slice(&output.stdout).unwrap())
    }

    /// `lazuli_deaths_total;process=worker`
    #[track_caller]
    fn get(&self, sample: &str) -> f64 {
        *self.0.get(sample).unwrap_or_else(|| panic!("no {sample} in {:#?}", self.0))
    }
}

impl Scene {
    fn samples(&self) -> Samples {
        Samples::of(&page(&self.address))
    }

    /// Waits until a sample has a value; texts are up to a second old.
    #[track_caller]
    fn until(&self, sample: &str, holds: impl Fn(f64) -> bool) -> f64 {
        let begun = Instant::now();
        loop {
            let value = self.samples().get(sample);
            if holds(value) {
                return value;
            }
            assert!(begun.elapsed() < TIMEOUT, "{sample} is {value}");
            thread::sleep(Duration::from_millis(200));
        }
    }

    /// The first line of the log about a read that failed.
    #[track_caller]
    fn failed_read(&self) -> String {
        let begun = Instant::now();
        loop {
            let log = self.lazuli.log();
            if let Some(line) = log.lines().find(|line| line.contains("a read fails")) {
                return line.to_owned();
            }
            assert!(begun.elapsed() < TIMEOUT, "{log}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn read(&self, name: &str) -> std::io::Result<Vec<u8>> {
        fs::read(self.mountpoint.join(name))
    }
}

#[test]
fn misses_and_their_bytes_are_counted() {
    let Some(scene) = scene("") else { return };
    let before = scene.samples();
    assert_eq!(before.get("lazuli_starts_total;driver=fuse"), 1.0);
    assert_eq!(before.get("lazuli_mounts;driver=fuse"), 1.0);
    assert_eq!(before.get("lazuli_start_duration_seconds_count"), 1.0);
    assert_eq!(before.get("lazuli_read_wait_seconds_count"), 0.0);
    assert_eq!(scene.read("a").unwrap(), odd::random(1, 4 * MIB));
    let fetched = scene
        .until("lazuli_fetched_bytes_total;source=registry", |bytes| bytes >= 4.0 * MIB as f64);
    assert!(fetched < 9.0 * MIB as f64, "{fetched}");
    let text = page(&scene.address);
    let after = Samples::of(&text);
    assert!(after.get("lazuli_read_wait_seconds_count") >= 1.0);
    assert!(after.get("lazuli_cache_bytes") >= 4.0 * MIB as f64);
    assert_eq!(after.get("lazuli_waiting_readers"), 0.0);
    let version = format!("lazuli_build_info{{version=\"{}\"}} 1\n", env!("CARGO_PKG_VERSION"));
    assert!(text.contains(&version), "{text}");
    // Names of images, registries and paths must not become labels.
    for name in [scene.registry.host().as_str(), "image:1", "/mnt", "sha256"] {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        assert!(lines.into_iter().all(|line| !line.contains(name)), "{name} in {text}");
    }
    let row = scene.lazuli.output(["doctor", "metrics"]);
    let row = String::from_utf8(row.stdout).unwrap();
    assert!(row.starts_with("ok") && row.contains(&scene.address), "{row}");
}

#[test]
fn wrong_bytes_and_errors_of_a_registry_are_counted() {
    let Some(scene) = scene("[fetch]\namplify_bytes = 0\n") else { return };
    scene.registry.fault("GET", "/blobs/", 1, Fault::WrongBytes);
    assert_eq!(scene.read("a").unwrap(), odd::random(1, 4 * MIB));
    scene.until("lazuli_wrong_digests_total;source=registry", |count| count == 1.0);
    scene.registry.fault("GET", "/blobs/", 2, Fault::Status(503));
    assert_eq!(scene.read("b").unwrap(), odd::random(2, 4 * MIB));
    let errors = "lazuli_registry_errors_total;cause=server;source=registry";
    scene.until(errors, |count| count == 2.0);
    let samples = scene.samples();
    for cause in ["timeout", "refused", "wrong_bytes", "disk_full"] {
        assert_eq!(samples.get(&format!("lazuli_failed_reads_total;cause={cause}")), 0.0);
    }
}

#[test]
fn a_read_that_fails_is_counted_and_the_log_names_image_and_file() {
    let Some(scene) = scene("[fetch]\ndeadline_seconds = 1\n") else { return };
    scene.registry.go_away();
    assert!(scene.read("b").is_err());
    scene.until("lazuli_failed_reads_total;cause=timeout", |count| count >= 1.0);
    let errors = "lazuli_registry_errors_total;cause=unreachable;source=registry";
    scene.until(errors, |count| count >= 1.0);
    let line = scene.failed_read();
    let image = format!("image=\"{}/image:1\"", scene.registry.host());
    for part in [&image, "file=\"/b\"", "cause=\"timeout\"", "is the registry up?"] {
        assert!(line.contains(part), "{part} in {line}");
    }
    let thread = line.split("thread=").nth(1).unwrap().split(' ').next().unwrap();
    assert_ne!(thread.parse::<u32>().unwrap(), 0, "{line}");
    // A flood of failures is not a flood of lines.
    for _ in 0..30 {
        assert!(scene.read("a").is_err() || scene.read("b").is_err());
        if scene.lazuli.log().matches("a read fails").count() > 12 {
            break;
        }
    }
    assert!(scene.lazuli.log().matches("a read fails").count() <= 20);
}

#[test]
fn evictions_are_counted() {
    let Some(scene) = scene("[cache]\nmax_bytes = 67108864\n") else { return };
    let mountpoint = scene.lazuli.directory("large-mnt");
    let mountpoint = mountpoint.to_str().unwrap();
    for seed in [3, 4] {
        let source = scene.lazuli.directory(&format!("source-{seed}"));
        fs::write(source.join("file"), odd::random(seed, 40 * MIB)).unwrap();
        let image = format!("oci:large:{seed}");
        scene.lazuli.ok(["convert", &format!("dir:source-{seed}"), &image]);
        scene.lazuli.ok(["mount", &image, mountpoint, "--driver", "fuse"]);
        fs::read(format!("{mountpoint}/file")).unwrap();
        scene.lazuli.ok(["umount", mountpoint]);
    }
    scene.until("lazuli_evicted_blobs_total", |blobs| blobs >= 1.0);
    let samples = scene.samples();
    assert!(samples.get("lazuli_evicted_bytes_total") >= 40.0 * MIB as f64);
    assert_eq!(samples.get("lazuli_cache_max_bytes"), 67_108_864.0);
}

#[test]
fn deaths_and_takeovers_are_counted_and_metrics_survive_them() {
    let Some(scene) = scene("") else { return };
    let deaths = |process| format!("lazuli_deaths_total;process={process}");
    scene.until(&deaths("worker"), |count| count == 0.0);
    scene.lazuli.kill(scene.lazuli.worker());
    scene.until(&deaths("worker"), |count| count == 1.0);
    scene.lazuli.ok(["daemon", "--takeover"]);
    scene.until("lazuli_takeovers_total", |count| count == 1.0);
    scene.until(&deaths("worker"), |count| count == 1.0);
    scene.until("lazuli_mounts;driver=fuse", |count| count == 1.0);
    // Both at once: only the counters on disk survive.
    let daemon = scene.lazuli.status()["daemon"].clone();
    let pids = ["keeper_pid", "worker_pid"]
        .map(|key| Pid::from_raw(i32::try_from(daemon[key].as_i64().unwrap()).unwrap()).unwrap());
    pids.iter().for_each(|pid| kill_process(*pid, Signal::STOP).unwrap());
    pids.iter().for_each(|pid| kill_process(*pid, Signal::KILL).unwrap());
    let status = scene.lazuli.status()["daemon"].clone();
    assert_eq!(status["restarts"], 2, "{status:#}");
    assert_eq!(status["keeper_restarts"], 1, "{status:#}");
    scene.until(&deaths("worker"), |count| count == 2.0);
    scene.until(&deaths("keeper"), |count| count == 1.0);
    scene.until("lazuli_takeovers_total", |count| count == 1.0);
    // A daemon that stops on request has not died.
    scene.lazuli.ok(["stop", "--force"]);
    let image = format!("{}/image:1", scene.registry.host());
    scene.lazuli.ok(["mount", &image, scene.mountpoint.to_str().unwrap(), "--driver", "fuse"]);
    assert_eq!(scene.lazuli.status()["daemon"]["restarts"], 0);
}

#[test]
fn the_daemons_processes_are_called_lazuli() {
    let Some(scene) = scene("") else { return };
    scene.lazuli.kill(scene.lazuli.worker());
    let daemon = scene.lazuli.status()["daemon"].clone();
    for key in ["keeper_pid", "worker_pid"] {
        let comm = fs::read_to_string(format!("/proc/{}/comm", daemon[key])).unwrap();
        assert_eq!(comm, "lazuli\n", "{key}");
    }
}

#[test]
fn prefetched_bytes_that_readers_ask_for_are_told_from_others() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let Some(scene) = scene("") else { return };
    let counts = || {
        let samples = scene.samples();
        ["", "_read", "_unseen"]
            .map(|which| samples.get(&format!("lazuli_prefetched{which}_bytes_total")))
    };
    assert_eq!(counts(), [0.0; 3]);
    // A sequential reader causes readahead.
    assert_eq!(scene.read("a").unwrap(), odd::random(1, 4 * MIB));
    scene.until("lazuli_prefetched_bytes_total", |bytes| bytes > 0.0);
    scene.until("lazuli_prefetched_read_bytes_total", |bytes| bytes > 0.0);
    let [all, read, unseen] = counts();
    assert!(read + unseen <= all, "{read} + {unseen} of {all}");
}

#[test]
fn nothing_listens_unless_the_configuration_says_so_and_a_socket_will_do() {
    let Some(scene) = scene("") else { return };
    page(&scene.address);
    let socket = scene.lazuli.path("metrics.sock");
    scene.lazuli.configure(&format!("[metrics]\nlisten = \"{}\"\n", socket.display()));
    scene.lazuli.ok(["daemon", "--takeover"]);
    assert!(page(socket.to_str().unwrap()).ends_with("# EOF\n"));
    assert!(TcpStream::connect(&scene.address).is_err());
    scene.lazuli.configure("");
    scene.lazuli.ok(["daemon", "--takeover"]);
    assert!(UnixStream::connect(&socket).is_err());
    assert!(scene.lazuli.ok(["doctor", "metrics"]).is_empty());
    scene.lazuli.configure("[metrics]\nlisten = \"nowhere\"\n");
    let error = scene.lazuli.fails(["status"]);
    assert!(error.contains("metrics.listen") && error.contains("127.0.0.1:9445"), "{error}");
    scene.lazuli.configure("");
}

/// A control group as the kubelet makes them, in the version 2 hierarchy; removed with the value.
struct PodGroup(Vec<PathBuf>);

impl PodGroup {
    fn create(names: [&str; 2]) -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let root = fields.into_iter().find(|fields| fields[2] == "cgroup2")?[1].to_owned();
        let own = format!("lazuli-test-{}", std::process::id());
        let mut group = PodGroup(Vec::new());
        let mut path = PathBuf::from(root);
        for name in [own.as_str(), "kubepods"].into_iter().chain(names) {
            path.push(name);
            fs::create_dir(&path).unwrap();
            group.0.push(path.clone());
        }
        Some(group)
    }
}

impl Drop for PodGroup {
    fn drop(&mut self) {
        self.0.iter().rev().for_each(|path| drop(fs::remove_dir(path)));
    }
}

#[test]
fn the_log_of_a_failed_read_names_the_pod_and_container_of_its_reader() {
    let Some(scene) = scene("[fetch]\ndeadline_seconds = 1\n") else { return };
    let (uid, id) = ("6f6e0f7a-3c55-4b1c-9d3a-6b2f0c4a1e77", "c".repeat(64));
    let Some(group) = PodGroup::create([&format!("pod{uid}"), &id]) else {
        skip("a cgroup2 hierarchy", "none is mounted");
        return;
    };
    scene.registry.go_away();
    let script = format!(
        "echo $$ > {}/cgroup.procs; exec cat {}/a > /dev/null",
        group.0.last().unwrap().display(),
        scene.mountpoint.display()
    );
    let status = Command::new("sh").args(["-c", &script]).status().unwrap();
    assert!(!status.success());
    let line = scene.failed_read();
    for part in [format!("pod=\"{uid}\""), format!("container=\"{id}\""), "file=\"/a\"".to_owned()]
    {
        assert!(line.contains(&part), "{part} in {line}");
    }
}
