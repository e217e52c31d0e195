//! One lazy image of several.

use std::{collections::BTreeSet, fs};

use lazuli_testkit::{
    oci::{Compression, Image, Layer},
    odd,
    registry::FakeRegistry,
    tarball::{self, Entry},
};
use serde_json::Value;

use crate::lazuli::Lazuli;

fn lower() -> Vec<u8> {
    tarball::write(&[
        Entry::directory("./").mode(0o711),
        Entry::directory("both").owner(1, 2),
        Entry::file("both/file", odd::random(1, 3 << 20)),
        Entry::file("both/lower", odd::random(2, 70_000)),
        Entry::file("alone", odd::random(3, 5000)),
        Entry::directory("becomes-file"),
        Entry::file("becomes-file/x", "x"),
    ])
}

fn upper() -> Vec<u8> {
    tarball::write(&[
        Entry::directory("./").mode(0o755),
        Entry::directory("both").owner(3, 4),
        Entry::file("both/file", odd::random(4, 4000)),
        Entry::hard_link("both/linked", "both/file"),
        Entry::file("becomes-file", "x"),
        Entry::symlink("link", "alone"),
    ])
}

/// The images `lower` and `upper` in the layout `lazy`, and an image of both as two layers in
/// `source`.
fn images(lazuli: &Lazuli) {
    let layer = |tar| Layer::new(tar, Compression::Gzip);
    let both = Image::new([layer(lower()), layer(upper())]);
    both.write_layout(&lazuli.path("source"), "x").unwrap();
    for (name, tar) in [("lower", lower()), ("upper", upper())] {
        let mut image = Image::new([layer(tar)]);
        image.config["config"]["Cmd"] = name.into();
        image.write_layout(&lazuli.path(name), "x").unwrap();
        lazuli.ok(["convert", &format!("oci:{name}:x"), &format!("oci:lazy:{name}")]);
    }
}

fn inspect(lazuli: &Lazuli, image: &str) -> Value {
    serde_json::from_str(&lazuli.ok(["inspect", image, "--json"])).unwrap()
}

fn blobs(lazuli: &Lazuli, image: &str) -> BTreeSet<String> {
    let described = inspect(lazuli, image);
    let blobs = described["blobs"].as_array().unwrap().iter();
    blobs.map(|blob| blob["id"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn merging_overlays_trees_and_keeps_blobs() {
    let lazuli = Lazuli::new();
    images(&lazuli);
    let before = fs::read_dir(lazuli.path("lazy/blobs/sha256")).unwrap().count();
    lazuli.ok(["merge", "oci:lazy:lower", "oci:lazy:upper", "oci:lazy:both"]);
    lazuli.ok(["check", "oci:lazy:both", "--against", "oci:source:x"]);
    // Manifest, config and bootstrap.
    let after = fs::read_dir(lazuli.path("lazy/blobs/sha256")).unwrap().count();
    assert_eq!(after - before, 3);
    let of = |image| blobs(&lazuli, image);
    assert_eq!(of("oci:lazy:both"), &of("oci:lazy:lower") | &of("oci:lazy:upper"));

    // Elsewhere the blobs go with it; the same images give the same bytes.
    let registry = FakeRegistry::start().unwrap();
    let target = format!("{}/app:both", registry.host());
    lazuli.ok(["merge", "oci:lazy:lower", "oci:lazy:upper", &target]);
    lazuli.ok(["check", &target, "--against", "oci:source:x"]);
    let digest = |image| inspect(&lazuli, image)["manifest_digest"].clone();
    assert_eq!(digest(&target), digest("oci:lazy:both"));
    assert_eq!(registry.violations(), [""; 0]);

    // The other way round, and an image over itself: only blobs that are in use.
    lazuli.ok(["merge", "oci:lazy:upper", "oci:lazy:lower", "oci:lazy:other"]);
    lazuli.fails(["check", "oci:lazy:other", "--against", "oci:source:x"]);
    lazuli.ok(["merge", "oci:lazy:lower", "oci:lazy:lower", "oci:lazy:again"]);
    lazuli.ok(["check", "oci:lazy:again", "--against", "oci:lower:x"]);
    assert_eq!(of("oci:lazy:again"), of("oci:lazy:lower"));
}

#[test]
fn images_that_cannot_be_merged_are_refused() {
    let lazuli = Lazuli::new();
    images(&lazuli);
    for (arguments, word) in [
        (&["oci:lazy:lower", "oci:source:x", "oci:lazy:new"][..], "oci:source:x"),
        (&["oci:lazy:lower", "oci:lazy:none", "oci:lazy:new"], "none"),
    ] {
        let error = lazuli.fails([&["merge"], arguments].concat());
        assert!(error.contains(word), "{arguments:?}: {error}");
    }
    let digest = inspect(&lazuli, "oci:lazy:lower")["manifest_digest"].as_str().unwrap().to_owned();
    let fixed = format!("oci:lazy:@{digest}");
    let error = lazuli.fails(["merge", "oci:lazy:lower", "oci:lazy:upper", &fixed]);
    assert!(!error.contains("panicked") && error.contains(&digest), "{error}");
    // Merging needs at least two images.
    assert_eq!(lazuli.output(["merge", "oci:lazy:lower", "oci:lazy:new"]).status.code(), Some(2));
    assert!(lazuli.fails(["inspect", "oci:lazy:new"]).contains("new"));
}
