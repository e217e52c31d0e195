//! Images ordered by the reads of their starts: hot chunks first in each blob, or in a blob of
//! their own.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use lazuli_image::{
    Digest, Trace,
    oci::{Descriptor, Manifest},
};
use lazuli_testkit::{
    kernel::{Feature, require},
    listing, odd,
    registry::{FakeRegistry, runs},
};
use serde_json::Value;

use crate::lazuli::{Lazuli, corpus};

/// Files of the image; each is one chunk, and they lie one behind the other.
const FILES: u64 = 40;

/// Decoded bytes of a file, which do not compress.
const SIZE: usize = 50_000;

/// The reads of a start, in this order.
const READ: [u32; 5] = [31, 3, 12, 22, 7];

/// Their stored bytes.
const HOT: u64 = READ.len() as u64 * SIZE as u64;

/// Without neighbours, so that only requested data arrives.
const AHEAD: &str = "[fetch]\namplify_bytes = 0\n[prefetch]\nrest_bytes_per_second = 0\n";

fn name(number: u64) -> String {
    format!("file-{number:02}")
}

/// A directory to convert, `dir:source`.
fn source(lazuli: &Lazuli) {
    let source = lazuli.directory("source");
    for number in 0..FILES {
        fs::write(source.join(name(number)), odd::random(number, SIZE)).unwrap();
    }
}

fn blobs(lazuli: &Lazuli, image: &str) -> Vec<Digest> {
    let json: Value = serde_json::from_str(&lazuli.ok(["inspect", image, "--json"])).unwrap();
    let blobs = json["blobs"].as_array().unwrap();
    blobs.iter().map(|blob| blob["id"].as_str().unwrap().parse().unwrap()).collect()
}

/// A trace of the first blob of an image, in the file `trace`.
pub(crate) fn trace(lazuli: &Lazuli, image: &str, read: &[u32]) {
    let id = blobs(lazuli, image)[0];
    let trace = Trace::of_start(vec![id], read.iter().map(|number| (0, *number, 0)));
    fs::write(lazuli.path("trace"), trace.encode()).unwrap();
}

/// The manifests of a layout, by tag.
fn manifests(layout: &Path) -> BTreeMap<String, Manifest> {
    let json = |path: &Path| -> Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
    let index = json(&layout.join("index.json"));
    let entries = index["manifests"].as_array().unwrap().iter().map(|entry| {
        let tag = entry["annotations"]["org.opencontainers.image.ref.name"].as_str().unwrap();
        let digest: Digest = entry["digest"].as_str().unwrap().parse().unwrap();
        let raw = fs::read(layout.join("blobs/sha256").join(digest.hex())).unwrap();
        (tag.to_owned(), Manifest::parse(&raw).unwrap())
    });
    entries.collect()
}

fn hot_bytes(manifest: &Manifest) -> Vec<Option<u64>> {
    manifest.layers.iter().map(Descriptor::hot_bytes).collect()
}

#[test]
fn a_conversion_puts_hot_chunks_first() {
    let lazuli = Lazuli::new();
    source(&lazuli);
    lazuli.ok(["convert", "dir:source", "oci:lazy:plain"]);
    trace(&lazuli, "oci:lazy:plain", &[&READ[..], &[1000]].concat());
    for tag in ["one", "two"] {
        let target = format!("oci:lazy:{tag}");
        let said = lazuli.ok(["convert", "dir:source", &target, "--trace", "trace"]);
        assert!(said.contains("5 chunks come first") && said.contains("ignored   1 hot"), "{said}");
        lazuli.ok(["check", &target, "--against", "dir:source"]);
    }
    let made = manifests(&lazuli.path("lazy"));
    assert_eq!(made["one"], made["two"]);
    assert_eq!(hot_bytes(&made["one"]), [Some(HOT), None]);
    assert_eq!(hot_bytes(&made["plain"]), [None, None]);
    let blob = lazuli.path("lazy/blobs/sha256").join(made["one"].layers[0].digest.hex());
    let expected = READ.map(|number| odd::random(number.into(), SIZE)).concat();
    assert!(fs::read(blob).unwrap()[..expected.len()] == expected);
}

#[test]
fn traces_of_other_images_are_refused() {
    let lazuli = Lazuli::new();
    source(&lazuli);
    lazuli.ok(["convert", "dir:source", "oci:lazy:plain"]);
    fs::write(lazuli.path("trace"), "no trace").unwrap();
    for verb in [
        &["convert", "dir:source", "oci:lazy:new"][..],
        &["optimize", "oci:lazy:plain", "oci:lazy:new"],
    ] {
        let error = lazuli.fails([verb, &["--trace", "trace"]].concat());
        assert!(error.contains("cannot use trace"), "{error}");
        let error = lazuli.fails([verb, &["--trace", "nothing"]].concat());
        assert!(error.contains("cannot use nothing"), "{error}");
    }
    let other = Trace::of_start(vec![Digest::sha256([1; 32])], [(0, 0, 0), (0, 1, 0)]);
    fs::write(lazuli.path("trace"), other.encode()).unwrap();
    let error = lazuli.fails(["convert", "dir:source", "oci:lazy:new", "--trace", "trace"]);
    assert!(error.contains("it has 2 hot chunks, and none of them"), "{error}");
    let error = lazuli.fails(["optimize", "oci:lazy:plain", "oci:lazy:new", "--trace", "trace"]);
    assert!(error.contains("not one of oci:lazy:plain"), "{error}");
    let error = lazuli.fails(["optimize", "oci:lazy:plain"]);
    assert!(error.contains("no start of oci:lazy:plain was recorded"), "{error}");
    let fixed = format!("oci:lazy@{}", Digest::sha256([1; 32]));
    let error = lazuli.fails(["optimize", "oci:lazy:plain", &fixed]);
    assert!(error.contains("say another TARGET"), "{error}");
    assert_eq!(manifests(&lazuli.path("lazy")).len(), 1, "nothing was stored");
}

#[test]
fn optimize_adds_a_hot_blob() {
    let lazuli = Lazuli::new();
    source(&lazuli);
    lazuli.ok(["convert", "dir:source", "oci:lazy:plain"]);
    trace(&lazuli, "oci:lazy:plain", &READ);
    // Beside it, somewhere else, and in its place.
    lazuli.ok(["optimize", "oci:lazy:plain", "oci:lazy:new", "--trace", "trace"]);
    lazuli.ok(["optimize", "oci:lazy:plain", "oci:else:new", "--trace", "trace"]);
    let plain = manifests(&lazuli.path("lazy"))["plain"].clone();
    let said = lazuli.ok(["optimize", "oci:lazy:plain", "--trace", "trace"]);
    assert!(said.contains("reused    1 of 1 blobs") && said.contains("uploaded 0 B"), "{said}");
    let made = manifests(&lazuli.path("lazy"));
    assert_eq!(made["new"], made["plain"]);
    assert_eq!(made["new"], manifests(&lazuli.path("else"))["new"]);
    assert_eq!(hot_bytes(&made["new"]), [None, Some(HOT), None]);
    assert_eq!(made["new"].layers[0].digest, plain.layers[0].digest);
    for image in ["oci:lazy:new", "oci:else:new"] {
        lazuli.ok(["check", image, "--against", "dir:source"]);
    }
    // A trace of the new image makes another hot blob in place of the first.
    let id = made["new"].layers[1].digest;
    let next = Trace::of_start(vec![plain.layers[0].digest, id], [(1, 4, 0), (0, 39, 1)]);
    fs::write(lazuli.path("trace"), next.encode()).unwrap();
    lazuli.ok(["optimize", "oci:lazy:new", "--trace", "trace"]);
    let again = manifests(&lazuli.path("lazy"))["new"].clone();
    assert_eq!(hot_bytes(&again), [None, Some(2 * SIZE as u64), None]);
    assert_ne!(again.layers[1].digest, id);
    lazuli.ok(["check", "oci:lazy:new", "--against", "dir:source"]);
}

#[test]
fn baked_chunks_arrive_before_they_are_read() {
    if !require(Feature::Root) {
        return;
    }
    let lazuli = Lazuli::new();
    lazuli.configure_all(AHEAD);
    source(&lazuli);
    let registry = FakeRegistry::start().unwrap();
    let image = |tag: &str| format!("{}/app:{tag}", registry.host());
    lazuli.ok(["convert", "dir:source", &image("plain")]);
    trace(&lazuli, &image("plain"), &READ);
    lazuli.ok(["convert", "dir:source", &image("first"), "--trace", "trace"]);
    registry.reset_stats();
    lazuli.ok(["optimize", &image("plain"), &image("blob"), "--trace", "trace"]);
    let log = registry.log();
    let sent = log.iter().filter(|entry| entry.method == "PUT" && entry.target.contains("/blobs/"));
    assert_eq!(sent.count(), 3, "hot blob, bootstrap and config: {log:#?}");
    assert_eq!(registry.violations(), Vec::<String>::new());
    let mountpoint = lazuli.directory("mnt");
    let path = mountpoint.to_str().unwrap();
    for driver in ["fanotify", "fuse"] {
        if driver == "fanotify"
            && !(require(Feature::Fanotify) && require(Feature::ErofsFileBacked))
        {
            continue;
        }
        for tag in ["first", "blob"] {
            registry.reset_stats();
            lazuli.ok(["mount", &image(tag), path, "--driver", driver]);
            let begun = Instant::now();
            let ready = || lazuli.mount_status(&mountpoint)["chunks_ready"].clone();
            while ready() != READ.len() {
                assert!(begun.elapsed() < Duration::from_secs(20), "{} chunks", ready());
                thread::sleep(Duration::from_millis(20));
            }
            let asked = runs(&registry.log());
            assert_eq!(asked.len(), 1, "{tag} over {driver}: {:#?}", registry.log());
            let before = registry.stats().requests;
            for number in READ {
                let content = fs::read(mountpoint.join(name(number.into()))).unwrap();
                assert!(content == odd::random(number.into(), SIZE));
            }
            assert_eq!(registry.stats().requests, before, "no reader had to wait");
            listing::assert_equal(lazuli.path("source"), &mountpoint);
            lazuli.ok(["umount", path]);
            lazuli.ok(["stop"]);
            for state in ["cache", "images", "traces"] {
                let _ = fs::remove_dir_all(lazuli.root().join(state));
            }
        }
    }
}

#[test]
fn wrong_bytes_never_get_into_a_hot_blob() {
    let lazuli = Lazuli::new();
    source(&lazuli);
    lazuli.ok(["convert", "dir:source", "oci:lazy:plain"]);
    trace(&lazuli, "oci:lazy:plain", &READ);
    let id = blobs(&lazuli, "oci:lazy:plain")[0];
    let path = lazuli.path("lazy/blobs/sha256").join(id.hex());
    let mut bytes = fs::read(&path).unwrap();
    bytes[22 * SIZE + 5] ^= 1;
    fs::write(&path, bytes).unwrap();
    let error = lazuli.fails(["optimize", "oci:lazy:plain", "--trace", "trace"]);
    assert!(error.contains(&format!("chunk 22 of blob {id}")), "{error}");
}

/// A directory for temporary files, whose content is counted afterwards.
fn with_scratch<'a>(command: &'a mut Command, lazuli: &Lazuli) -> &'a mut Command {
    command.env("TMPDIR", lazuli.directory("scratch"))
}

#[test]
fn a_trial_run_shows_what_is_hot() {
    if !require(Feature::Root) || !require(Feature::Program("runc")) {
        return;
    }
    let Some(layout) = corpus("busybox") else { return };
    let lazuli = Lazuli::new();
    let source = format!("oci:{}", layout.display());
    let convert = |tag: &str, run: &[&str]| {
        let target = format!("oci:lazy:{tag}");
        let mut command = lazuli.command(["convert", &source, &target, "--trace-run"]);
        with_scratch(command.args(run), &lazuli).output().unwrap()
    };
    // One that ends, and one that continues, ignores signals, and has to be killed.
    let mut took = Vec::new();
    let network = fs::read_link("/proc/self/ns/net").unwrap();
    let alone = format!("ls / && [ $(readlink /proc/self/ns/net) != {network:?} ]");
    for (tag, run) in [("ends", &["sh", "-c", &alone][..]), ("goes-on", &["sleep", "1000"])] {
        let began = Instant::now();
        let output = convert(tag, run);
        took.push(began.elapsed());
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("come first"), "{output:?}");
        lazuli.ok(["check", &format!("oci:lazy:{tag}"), "--against", &source]);
    }
    // The run waits for the latter until it reads nothing new for 5 s, and not for the former.
    assert!(took[0] + Duration::from_secs(4) < took[1], "{took:?}");
    let made = manifests(&lazuli.path("lazy"));
    for manifest in made.values() {
        assert!(hot_bytes(manifest).iter().flatten().sum::<u64>() > 0, "{manifest:#?}");
    }
    let output = convert("fails", &["false"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("failed with exit code 1"), "{output:?}");
    assert_eq!(manifests(&lazuli.path("lazy")).len(), 2, "nothing was stored");
    assert_eq!(fs::read_dir(lazuli.path("scratch")).unwrap().count(), 0);
}
