//! Virtual machines that mount an image from the disks of the driver `disks`, or get its files over
//! virtio-fs: see `make test-vm`.

use std::{
    ffi::OsString,
    fs,
    os::unix::{fs::PermissionsExt as _, net::UnixStream, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use lazuli_testkit::registry::{FakeRegistry, Fault};
use serde_json::{Value, json};

use crate::{
    disks::disks,
    lazuli::{Lazuli, corpus},
    nydusd::{call, config, wait},
};

/// Longer than an emulated guest takes on the busiest machine.
const TIMEOUT: Duration = Duration::from_secs(900);

/// An image in a registry, and its disks on this node.
struct Host {
    lazuli: Lazuli,
    registry: FakeRegistry,
    image: String,
    at: PathBuf,
}

impl Host {
    /// With the image's disks.
    fn new() -> Self {
        let mut host = Self::without_disks();
        host.at = host.lazuli.directory("disks");
        host.lazuli.ok(["mount", &host.image, host.at.to_str().unwrap(), "--driver", "disks"]);
        host
    }

    fn without_disks() -> Self {
        let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
        let image = format!("{}/redis:1", registry.host());
        let source = corpus("redis").expect("LAZULI_CORPUS names a directory with redis");
        lazuli.ok(["convert", &format!("oci:{}", source.display()), &image]);
        registry.fault("GET", "/blobs/", usize::MAX, Fault::Latency(Duration::from_millis(20)));
        Host { lazuli, registry, image, at: PathBuf::new() }
    }

    /// The digest of everything in the image, by another driver.
    fn tree(&self) -> String {
        let at = self.lazuli.directory("tree");
        self.lazuli.ok(["mount", &self.image, at.to_str().unwrap(), "--driver", "fuse"]);
        let program = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vm/guest/tree");
        let output = Command::new(program).arg(at).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// Bytes that arrived for the mount whose use is tested.
    fn fetched(&self) -> u64 {
        self.lazuli.mount_status(&self.at)["bytes_fetched"].as_u64().unwrap()
    }
}

/// A running guest. Dropping it ends it.
struct Guest {
    qemu: Child,
    log: PathBuf,
}

impl Guest {
    /// `from` says to the guest what its `devices` are.
    fn start(host: &Host, name: &str, from: &str, devices: &[String]) -> Self {
        let variable = |name: &str| -> OsString {
            std::env::var_os(name).unwrap_or_else(|| panic!("{name}, see `make test-vm`"))
        };
        let log = host.lazuli.path(name);
        // no_timer_check, nowatchdog: a guest's clock is wrong when its host is busy.
        let kernel = "console=ttyS0 panic=-1 no_timer_check nowatchdog loglevel=3";
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-M", "q35,nvdimm=on", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"])
            .args(["-m", "512,maxmem=4G,slots=4", "-display", "none", "-no-reboot", "-nodefaults"])
            .args(["-serial", "stdio", "-kernel"])
            .arg(variable("LAZULI_GUEST_KERNEL"))
            .arg("-initrd")
            .arg(variable("LAZULI_GUEST_INITRD"))
            .args(["-append", &format!("{kernel} lazuli.from={from}")])
            .args(devices)
            .stdin(Stdio::null())
            .stdout(fs::File::create(&log).unwrap());
        Guest { qemu: command.spawn().expect("qemu, which `make test-vm` installs"), log }
    }

    fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap()).into_owned()
    }

    /// The word behind `key`, once it is said.
    fn says(&self, key: &str) -> Option<String> {
        let log = self.log();
        let line = log.split_once(&format!("guest: {key} "))?.1.split_once('\n')?.0;
        Some(line.trim().to_owned())
    }

    fn ends(mut self) -> (String, u64) {
        let begun = Instant::now();
        while self.qemu.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < TIMEOUT, "{}", self.log());
            thread::sleep(Duration::from_millis(100));
        }
        let said = |key| self.says(key).unwrap_or_else(|| panic!("no {key}: {}", self.log()));
        (said("tree"), said("cached").parse().unwrap())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// As a disk of virtio-blk.
fn disk(number: usize, file: &Path) -> Vec<String> {
    let drive = format!(
        "if=none,id=disk{number},file={},format=raw,readonly=on,file.locking=off",
        file.display()
    );
    let device = format!("virtio-blk-pci,drive=disk{number}");
    ["-drive", &drive, "-device", &device].map(str::to_owned).to_vec()
}

/// Kills the worker `times` times while the guest reads.
fn kill_workers(host: &Host, guest: &Guest, times: u32) {
    let begun = Instant::now();
    for _ in 0..times {
        let before = host.fetched();
        while host.fetched() < before + (512 << 10) {
            assert!(begun.elapsed() < TIMEOUT, "{}", guest.log());
            assert!(guest.says("tree").is_none(), "the guest is done: {}", guest.log());
            thread::sleep(Duration::from_millis(20));
        }
        host.lazuli.kill(host.lazuli.worker());
    }
}

#[test]
#[ignore = "needs LAZULI_GUEST_KERNEL, see `make test-vm`"]
fn one_disk() {
    let host = Host::new();
    let guest = Guest::start(&host, "log", "one", &disk(0, &host.at.join("disk")));
    kill_workers(&host, &guest, 6);
    let (tree, _) = guest.ends();
    assert_eq!(tree, host.tree());
}

#[test]
#[ignore = "needs LAZULI_GUEST_KERNEL, see `make test-vm`"]
fn several_disks() {
    let host = Host::new();
    let files = disks(&host.at).into_iter().enumerate();
    let devices: Vec<_> = files.flat_map(|(number, file)| disk(number, &file)).collect();
    let guest = Guest::start(&host, "log", "several", &devices);
    kill_workers(&host, &guest, 6);
    let (tree, _) = guest.ends();
    assert_eq!(tree, host.tree());
}

/// Guests with memory in place of a disk have no copies of their own.
#[test]
#[ignore = "needs LAZULI_GUEST_KERNEL, see `make test-vm`"]
fn two_guests_share_the_pages_of_the_host() {
    let host = Host::new();
    let file = host.at.join("disk");
    let size = fs::metadata(&file).unwrap().len();
    let memory = format!(
        "memory-backend-file,id=memory,mem-path={},size={size},share=on,readonly=on",
        file.display()
    );
    let devices = ["-object", &memory, "-device", "virtio-pmem-pci,memdev=memory,id=pmem"];
    let devices = devices.map(str::to_owned);
    let guests = ["first", "second"].map(|log| Guest::start(&host, log, "memory", &devices));
    let expected = host.tree();
    for guest in guests {
        let (tree, cached) = guest.ends();
        assert_eq!(tree, expected);
        assert!(cached << 10 < size / 20, "{cached} KiB of {size} bytes are in the guest's cache");
    }
}

/// As Kata Containers asks for it: an image and a directory of the host beside each other.
#[test]
#[ignore = "needs LAZULI_GUEST_KERNEL, see `make test-vm`"]
fn an_image_and_a_directory_over_virtio_fs() {
    let mut host = Host::without_disks();
    let tree = host.tree();
    let manifest = host.lazuli.mount_status(&host.lazuli.path("tree"))["manifest_digest"].clone();
    let bootstrap = host.lazuli.root().join("images");
    let bootstrap =
        bootstrap.join(&manifest.as_str().unwrap()["sha256:".len()..]).join("bootstrap");
    // What the tree has brought is forgotten.
    host.lazuli.ok(["stop", "--force"]);
    fs::remove_dir_all(host.lazuli.root().join("cache")).unwrap();
    host.lazuli.ok(["mount", &host.image, host.lazuli.path("tree").to_str().unwrap()]);
    host.lazuli.ok(["umount", host.lazuli.path("tree").to_str().unwrap()]);

    let (api, monitor) = (host.lazuli.path("api.sock"), host.lazuli.path("virtiofs.sock"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_lazuli"));
    command.arg0("/usr/bin/nydusd").arg("--root").arg(host.lazuli.root());
    command.args(["virtiofs", "--hybrid-mode", "--log-level", "info"]);
    command.arg("--apisock").arg(&api).arg("--sock").arg(&monitor);
    let mut nydusd = command.spawn().unwrap();
    wait(|| UnixStream::connect(&api).is_ok());
    assert_eq!(call(&api, "GET", "/api/v1/daemon", &Value::Null).1["state"], "RUNNING");
    let directory = host.lazuli.directory("containers");
    fs::write(directory.join("from-host"), "from the host").unwrap();
    let config = config(&host.registry.host(), "redis", &json!({}));
    for (place, body) in [
        ("/containers", json!({ "fs_type": "passthrough_fs", "source": directory, "config": "" })),
        ("/rafs/one/lowerdir", json!({ "fs_type": "rafs", "source": bootstrap, "config": config })),
    ] {
        let path = format!("/api/v1/mount?mountpoint={place}");
        assert_eq!(call(&api, "POST", &path, &body), (204, Value::Null), "{place}");
    }
    let guests = host.lazuli.root().join("guests");
    let scratch = guests.read_dir().unwrap().next().unwrap().unwrap().path();
    host.at = scratch.join("rafs/one/lowerdir");

    let chardev = format!("socket,id=monitor,path={}", monitor.display());
    let devices = [
        "-object",
        "memory-backend-memfd,id=memory,size=512M,share=on",
        "-numa",
        "node,memdev=memory",
        "-chardev",
        &chardev,
        "-device",
        "vhost-user-fs-pci,chardev=monitor,tag=lazuli",
    ];
    let guest = Guest::start(&host, "log", "files", &devices.map(str::to_owned));
    kill_workers(&host, &guest, 6);
    let (found, _) = guest.ends();
    assert_eq!(found, tree);
    // The guest copied one file, and made another one executable.
    assert_eq!(fs::read_to_string(directory.join("copy")).unwrap(), "from the host");
    let mode = fs::metadata(directory.join("made/new")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o751);
    // It ends with its guest, and leaves nothing.
    assert!(nydusd.wait().unwrap().success());
    assert!(!scratch.exists() && !api.exists());
    assert_eq!(host.lazuli.status()["mounts"], json!([]));
}
