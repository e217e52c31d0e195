//! Lessons of one image's starts for others: the next version, another repository, another node.

use std::{fs, thread, time::Duration};

use lazuli_testkit::{
    kernel::{Feature, require},
    odd,
    registry::FakeRegistry,
};

use crate::{
    lazuli::Lazuli,
    prefetch::{LEARN, fill, forget, wait},
};

const FILES: usize = 40;

/// Decoded bytes of a file, which do not compress: a chunk each.
const SIZE: usize = 200_000;

/// The reads of starts: too far apart to be fetched together by chance.
const READ: [usize; 5] = [31, 3, 12, 22, 7];

/// With a byte budget for lessons.
fn taught() -> String {
    format!("{LEARN}escalate_bytes = 100000000\n")
}

fn needs() -> bool {
    require(Feature::Root) && require(Feature::Fanotify) && require(Feature::ErofsFileBacked)
}

fn node(config: &str) -> Lazuli {
    let lazuli = Lazuli::new();
    lazuli.configure_all(config);
    lazuli.directory("mnt");
    lazuli
}

fn mount(lazuli: &Lazuli, image: &str) {
    lazuli.ok(["mount", image, lazuli.path("mnt").to_str().unwrap()]);
}

fn umount(lazuli: &Lazuli) {
    lazuli.ok(["umount", lazuli.path("mnt").to_str().unwrap()]);
}

fn chunks_ready(lazuli: &Lazuli) -> u64 {
    lazuli.mount_status(&lazuli.path("mnt"))["chunks_ready"].as_u64().unwrap()
}

/// An image in a registry whose start is over.
fn started(lazuli: &Lazuli, registry: &FakeRegistry) {
    fill(&lazuli.directory("source"), FILES, SIZE);
    let image = convert(lazuli, registry, "app:1");
    mount(lazuli, &image);
    for number in READ {
        fs::read(lazuli.path("mnt").join(format!("file-{number:02}"))).unwrap();
    }
    umount(lazuli);
    wait("a lesson", || {
        fs::read_dir(lazuli.root().join("lessons")).is_ok_and(|all| all.count() > 0)
    });
    wait("the end of the start", || lazuli.log().contains("a start is over"));
}

/// Converts the present tree to an image of this name.
fn convert(lazuli: &Lazuli, registry: &FakeRegistry, name: &str) -> String {
    let image = format!("{}/{name}", registry.host());
    lazuli.ok(["convert", "dir:source", &image]);
    image
}

/// The next version, as `name`: one of the read files has other bytes, one has another name, and
/// one file is new.
fn next_version(lazuli: &Lazuli, registry: &FakeRegistry, name: &str) -> String {
    let source = lazuli.path("source");
    fs::write(source.join("a-new-file"), odd::random(100, SIZE)).unwrap();
    fs::write(source.join("file-22"), odd::random(101, SIZE)).unwrap();
    fs::rename(source.join("file-31"), source.join("moved")).unwrap();
    convert(lazuli, registry, name)
}

#[test]
fn the_next_version_starts_with_what_the_one_before_read() {
    if !needs() {
        return;
    }
    let lazuli = node(&taught());
    let registry = FakeRegistry::start().unwrap();
    started(&lazuli, &registry);
    let image = next_version(&lazuli, &registry, "app:2");
    forget(&lazuli);
    mount(&lazuli, &image);
    wait("what was learnt", || chunks_ready(&lazuli) == READ.len() as u64);
    registry.reset_stats();
    for name in ["moved", "file-03", "file-12", "file-22", "file-07"] {
        assert_eq!(fs::read(lazuli.path("mnt").join(name)).unwrap().len(), SIZE);
    }
    assert_eq!(registry.stats().requests, 0, "nothing had to be waited for");
    umount(&lazuli);
}

#[test]
fn a_lesson_stays_in_its_repository_and_costs_no_more_than_a_start_may() {
    if !needs() {
        return;
    }
    let lazuli = node(&taught());
    let registry = FakeRegistry::start().unwrap();
    started(&lazuli, &registry);
    let next = next_version(&lazuli, &registry, "app:2");
    let other = convert(&lazuli, &registry, "other:1");
    forget(&lazuli);
    mount(&lazuli, &other);
    thread::sleep(Duration::from_millis(500));
    assert_eq!(chunks_ready(&lazuli), 0, "another repository was told");
    umount(&lazuli);
    lazuli.ok(["stop"]);
    lazuli.configure_all(&format!("{LEARN}escalate_bytes = 500000\n"));
    mount(&lazuli, &next);
    wait("a part of the lesson", || chunks_ready(&lazuli) > 0);
    thread::sleep(Duration::from_millis(500));
    assert_eq!(chunks_ready(&lazuli), 2, "500 kB are two files");
    umount(&lazuli);
    lazuli.ok(["stop"]);
    fs::remove_dir_all(lazuli.root().join("cache")).unwrap();
    lazuli.configure_all(LEARN);
    mount(&lazuli, &next);
    thread::sleep(Duration::from_millis(500));
    assert_eq!(chunks_ready(&lazuli), 0, "nothing is wanted but the guess");
    umount(&lazuli);
}

#[test]
fn another_node_finds_the_lesson_in_the_registry() {
    if !needs() {
        return;
    }
    let registry = FakeRegistry::start().unwrap();
    for api in [true, false] {
        if !api {
            registry.without_referrers();
        }
        let first = node(&format!("{}publish = true\n", taught()));
        started(&first, &registry);
        wait("publication", || first.log().contains("published a lesson"));
        let image = next_version(&first, &registry, "app:2");
        let second = node(&taught());
        mount(&second, &image);
        wait("what was learnt", || chunks_ready(&second) == READ.len() as u64);
        umount(&second);
        let unable = node(LEARN);
        registry.reset_stats();
        mount(&unable, &image);
        thread::sleep(Duration::from_millis(300));
        assert_eq!(chunks_ready(&unable), 0);
        umount(&unable);
        first.ok(["stop"]);
    }
    assert_eq!(registry.violations(), [""; 0]);
}
