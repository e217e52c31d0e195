//! A state directory on a full disk: nothing is lost, and everything resumes when there is space.

use std::{fs, path::PathBuf};

use lazuli_testkit::{
    ext4::{self, Ext4},
    kernel::{Feature, require},
    odd,
};

use crate::{drivers, lazuli::Lazuli};

const SIZE: usize = 3 << 20;

/// A state directory on a disk of its own, and an image of two files.
fn on_a_disk() -> Option<(Lazuli, Ext4, PathBuf)> {
    if !ext4::able() || !require(Feature::Fuse) {
        return None;
    }
    let lazuli = Lazuli::new();
    let source = lazuli.directory("source");
    for (seed, name) in [(1, "a"), (2, "b")] {
        fs::write(source.join(name), odd::random(seed, SIZE)).unwrap();
    }
    lazuli.ok(["convert", "dir:source", "oci:lazy:image"]);
    lazuli.configure("[fetch]\ndeadline_seconds = 2\namplify_bytes = 0\n");
    let root = lazuli.directory("root");
    let disk = Ext4::create(&lazuli.path("disk"), 32 << 20, &root).unwrap();
    let mountpoint = lazuli.directory("mnt");
    Some((lazuli, disk, mountpoint))
}

fn is_right(mountpoint: &std::path::Path, seed: u64, name: &str) -> bool {
    fs::read(mountpoint.join(name)).unwrap() == odd::random(seed, SIZE)
}

#[test]
fn a_worker_on_a_full_disk_serves_earlier_mounts() {
    let Some((lazuli, disk, mountpoint)) = on_a_disk() else { return };
    for driver in drivers::here() {
        let at = mountpoint.to_str().unwrap();
        lazuli.ok(["mount", "--driver", driver, "oci:lazy:image", at]);
        assert!(is_right(&mountpoint, 1, "a"));
        let filler = disk.fill(0).unwrap();
        lazuli.kill(lazuli.worker());
        assert!(is_right(&mountpoint, 1, "a"));
        if driver == "fanotify" {
            let error = fs::read(mountpoint.join("b")).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(5), "{error}");
        }
        fs::remove_file(filler).unwrap();
        assert!(is_right(&mountpoint, 2, "b") && is_right(&mountpoint, 1, "a"));
        lazuli.ok(["umount", at]);
    }
    lazuli.ok(["stop"]);
}

#[test]
fn a_mount_that_finds_no_room_says_so() {
    let Some((lazuli, disk, mountpoint)) = on_a_disk() else { return };
    // Starts the daemon.
    lazuli.ok(["scrub"]);
    let filler = disk.fill(0).unwrap();
    let error = lazuli.fails(["mount", "oci:lazy:image", mountpoint.to_str().unwrap()]);
    assert!(error.to_lowercase().contains("no space"), "{error}");
    fs::remove_file(filler).unwrap();
    lazuli.ok(["mount", "oci:lazy:image", mountpoint.to_str().unwrap()]);
    assert!(is_right(&mountpoint, 1, "a") && is_right(&mountpoint, 2, "b"));
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    lazuli.ok(["stop"]);
}
