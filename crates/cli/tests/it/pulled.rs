//! Ordinary images without an index, which a command pulls whole before it mounts them.

use lazuli_testkit::{
    oci::{Compression, Image, Layer},
    registry::{FakeRegistry, Fault},
    tarball::{self, Entry},
};

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

fn read_all(directory: &std::path::Path) {
    (0..20).for_each(|number| read(directory, number).unwrap());
    assert_eq!(std::fs::read(directory.join("upper")).unwrap(), b"text");
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
        lazuli.ok(["umount", at]);
        lazuli.kill(lazuli.worker());
        // Its layers are known now, and everything of it is here.
        registry.reset_stats();
        let output = lazuli.output(["mount", &name, at, "--driver", driver]);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        read_all(&mountpoint);
        let layers = registry.log().into_iter().filter(|request| request.bytes().is_some());
        assert_eq!(layers.count(), 0);
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
    registry.fault("GET", "/blobs/", 1000, Fault::WrongBytes);
    let error = lazuli.fails(["mount", &name, at]);
    assert!(error.contains("digest") || error.contains("sha256:"), "{error}");
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
    let mut manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    manifest["layers"].as_array_mut().unwrap().pop();
    let kind = manifest["mediaType"].as_str().unwrap().to_owned();
    registry.put_manifest("app", "2", &kind, manifest.to_string().as_bytes());
    let error = lazuli.fails(["mount", &name.replace("app:1", "app:2"), at]);
    assert!(error.contains("lists other layers than its manifest"), "{error}");
    assert!(registry.log().iter().all(|request| request.bytes().is_none()));
}

/// Both wait for the same layers.
#[test]
fn commands_that_pull_at_the_same_time_share_a_pull() {
    if !drivers::able("fuse") {
        return;
    }
    let lazuli = Lazuli::new();
    let (registry, name) = stored(&lazuli, Compression::Gzip);
    lazuli.ok(["prefetch", &name]);
    registry.set_latency(std::time::Duration::from_millis(200));
    let mountpoints = ["a", "b"].map(|directory| lazuli.directory(directory));
    let mount = |at: &std::path::Path| {
        let at = at.to_str().unwrap();
        lazuli.command(["mount", &name, at, "--driver", "fuse"]).spawn().unwrap()
    };
    let mut children = mountpoints.each_ref().map(|at| mount(at));
    assert!(children.iter_mut().all(|child| child.wait().unwrap().success()));
    for at in &mountpoints {
        read_all(at);
        lazuli.ok(["umount", at.to_str().unwrap()]);
    }
    let parts = registry.log().into_iter().filter(|request| request.bytes().is_some());
    let asked: u64 =
        parts.filter_map(|request| request.bytes()).map(|part| part.end - part.start).sum();
    let manifest = registry.manifest("app", "1").unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    let layers = manifest["layers"].as_array().unwrap().iter();
    let stored: u64 = layers.map(|layer| layer["size"].as_u64().unwrap()).sum();
    assert!(asked < 2 * stored, "{asked} of {stored}");
}
