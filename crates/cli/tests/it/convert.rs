//! Conversion: sources, determinism, pushed content, and other tools as readers.

use std::{collections::BTreeMap, path::Path, process::Command};

use lazuli_testkit::{
    kernel::{Feature, require},
    listing, odd,
};

use crate::{
    lazuli::{Lazuli, corpus},
    mount::tar_of,
    registry::Registry,
};

fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let blobs = std::fs::read_dir(directory.join("blobs/sha256")).unwrap();
    let entries = blobs.map(|entry| entry.unwrap());
    entries
        .map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap()))
        .collect()
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let lazuli = Lazuli::new();
    odd::image().write_layout(&lazuli.path("source"), "odd").unwrap();
    for target in ["one", "two", "three"] {
        lazuli.ok(["convert", "oci:source:odd", &format!("oci:{target}:lazy")]);
    }
    let one = files(&lazuli.path("one"));
    assert!(one == files(&lazuli.path("two")) && one == files(&lazuli.path("three")));
    for (name, content) in one {
        assert_eq!(lazuli_image::Algorithm::Sha256.digest(&content).hex(), name);
    }
}

#[test]
fn every_kind_of_source_shows_the_same_tree() {
    if !require(Feature::Root) || !require(Feature::Program("skopeo")) {
        return;
    }
    let lazuli = Lazuli::new();
    let tar = tar_of("dir/file", &odd::random(1, 100_000));
    std::fs::write(lazuli.path("layer.tar"), &tar).unwrap();
    let unpacked = lazuli.directory("tree");
    let status = Command::new("tar")
        .arg("-xpf")
        .arg(lazuli.path("layer.tar"))
        .arg("-C")
        .arg(&unpacked)
        .status();
    assert!(status.unwrap().success());
    let layer = lazuli_testkit::oci::Layer::new(tar, lazuli_testkit::oci::Compression::Gzip);
    lazuli_testkit::oci::Image::new([layer]).write_layout(&lazuli.path("layout"), "x").unwrap();
    let registry = Registry::start();
    let skopeo = |arguments: &[&str]| {
        let output = Command::new("skopeo")
            .args(["copy", "--quiet", "--insecure-policy", "--dest-tls-verify=false"])
            .args(arguments)
            .current_dir(lazuli.path(""))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    skopeo(&["oci:layout:x", "docker-archive:archive.tar:x:y"]);
    let pushed = registry.image("source:x");
    skopeo(&["oci:layout:x", &format!("docker://{pushed}")]);
    for source in
        ["oci:layout:x", "oci:layout", "docker-archive:archive.tar", "tar:layer.tar", &pushed]
    {
        lazuli.ok(["convert", source, "oci:lazy:x"]);
        lazuli.ok(["check", "oci:lazy:x", "--against", source]);
        let mountpoint = lazuli.directory("mnt");
        lazuli.ok(["mount", "oci:lazy:x", mountpoint.to_str().unwrap()]);
        listing::assert_equal(unpacked.join("dir"), mountpoint.join("dir"));
        lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    }
    lazuli.ok(["convert", "dir:tree", "oci:lazy:x"]);
    lazuli.ok(["check", "oci:lazy:x", "--against", "dir:tree"]);
}

#[test]
fn a_second_push_uploads_nothing() {
    let Some(layout) = corpus("busybox") else { return };
    let lazuli = Lazuli::new();
    let registry = Registry::start();
    let source = format!("oci:{}", layout.display());
    let first = lazuli.ok(["convert", &source, &registry.image("busybox:lazy")]);
    let again = lazuli.ok(["convert", &source, &registry.image("busybox:again")]);
    assert!(!first.contains("uploaded 0 B"), "{first}");
    assert!(again.contains("uploaded 0 B"), "{again}");
}

#[test]
fn inspect_and_check_describe_the_image() {
    let lazuli = Lazuli::new();
    let source = lazuli.directory("source");
    std::fs::write(source.join("file"), odd::random(3, 1_500_000)).unwrap();
    lazuli.ok(["convert", "dir:source", "oci:lazy:x"]);
    let json: serde_json::Value =
        serde_json::from_str(&lazuli.ok(["inspect", "oci:lazy:x", "--json"])).unwrap();
    assert_eq!(json["blobs"].as_array().unwrap().len(), 1, "{json:#}");
    assert_eq!(json["blobs"][0]["chunks"], 2, "{json:#}");
    assert!(lazuli.ok(["inspect", "oci:lazy:x", "--tree"]).contains("file"));
    lazuli.ok(["check", "oci:lazy:x"]);
    std::fs::write(source.join("file"), odd::random(4, 1_500_000)).unwrap();
    let error = lazuli.fails(["check", "oci:lazy:x", "--against", "dir:source"]);
    assert!(error.contains("/file"), "{error}");
}

#[test]
fn check_finds_a_flipped_byte() {
    let lazuli = Lazuli::new();
    let source = lazuli.directory("source");
    std::fs::write(source.join("file"), odd::random(3, 1_500_000)).unwrap();
    lazuli.ok(["convert", "dir:source", "oci:lazy:x"]);
    let blobs = lazuli.path("lazy/blobs/sha256");
    for entry in std::fs::read_dir(&blobs).unwrap() {
        let path = entry.unwrap().path();
        let good = std::fs::read(&path).unwrap();
        let mut bad = good.clone();
        bad[good.len() / 3] ^= 1;
        std::fs::write(&path, bad).unwrap();
        let error = lazuli.fails(["check", "oci:lazy:x"]);
        assert!(error.contains("sha256:") || error.contains("chunk"), "{error}");
        std::fs::write(&path, good).unwrap();
    }
    lazuli.ok(["check", "oci:lazy:x"]);
}
