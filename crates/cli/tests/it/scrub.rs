//! The cache is read back, and changed bytes in it are found.

use std::{fs::File, os::unix::fs::FileExt as _, path::PathBuf};

use lazuli_testkit::{
    kernel::{Feature, require},
    listing, odd,
};
use serde_json::Value;

use crate::lazuli::Lazuli;

const SIZE: usize = 6 << 20;

/// An image of some chunks that was read as a whole, and its file in the cache.
fn read_image(driver: &str) -> Option<(Lazuli, PathBuf, PathBuf)> {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return None;
    }
    let lazuli = Lazuli::new();
    let source = lazuli.directory("source");
    std::fs::write(source.join("a"), odd::random(1, SIZE)).unwrap();
    lazuli.ok(["convert", "dir:source", "oci:lazy:image"]);
    let mountpoint = lazuli.directory("mnt");
    lazuli.ok(["mount", "--driver", driver, "oci:lazy:image", mountpoint.to_str().unwrap()]);
    listing::assert_equal(&source, &mountpoint);
    let blobs = lazuli.root().join("cache/blobs");
    let blob = std::fs::read_dir(blobs).unwrap().next().unwrap().unwrap();
    Some((lazuli, mountpoint, blob.path().join("data")))
}

/// Changes one byte of the third chunk.
fn flip(data: &PathBuf) {
    let file = File::options().read(true).write(true).open(data).unwrap();
    let (mut byte, at) = ([0], (2 << 20) + 12_345);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
}

fn scrub(lazuli: &Lazuli) -> (Option<i32>, Value) {
    let output = lazuli.output(["scrub", "--json"]);
    let error = String::from_utf8_lossy(&output.stderr);
    let report = serde_json::from_slice(&output.stdout);
    (output.status.code(), report.unwrap_or_else(|_| panic!("{error}{}", lazuli.log())))
}

fn finds_the_third_chunk(lazuli: &Lazuli) {
    let (code, report) = scrub(lazuli);
    assert_eq!(code, Some(1), "{report:#}");
    let wrong = report["wrong"].as_array().unwrap();
    assert_eq!(wrong.len(), 1, "{report:#}");
    assert_eq!((&wrong[0]["start"], &wrong[0]["end"]), (&(2 << 20).into(), &(3 << 20).into()));
    assert_eq!(wrong[0]["images"].as_array().unwrap().len(), 1, "{report:#}");
    let (code, report) = scrub(lazuli);
    assert_eq!((code, report["chunks"].as_u64()), (Some(0), Some(5)), "{report:#}");
}

#[test]
fn a_changed_byte_under_a_running_daemon_is_found_and_fetched_again() {
    for driver in ["fanotify", "fuse"] {
        let Some((lazuli, mountpoint, data)) = read_image(driver) else { return };
        let (code, report) = scrub(&lazuli);
        assert_eq!((code, report["chunks"].as_u64()), (Some(0), Some(6)), "{report:#}");
        flip(&data);
        finds_the_third_chunk(&lazuli);
        // The kernel may have had the wrong bytes in memory; it has them no more.
        listing::assert_equal(lazuli.path("source"), &mountpoint);
        assert_eq!(lazuli.mount_status(&mountpoint)["chunks_ready"], 6);
        assert!(lazuli.ok(["scrub"]).contains("every digest is right"));
    }
}

#[test]
fn wrong_bytes_that_were_read_already_are_taken_back() {
    let Some((lazuli, mountpoint, data)) = read_image("fanotify") else { return };
    let copy = mountpoint.join("a");
    let read_anew = || {
        let file = File::open(&copy).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        std::fs::read(&copy).unwrap() == odd::random(1, SIZE)
    };
    let events = || lazuli.mount_status(&mountpoint)["events"].as_u64().unwrap();
    // The blob is complete when the kernel reads it without a question, a moment after the last
    // chunk.
    for _ in 0..200 {
        let before = events();
        assert!(read_anew());
        if events() == before {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    flip(&data);
    assert!(!read_anew(), "no event for a complete blob");
    finds_the_third_chunk(&lazuli);
    assert!(std::fs::read(&copy).unwrap() == odd::random(1, SIZE));
}

#[test]
fn pages_of_chunks_that_are_missing_are_dropped() {
    let Some((lazuli, mountpoint, data)) = read_image("fanotify") else { return };
    // The next worker has forgotten all chunks, but the kernel has pages of them, which may be
    // wrong.
    let worker = lazuli.worker();
    rustix::process::kill_process(worker, rustix::process::Signal::STOP).unwrap();
    for map in ["live", "durable"] {
        let _ = std::fs::remove_file(data.with_file_name(map));
    }
    lazuli.kill(worker);
    let ready = || lazuli.mount_status(&mountpoint)["chunks_ready"].as_u64().unwrap();
    listing::assert_equal(lazuli.path("source"), &mountpoint);
    assert_eq!(ready(), 0, "the kernel had everything");
    let (code, report) = scrub(&lazuli);
    assert_eq!(code, Some(0), "{report:#}");
    listing::assert_equal(lazuli.path("source"), &mountpoint);
    assert_eq!(ready(), 6, "the kernel had to ask for everything");
}

#[test]
fn a_changed_byte_is_found_after_a_restart() {
    let Some((lazuli, mountpoint, data)) = read_image("fanotify") else { return };
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    lazuli.ok(["stop"]);
    flip(&data);
    // Starts the daemon.
    finds_the_third_chunk(&lazuli);
    lazuli.ok(["mount", "oci:lazy:image", mountpoint.to_str().unwrap()]);
    listing::assert_equal(lazuli.path("source"), &mountpoint);
}

#[test]
fn a_reader_after_a_restart_gets_right_bytes_without_a_scrub() {
    let Some((lazuli, mountpoint, data)) = read_image("fanotify") else { return };
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    lazuli.ok(["stop"]);
    flip(&data);
    lazuli.ok(["mount", "oci:lazy:image", mountpoint.to_str().unwrap()]);
    listing::assert_equal(lazuli.path("source"), &mountpoint);
    let fetched = lazuli.mount_status(&mountpoint)["bytes_fetched"].as_u64().unwrap();
    assert!(fetched < 2 << 20, "one chunk, and what the name means: {fetched}");
}

#[test]
fn blobs_of_no_image_and_damaged_images_are_reported() {
    let Some((lazuli, mountpoint, _)) = read_image("fuse") else { return };
    lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    let image = std::fs::read_dir(lazuli.root().join("images")).unwrap().next().unwrap().unwrap();
    std::fs::write(image.path().join("bootstrap.digest"), "x").unwrap();
    let (code, report) = scrub(&lazuli);
    assert_eq!(code, Some(1), "{report:#}");
    assert_eq!(report["damaged"].as_array().unwrap().len(), 1, "{report:#}");
    std::fs::remove_dir_all(image.path()).unwrap();
    let (code, report) = scrub(&lazuli);
    assert_eq!(code, Some(0), "{report:#}");
    assert_eq!(report["unused"].as_array().unwrap().len(), 1, "{report:#}");
    assert!(lazuli.ok(["scrub"]).contains("no image describes it"));
}
