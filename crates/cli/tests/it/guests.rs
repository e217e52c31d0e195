//! Virtual machines that mount an image from the disks of the driver `disks`: see `make test-vm`.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use lazuli_testkit::registry::{FakeRegistry, Fault};

use crate::{
    disks::disks,
    lazuli::{Lazuli, corpus},
};

/// Longer than an emulated guest takes on the busiest machine.
const TIMEOUT: Duration = Duration::from_secs(900);

/// An image in a registry, and its disks on this node.
struct Host {
    lazuli: Lazuli,
    _registry: FakeRegistry,
    image: String,
    at: PathBuf,
}

impl Host {
    fn new() -> Self {
        let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
        let image = format!("{}/redis:1", registry.host());
        let source = corpus("redis").expect("LAZULI_CORPUS names a directory with redis");
        lazuli.ok(["convert", &format!("oci:{}", source.display()), &image]);
        registry.fault("GET", "/blobs/", usize::MAX, Fault::Latency(Duration::from_millis(20)));
        let at = lazuli.directory("disks");
        lazuli.ok(["mount", &image, at.to_str().unwrap(), "--driver", "disks"]);
        Host { lazuli, _registry: registry, image, at }
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
