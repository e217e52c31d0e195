//! The drivers on loop devices, `loop` and `ext4`: hand-over to the kernel, and clean-up.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use lazuli_sys::mmap::{FinishedFile, Map};
use lazuli_testkit::{
    listing,
    oci::{Compression, Image, Layer},
    odd,
    registry::FakeRegistry,
    tarball::{self, Entry},
};
use rustix::process::Pid;

use crate::{
    drivers::{self, able},
    keeper::{is_gone, kill_both},
    lazuli::Lazuli,
};

/// Longer than any step takes on the busiest machine.
const TIMEOUT: Duration = Duration::from_secs(60);

const SIZE: usize = 4 << 20;

struct Node {
    /// All tests have the same blob, by which they count devices.
    _alone: MutexGuard<'static, ()>,
    lazuli: Lazuli,
    registry: FakeRegistry,
    mountpoint: PathBuf,
    driver: &'static str,
}

impl Node {
    /// A mounted image with two files of random bytes.
    fn new(driver: &'static str) -> Option<Self> {
        if !able(driver) {
            return None;
        }
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let (lazuli, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
        lazuli.configure("[fetch]\namplify_bytes = 0\n");
        for (name, seed) in [("a", 1), ("b", 2)] {
            fs::write(lazuli.directory("source").join(name), odd::random(seed, SIZE)).unwrap();
        }
        let mountpoint = lazuli.directory("mnt");
        let node = Node { _alone: alone, lazuli, registry, mountpoint, driver };
        node.lazuli.ok(["convert", "dir:source", &node.image()]);
        node.mount(&node.mountpoint);
        Some(node)
    }

    fn image(&self) -> String {
        format!("{}/image:1", self.registry.host())
    }

    fn mount(&self, at: &Path) {
        self.lazuli.ok(["mount", &self.image(), at.to_str().unwrap(), "--driver", self.driver]);
    }

    fn compare(&self) {
        listing::assert_equal(self.lazuli.path("source"), self.mountpoint.clone());
    }

    fn events(&self) -> u64 {
        self.lazuli.mount_status(&self.mountpoint)["events"].as_u64().unwrap()
    }

    /// The backing files of this node's loop devices, as the kernel names them.
    fn loops(&self) -> Vec<String> {
        let blobs = fs::read_dir(self.lazuli.root().join("cache/blobs")).into_iter().flatten();
        let names: Vec<_> = blobs.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        let root = self.lazuli.root().to_str().unwrap().to_owned();
        let disks = fs::read_dir("/sys/block").unwrap().flatten();
        let files =
            disks.filter_map(|disk| fs::read_to_string(disk.path().join("loop/backing_file")).ok());
        let ours = |file: &String| {
            file.contains(&root) || names.iter().any(|name| file.contains(name.as_str()))
        };
        files.map(|file| file.trim_end().to_owned()).filter(ours).collect()
    }

    /// Those that have a file of the cache behind them.
    fn handed_over(&self) -> usize {
        self.loops().iter().filter(|file| file.ends_with("/data")).count()
    }

    fn kill_both(&self) {
        let daemon = self.lazuli.status()["daemon"].clone();
        let pids = ["keeper_pid", "worker_pid"].map(|key| {
            Pid::from_raw(i32::try_from(daemon[key].as_i64().unwrap()).unwrap()).unwrap()
        });
        kill_both(pids);
        until("both are gone", || pids.into_iter().all(is_gone));
    }
}

/// The tests of this file, with one of the drivers. Each has the attribute; `cfg(test)` changes
/// nothing.
macro_rules! tests {
    ($attribute:meta, $module:ident, $driver:literal, $($test:ident),*) => {
        mod $module {
            $(
                #[test]
                #[$attribute]
                fn $test() {
                    if let Some(node) = super::Node::new($driver) {
                        super::$test(&node);
                    }
                }
            )*

            #[test]
            #[$attribute]
            fn three_hundred_mounts_are_served_after_a_killed_worker() {
                super::three_hundred_mounts_are_served_after_a_killed_worker($driver);
            }
        }
    };
}

macro_rules! with_each_driver {
    ($($test:ident),* $(,)?) => {
        tests!(cfg(test), with_erofs, "loop", $($test),*);
        tests!(ignore = "needs a device mapper, see `make test-kernels`", with_ext4, "ext4", $($test),*);
    };
}

with_each_driver! {
    a_complete_image_is_read_without_the_daemon,
    open_files_are_served_again_after_both_died,
    nothing_is_left_after_the_last_mount,
    a_stop_by_force_leaves_errors_and_no_devices,
    images_share_the_device_of_a_blob_that_both_have,
    probes_of_a_disk_fetch_nothing_before_it_is_mounted,
}

pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < TIMEOUT, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn drop_caches() {
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
}

fn read_at(file: &File, at: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; 64 << 10];
    file.read_exact_at(&mut bytes, at).map(|()| bytes)
}

fn a_complete_image_is_read_without_the_daemon(node: &Node) {
    let open = File::open(node.mountpoint.join("a")).unwrap();
    node.compare();
    until("the blob is handed over", || node.handed_over() == 1);
    let before = node.events();
    drop_caches();
    node.compare();
    assert_eq!(node.events(), before, "the kernel asks nothing any more");
    // Not even whether there is a daemon.
    node.kill_both();
    drop_caches();
    node.compare();
    assert!(read_at(&open, 1 << 20).unwrap() == odd::random(1, SIZE)[1 << 20..][..64 << 10]);
    assert_eq!(node.lazuli.mount_status(&node.mountpoint)["driver"], node.driver);
    assert_eq!(node.handed_over(), 1);
    node.compare();
}

fn open_files_are_served_again_after_both_died(node: &Node) {
    let [upper, work, merged] = ["upper", "work", "merged"].map(|d| node.lazuli.directory(d));
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        node.mountpoint.display(),
        upper.display(),
        work.display()
    );
    let mut overlay = Command::new("mount");
    overlay.args(["-t", "overlay", "-o", &options, "overlay"]).arg(&merged);
    assert!(overlay.status().unwrap().success());
    let (open, above) =
        (File::open(node.mountpoint.join("a")).unwrap(), File::open(merged.join("b")).unwrap());
    read_at(&open, 0).unwrap();
    for round in 1..=3_u64 {
        node.kill_both();
        let at = round << 20;
        for file in [&open, &above] {
            let error = read_at(file, at).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(5), "{error}");
        }
        node.lazuli.status();
        for (file, seed) in [(&open, 1), (&above, 2)] {
            let expected = &odd::random(seed, SIZE)[at as usize..][..64 << 10];
            assert!(read_at(file, at).unwrap() == expected, "round {round}");
        }
    }
    node.compare();
    assert!(fs::read(merged.join("b")).unwrap() == odd::random(2, SIZE));
    drop((open, above));
    until("the overlay is free", || {
        Command::new("umount").arg(&merged).status().unwrap().success()
    });
}

fn nothing_is_left_after_the_last_mount(node: &Node) {
    let other = node.lazuli.directory("other");
    node.mount(&other);
    assert_eq!(node.loops().len(), 2, "bootstrap and blob: {:?}", node.loops());
    node.kill_both();
    node.lazuli.status();
    node.lazuli.kill(node.lazuli.worker());
    assert_eq!(node.loops().len(), 2, "{:?}", node.loops());
    for mountpoint in [&other, &node.mountpoint] {
        node.lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    }
    until("the devices are free", || node.loops().is_empty());
    node.mount(&node.mountpoint);
    node.compare();
    node.lazuli.ok(["umount", node.mountpoint.to_str().unwrap()]);
    node.lazuli.ok(["stop"]);
    until("the devices are free", || node.loops().is_empty());
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(node.lazuli.path(".").to_str().unwrap().trim_end_matches('.')));
}

fn a_stop_by_force_leaves_errors_and_no_devices(node: &Node) {
    let open = File::open(node.mountpoint.join("a")).unwrap();
    read_at(&open, 0).unwrap();
    let error = node.lazuli.fails(["stop"]);
    assert!(error.contains(node.mountpoint.to_str().unwrap()), "{error}");
    node.lazuli.ok(["stop", "--force"]);
    // The last process may need a moment to end.
    let mut at = 0;
    until("reads fail", || {
        at += 64 << 10;
        read_at(&open, at).is_err_and(|error| error.raw_os_error() == Some(5))
    });
    drop(open);
    until("the devices are free", || node.loops().is_empty());
}

fn images_share_the_device_of_a_blob_that_both_have(node: &Node) {
    let lazuli = &node.lazuli;
    // The same content makes the same blob; another file on top makes another image.
    let second = format!("{}/image:2", node.registry.host());
    fs::write(lazuli.path("source/empty"), "").unwrap();
    lazuli.ok(["convert", "dir:source", &second]);
    let other = lazuli.directory("other");
    lazuli.ok(["mount", &second, other.to_str().unwrap(), "--driver", node.driver]);
    assert_eq!(node.loops().len(), 3, "two bootstraps and one blob: {:?}", node.loops());
    listing::assert_equal(lazuli.path("source"), other.clone());
    lazuli.ok(["umount", node.mountpoint.to_str().unwrap()]);
    until("one bootstrap is gone", || node.loops().len() == 2);
    drop_caches();
    listing::assert_equal(lazuli.path("source"), other.clone());
    lazuli.ok(["umount", other.to_str().unwrap()]);
}

/// Programs of the system look at the beginning and end of each new disk.
fn probes_of_a_disk_fetch_nothing_before_it_is_mounted(node: &Node) {
    node.lazuli.ok(["umount", node.mountpoint.to_str().unwrap()]);
    node.lazuli.ok(["stop"]);
    let status = |node: &Node| node.lazuli.mount_status(&node.mountpoint);
    fs::remove_dir_all(node.lazuli.root().join("cache")).unwrap();
    // Whatever programs of this system probe new disks.
    node.mount(&node.mountpoint);
    thread::sleep(Duration::from_millis(300));
    let chunks = status(node)["chunks_ready"].as_u64().unwrap();
    assert_eq!(chunks, 0, "{:#}", status(node));
    node.compare();
}

fn three_hundred_mounts_are_served_after_a_killed_worker(driver: &str) {
    if !able(driver) {
        return;
    }
    let lazuli = Lazuli::new();
    let count = if crate::reliability::soak() { 300 } else { 30 };
    for number in 0..count {
        let source = lazuli.directory("source");
        fs::write(source.join("file"), odd::random(number, 5000)).unwrap();
        lazuli.ok(["convert", "dir:source", &format!("oci:lazy:{number}")]);
    }
    let begun = Instant::now();
    for number in 0..count {
        let at = lazuli.directory(&format!("mnt-{number}"));
        let image = format!("oci:lazy:{number}");
        lazuli.ok(["mount", &image, at.to_str().unwrap(), "--driver", driver]);
    }
    let took = begun.elapsed();
    lazuli.kill(lazuli.worker());
    for number in 0..count {
        let content = fs::read(lazuli.path(&format!("mnt-{number}/file"))).unwrap();
        assert!(content == odd::random(number, 5000), "{number}");
    }
    crate::reliability::report(
        &format!("mounts-{driver}"),
        &serde_json::json!({ "mounts": count, "ms_each": took.as_secs_f64() * 1e3 / count as f64 }),
    );
    for number in 0..count {
        lazuli.ok(["umount", lazuli.path(&format!("mnt-{number}")).to_str().unwrap()]);
    }
    lazuli.ok(["stop"]);
}

/// ext4 has 34 bits for seconds.
#[test]
#[ignore = "needs a device mapper, see `make test-kernels`"]
fn an_image_that_ext4_cannot_hold_is_served_by_fuse() {
    if !able("ext4") {
        return;
    }
    let lazuli = Lazuli::new();
    let late = Entry::file("late", b"content".to_vec()).mtime(1 << 34, 0);
    let image = Image::new([Layer::new(tarball::write([&late]), Compression::None)]);
    image.write_layout(&lazuli.path("source"), "late").unwrap();
    lazuli.ok(["convert", &format!("oci:{}:late", lazuli.path("source").display()), "oci:lazy:1"]);
    let at = lazuli.directory("mnt");
    let error = lazuli.fails(["mount", "oci:lazy:1", at.to_str().unwrap(), "--driver", "ext4"]);
    assert!(error.contains("ext4 cannot hold `/late`"), "{error}");
    if lazuli.status()["daemon"]["driver"] != "ext4" {
        return;
    }
    lazuli.ok(["mount", "oci:lazy:1", at.to_str().unwrap()]);
    let status = lazuli.mount_status(&at);
    assert_eq!(status["driver"], "fuse", "{status:#}");
    assert!(status["driver_reason"].as_str().unwrap().contains("late"), "{status:#}");
    assert_eq!(fs::read(at.join("late")).unwrap(), b"content");
    lazuli.kill(lazuli.worker());
    assert_eq!(fs::read(at.join("late")).unwrap(), b"content");
}

/// The file's second chunk is in the blob of an earlier layer, at the offset at which the first
/// chunk ends in its own blob unless something is stored before it.
#[test]
fn the_kernel_reads_no_file_from_a_wrong_device() {
    if !able("fuse") {
        return;
    }
    const CHUNK: usize = 1 << 20;
    let [first, second, other] = [1, 2, 3].map(|seed| odd::random(seed, CHUNK));
    let file = |first: &[u8]| Entry::file("file", [first, &second].concat());
    let before = Entry::file("before", odd::random(4, 1));
    let layer = |entries: Vec<Entry>| Layer::new(tarball::write(&entries), Compression::None);
    let lazuli = Lazuli::new();
    let mountpoint = lazuli.directory("mnt");
    let at = mountpoint.to_str().unwrap();
    let image = |name: &str, upper: Vec<Entry>| {
        let layers = [layer(vec![file(&first)]), layer(upper)];
        Image::new(layers).write_layout(&lazuli.path("source"), name).unwrap();
        // Of a repository of its own, whose other images have none of its chunks.
        let image = format!("oci:{name}:1");
        lazuli.ok(["convert", &format!("oci:source:{name}"), &image]);
        image
    };
    let is_right = || {
        let map = Map::of(FinishedFile::open(&mountpoint.join("file")).unwrap()).unwrap();
        // A page fault reads ahead around its page: here from one chunk to the next.
        assert_eq!(map.get(CHUNK - 1..CHUNK).unwrap(), &other[CHUNK - 1..]);
        map.get(0..2 * CHUNK).unwrap() == [&other[..], &second].concat()
    };
    let same_place = image("same-place", vec![file(&other)]);
    let another_place = image("another-place", vec![before, file(&other)]);

    lazuli.ok(["mount", &same_place, at]);
    assert!(is_right());
    assert_ne!(lazuli.mount_status(&mountpoint)["driver"], "loop");
    lazuli.ok(["umount", at]);
    for driver in drivers::here() {
        if driver == "loop" {
            let error = lazuli.fails(["mount", &same_place, at, "--driver", driver]);
            assert!(error.contains("wrong bytes in /file"), "{error}");
        } else {
            lazuli.ok(["mount", &same_place, at, "--driver", driver]);
            assert!(is_right(), "{driver}");
            lazuli.ok(["umount", at]);
        }
        lazuli.ok(["mount", &another_place, at, "--driver", driver]);
        assert!(is_right(), "{driver}");
        lazuli.ok(["umount", at]);
    }
}
