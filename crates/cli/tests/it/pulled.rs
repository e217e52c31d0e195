//! Ordinary images without an index, which a command pulls whole before it mounts them.

use std::{path::Path, time::Duration};

use lazuli_image::Algorithm;
use lazuli_testkit::{
    oci::{Compression, Image, Layer},
    registry::{FakeRegistry, Fault},
    tarball::{self, Entry},
};
use serde_json::Value;

use crate::{
    drivers,
    lazuli::Lazuli,
    numbered::{files, read},
};

/// A registry with an ordinary image of two layers, and the image's name.
fn stored(lazuli: &Lazuli, upper: Compression) -> (FakeRegistry, String) {
    let registry = FakeRegistry::start().unwrap();
    let lower = Layer::new(tarball::write(&files()), Compression::Gzip);
    let upper = Layer::new(tarball::write(&[Entry::file("upper", "text")]), upper);
    Image::new([lower, upper]).write_layout(&lazuli.path("source"), "x").unwrap();
    let name = format!("{}/app:1", registry.host());
    lazuli.ok(["copy", "oci:source:x", &name]);
    registry.reset_stats();
    (registry, name)
}

fn read_all(directory: &Path) {
    (0..20).for_each(|number| read(directory, number).unwrap());
    assert_eq!(std::fs::read(directory.join("upper")).unwrap(), b"text");
}

/// The layers in the image's manifest.
fn layers(registry: &FakeRegistry) -> Vec<Value> {
    let manifest = registry.manifest("app", "1").unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    manifest["layers"].as_array().unwrap().clone()
}

/// Bytes of all layers.
fn stored_bytes(registry: &FakeRegistry) -> u64 {
    layers(registry).iter().map(|layer| layer["size"].as_u64().unwrap()).sum()
}

/// Bytes of parts of blobs that were asked for.
fn fetched(registry: &FakeRegistry) -> u64 {
    let log = registry.log();
    log.iter().filter_map(|request| request.bytes()).map(|part| part.end - part.start).sum()
}

#[test]
fn an_image_without_an_index_is_pulled_once() {
    for driver in drivers::here() {
        let lazuli = Lazuli::new();
        let (registry, name) = stored(&lazuli, Compression::None);
        let mountpoint = lazuli.directory("mnt");
        let at = mountpoint.to_str().unwrap();
        let output = lazuli.output(["mount", &name, at, "--driver", driver]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && said.contains("has no index"), "{said}");
        read_all(&mountpoint);
        assert_eq!(fetched(&registry), stored_bytes(&registry));
        lazuli.ok(["umount", at]);
        lazuli.kill(lazuli.worker());
        // Its layers are known now, and everything of it is here.
        registry.reset_stats();
        let output = lazuli.output(["mount", &name, at, "--driver", driver]);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        read_all(&mountpoint);
        assert_eq!(fetched(&registry), 0);
        lazuli.ok(["umount", at]);
        assert_eq!(registry.violations(), Vec::<String>::new());
    }
}

#[test]
fn prefetch_pulls_an_image_without_an_index() {
    if !drivers::able("fuse") {
        return;
    }
    let lazuli = Lazuli::new();
    let (registry, name) = stored(&lazuli, Compression::Gzip);
    assert!(lazuli.ok(["prefetch", &name, "--wait"]).contains("is here"));
    let mountpoint = lazuli.directory("mnt");
    let at = mountpoint.to_str().unwrap();
    let output = lazuli.output(["mount", &name, at, "--driver", "fuse"]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    registry.go_away();
    read_all(&mountpoint);
    lazuli.ok(["umount", at]);
}

#[test]
fn what_cannot_be_pulled_is_named() {
    let lazuli = Lazuli::new();
    let mountpoint = lazuli.directory("mnt");
    let at = mountpoint.to_str().unwrap();
    let (_registry, name) = stored(&lazuli, Compression::Zstd);
    let error = lazuli.fails(["mount", &name, at]);
    assert!(error.contains("+zstd cannot be indexed"), "{error}");
    // A layer that is another one than the manifest says is pulled again once it is right.
    let (registry, name) = stored(&lazuli, Compression::Gzip);
    let layer = layers(&registry)[0]["digest"].as_str().unwrap().to_owned();
    registry.fault("GET", &format!("/blobs/{layer}"), 1000, Fault::WrongBytes);
    let error = lazuli.fails(["mount", &name, at]);
    let named = format!("its layer {layer} cannot be pulled by this node");
    assert!(error.contains(&named), "{error}");
    assert_eq!(lazuli.status()["mounts"].as_array().unwrap().len(), 0);
    registry.clear_faults();
    if drivers::able("fuse") {
        lazuli.ok(["mount", &name, at, "--driver", "fuse"]);
        read_all(&mountpoint);
        lazuli.ok(["umount", at]);
    }
}

#[test]
fn what_could_not_be_shown_is_not_pulled() {
    let lazuli = Lazuli::new();
    let mountpoint = lazuli.directory("mnt");
    let at = mountpoint.to_str().unwrap();
    let (registry, name) = stored(&lazuli, Compression::Gzip);
    let manifest = registry.manifest("app", "1").unwrap();
    let mut manifest: Value = serde_json::from_slice(&manifest).unwrap();
    manifest["layers"].as_array_mut().unwrap().pop();
    let kind = manifest["mediaType"].as_str().unwrap().to_owned();
    registry.put_manifest("app", "2", &kind, manifest.to_string().as_bytes());
    let error = lazuli.fails(["mount", &name.replace("app:1", "app:2"), at]);
    assert!(error.contains("lists other layers than its manifest"), "{error}");
    assert_eq!(fetched(&registry), 0);
}

/// By a tag and by a digest: these are two requests for the same layers.
#[test]
fn commands_that_pull_at_the_same_time_share_a_pull() {
    if !drivers::able("fuse") {
        return;
    }
    let lazuli = Lazuli::new();
    let (registry, name) = stored(&lazuli, Compression::Gzip);
    let digest = Algorithm::Sha256.digest(&registry.manifest("app", "1").unwrap());
    registry.set_latency(Duration::from_millis(500));
    let places = [(name.clone(), "a"), (format!("{name}@{digest}"), "b")];
    let places = places.map(|(image, directory)| (image, lazuli.directory(directory)));
    let mut children = places.each_ref().map(|(image, at)| {
        let at = at.to_str().unwrap();
        lazuli.command(["mount", image, at, "--driver", "fuse"]).spawn().unwrap()
    });
    assert!(children.iter_mut().all(|child| child.wait().unwrap().success()));
    for (_, at) in &places {
        read_all(at);
        lazuli.ok(["umount", at.to_str().unwrap()]);
    }
    assert_eq!(fetched(&registry), stored_bytes(&registry));
}
