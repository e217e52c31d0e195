//! The content of a mount, with both drivers, compared with umoci's.

use std::{
    fs::{self, Permissions},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use lazuli_testkit::{
    kernel::{Feature, require},
    listing,
    oci::{Compression, Image},
    odd,
};

use crate::{
    drivers::{self, able},
    lazuli::{Lazuli, corpus},
    prefetch,
    registry::Registry,
};

/// `umoci unpack` of an OCI layout: the reference for an image's content.
pub(crate) fn unpack(layout: &Path, tag: &str, lazuli: &Lazuli) -> PathBuf {
    let bundle = lazuli.path("bundle");
    let image = format!("{}:{tag}", layout.display());
    let output = Command::new("umoci").args(["unpack", "--image", &image]).arg(&bundle).output();
    let output = output.expect("umoci, which `make test` installs");
    assert!(output.status.success(), "umoci: {}", String::from_utf8_lossy(&output.stderr));
    bundle.join("rootfs")
}

/// Converts `layout`, mounts it with `driver`, compares every entry, and checks the image.
fn same_tree(layout: &Path, tag: &str, driver: &str, target: Option<&str>) {
    if !able(driver) || !require(Feature::Program("umoci")) {
        return;
    }
    let lazuli = Lazuli::new();
    let source = format!("oci:{}:{tag}", layout.display());
    let own = format!("oci:{}:lazy", lazuli.path("image").display());
    let image = target.unwrap_or(&own);
    lazuli.ok(["convert", &source, image]);
    let mountpoint = lazuli.directory("mnt");
    lazuli.ok(["mount", image, mountpoint.to_str().unwrap(), "--driver", driver]);
    let status = lazuli.mount_status(&mountpoint);
    assert_eq!(status["driver"], driver, "{status:#}");
    listing::assert_equal(unpack(layout, tag, &lazuli), mountpoint.clone());
    let status = lazuli.mount_status(&mountpoint);
    assert!(status["requests"].as_u64().unwrap() > 0, "{status:#}");
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    assert_eq!(lazuli.status()["mounts"].as_array().unwrap().len(), 0);
    lazuli.ok(["check", image, "--against", &source]);
}

#[test]
fn odd_tree_with_fanotify() {
    let directory = tempfile::tempdir().unwrap();
    odd::image().compressed_with(Compression::Gzip).write_layout(directory.path(), "odd").unwrap();
    same_tree(directory.path(), "odd", "fanotify", None);
}

#[test]
fn odd_tree_with_loop() {
    let directory = tempfile::tempdir().unwrap();
    odd::image().compressed_with(Compression::Gzip).write_layout(directory.path(), "odd").unwrap();
    same_tree(directory.path(), "odd", "loop", None);
}

#[test]
#[ignore = "needs a device mapper, see `make test-kernels`"]
fn odd_tree_with_ext4() {
    let directory = tempfile::tempdir().unwrap();
    odd::image().compressed_with(Compression::Gzip).write_layout(directory.path(), "odd").unwrap();
    same_tree(directory.path(), "odd", "ext4", None);
}

#[test]
fn odd_tree_with_fuse() {
    let directory = tempfile::tempdir().unwrap();
    odd::image().compressed_with(Compression::Gzip).write_layout(directory.path(), "odd").unwrap();
    same_tree(directory.path(), "odd", "fuse", None);
}

/// A user of the node does not become root through a mounted image.
#[test]
fn set_user_id_programs_work_where_they_are_asked_for() {
    for driver in drivers::here() {
        let lazuli = Lazuli::new();
        let program = lazuli.directory("source").join("id");
        fs::copy("/usr/bin/id", &program).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
        lazuli.ok(["convert", "dir:source", "oci:image:1"]);
        // A directory that all users can read.
        fs::set_permissions(lazuli.path("."), Permissions::from_mode(0o755)).unwrap();
        for (options, expected) in [(&[][..], "65534"), (&["--suid"], "0")] {
            let mountpoint = lazuli.directory("mnt");
            let at = mountpoint.to_str().unwrap();
            lazuli.ok(["mount", "oci:image:1", at, "--driver", driver].iter().chain(options));
            let mut command = Command::new(mountpoint.join("id"));
            let output = command.arg("-u").uid(65534).gid(65534).output().unwrap();
            assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), expected, "{driver}");
            lazuli.ok(["umount", at]);
        }
    }
}

#[test]
fn corpus_images_from_a_registry_show_the_same_tree() {
    let registry = Registry::start();
    for name in ["busybox", "debian-slim", "redis", "lua"] {
        let Some(layout) = corpus(name) else { return };
        for driver in drivers::here() {
            let target = registry.image(&format!("{name}:{driver}"));
            same_tree(&layout, "latest", driver, Some(&target));
        }
    }
}

/// Returns whether the kernel reads the blobs of the mount with direct I/O.
fn reads_directly(mountpoint: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let mount = table.lines().find(|line| line.contains(mountpoint.to_str().unwrap()));
    mount.expect("it is mounted").contains("directio")
}

#[test]
fn the_configuration_allows_and_forbids_direct_reads() {
    if !able("fanotify") {
        return;
    }
    let lazuli = Lazuli::new();
    std::fs::write(lazuli.directory("source").join("a"), odd::random(1, 300_000)).unwrap();
    lazuli.ok(["convert", "dir:source", "oci:lazy:1"]);
    // Whatever this kernel's release is.
    lazuli.configure("[cache]\ndirect_io = true\n");
    let mountpoint = lazuli.directory("mnt");
    let began = Instant::now();
    lazuli.ok(["mount", "oci:lazy:1", mountpoint.to_str().unwrap(), "--driver", "fanotify"]);
    listing::assert_equal(lazuli.path("source"), mountpoint.clone());
    let until_direct = |began: Instant| {
        while !reads_directly(&mountpoint) {
            assert!(began.elapsed() < Duration::from_secs(120), "{}", lazuli.log());
            thread::sleep(Duration::from_millis(50));
        }
        began.elapsed()
    };
    // Its data is in memory.
    assert!(until_direct(began) > Duration::from_secs(8));
    // Now it is on the disk alone.
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    lazuli.ok(["mount", "oci:lazy:1", mountpoint.to_str().unwrap(), "--driver", "fanotify"]);
    assert!(until_direct(Instant::now()) < Duration::from_secs(20));
    // A mount that is taken over returns to buffered reads, and a new one starts with them.
    lazuli.configure("[cache]\ndirect_io = false\n");
    lazuli.ok(["daemon", "--takeover"]);
    assert!(!reads_directly(&mountpoint));
    let other = lazuli.directory("other");
    lazuli.ok(["mount", "oci:lazy:1", other.to_str().unwrap(), "--driver", "fanotify"]);
    let reason = lazuli.status()["daemon"]["driver_reason"].to_string();
    assert!(reason.contains("the configuration forbids direct reads"), "{reason}");
    listing::assert_equal(lazuli.path("source"), other.clone());
    assert!(!reads_directly(&mountpoint) && !reads_directly(&other));
}

#[test]
fn a_hundred_layers_are_a_hundred_devices() {
    let layers = (0..100).map(|index| {
        let name = format!("file-{index}");
        lazuli_testkit::oci::Layer::new(tar_of(&name, &odd::random(index, 5000)), Compression::None)
    });
    let lazuli = Lazuli::new();
    let layout = lazuli.path("source");
    Image::new(layers).write_layout(&layout, "many").unwrap();
    lazuli.ok(["convert", &format!("oci:{}:many", layout.display()), "oci:lazy:many"]);
    let mountpoint = lazuli.directory("mnt");
    for driver in drivers::here().filter(|driver| *driver != "fuse") {
        lazuli.ok(["mount", "oci:lazy:many", mountpoint.to_str().unwrap(), "--driver", driver]);
        for index in 0..100 {
            let content = std::fs::read(mountpoint.join(format!("file-{index}"))).unwrap();
            assert!(content == odd::random(index, 5000), "file-{index}");
        }
        lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    }
}

#[test]
fn a_complete_image_asks_nothing() {
    if !able("fanotify") {
        return;
    }
    let lazuli = Lazuli::new();
    let source = lazuli.directory("source");
    for index in 0..20 {
        std::fs::write(source.join(format!("{index}")), odd::random(index, 300_000)).unwrap();
    }
    lazuli.ok(["convert", "dir:source", "oci:lazy:full"]);
    let mountpoint = lazuli.directory("mnt");
    lazuli.ok(["mount", "oci:lazy:full", mountpoint.to_str().unwrap()]);
    listing::assert_equal(source.clone(), mountpoint.clone());
    let complete = lazuli.mount_status(&mountpoint);
    assert_eq!(complete["chunks_ready"], complete["chunks_total"], "{complete:#}");
    // Marks go when the last chunks are on the disk, some time after they could be read.
    prefetch::wait("the kernel reads without asking", || {
        let before = lazuli.mount_status(&mountpoint)["events"].clone();
        std::fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
        listing::assert_equal(source.clone(), mountpoint.clone());
        lazuli.mount_status(&mountpoint)["events"] == before
    });
}

/// Without root: FUSE through fusermount3, a daemon and a state directory of the user's own.
#[test]
fn mounts_without_root() {
    use std::os::unix::{fs::chown, process::CommandExt};
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let nobody = 65534;
    let lazuli = Lazuli::new();
    // Distributions let all users open it; bare machines do not, and get their mode back below.
    let mode = std::fs::metadata("/dev/fuse").unwrap().permissions();
    std::fs::set_permissions("/dev/fuse", std::fs::Permissions::from_mode(0o666)).unwrap();
    std::fs::copy(env!("CARGO_BIN_EXE_lazuli"), lazuli.path("lazuli")).unwrap();
    std::fs::write(lazuli.directory("source").join("file"), b"content").unwrap();
    for path in ["", "mnt"] {
        chown(lazuli.directory(path), Some(nobody), Some(nobody)).unwrap();
    }
    let user = |arguments: &[&str]| {
        let mut command = Command::new(lazuli.path("lazuli"));
        command.arg("--root").arg(lazuli.root()).args(arguments);
        command.current_dir(lazuli.path("")).env("HOME", lazuli.path("")).uid(nobody).gid(nobody);
        let output = command.output().unwrap();
        assert!(
            output.status.success(),
            "{}{}",
            String::from_utf8_lossy(&output.stderr),
            lazuli.log()
        );
        String::from_utf8(output.stdout).unwrap()
    };
    user(&["convert", "dir:source", "oci:lazy:x"]);
    user(&["mount", "oci:lazy:x", "mnt"]);
    let mut cat = Command::new("cat");
    cat.arg(lazuli.path("mnt/file")).uid(nobody).gid(nobody);
    assert_eq!(cat.output().unwrap().stdout, b"content");
    let status = user(&["status"]);
    assert!(status.contains("fuse") && status.contains("CAP_SYS_ADMIN"), "{status}");
    user(&["umount", "mnt"]);
    user(&["mount", "oci:lazy:x", "mnt"]);
    user(&["stop", "--force"]);
    std::fs::set_permissions("/dev/fuse", mode).unwrap();
}

#[test]
fn two_mounts_of_an_image_fetch_once() {
    if !able("fanotify") {
        return;
    }
    let lazuli = Lazuli::new();
    let source = lazuli.directory("source");
    std::fs::write(source.join("file"), odd::random(1, 3 << 20)).unwrap();
    lazuli.ok(["convert", "dir:source", "oci:lazy:twice"]);
    let [one, two] = ["one", "two"].map(|name| lazuli.directory(name));
    for mountpoint in [&one, &two] {
        lazuli.ok(["mount", "oci:lazy:twice", mountpoint.to_str().unwrap()]);
    }
    let content = std::fs::read(one.join("file")).unwrap();
    let fetched = lazuli.mount_status(&one)["requests"].clone();
    assert!(std::fs::read(two.join("file")).unwrap() == content);
    assert_eq!(lazuli.mount_status(&one)["requests"], fetched);
    lazuli.ok(["umount", one.to_str().unwrap()]);
    assert!(std::fs::read(two.join("file")).unwrap() == content);
}

pub(crate) fn tar_of(name: &str, content: &[u8]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    if let Some((directory, _)) = name.split_once('/') {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_size(0);
        header.set_mode(0o750);
        header.set_mtime(1_000_000_000);
        tar.append_data(&mut header, directory, &[][..]).unwrap();
    }
    let mut header = tar::Header::new_ustar();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    tar.append_data(&mut header, name, content).unwrap();
    tar.into_inner().unwrap()
}
