//! A conversion makes and stores only content that the target's repository lacks.

use lazuli_testkit::{
    kernel::{Feature, require},
    listing,
    oci::{Compression, Image, Layer},
    odd,
    tarball::{self, Entry},
};
use serde_json::Value;

use crate::{
    lazuli::{Lazuli, corpus},
    mount::tar_of,
    registry::Registry,
};

/// A version of an app: a base of 4 MB, two small layers, of which the lower one differs between
/// versions, and one of 2 MB that each version builds anew from mostly the same files.
fn write(lazuli: &Lazuli, version: u64) -> String {
    let built = [odd::random(3, 2 << 20), odd::random(200 + version, 3000)].concat();
    let tars = [
        tar_of("base/file", &odd::random(1, 4_000_000)),
        tar_of("app/version", &odd::random(100 + version, 5000)),
        tar_of("app/same", &odd::random(2, 6000)),
        tar_of("built/file", &built),
    ];
    let layers = tars.into_iter().map(|tar| Layer::new(tar, Compression::Gzip));
    let name = format!("app{version}");
    Image::new(layers).write_layout(&lazuli.path(&name), "x").unwrap();
    format!("oci:{name}:x")
}

/// Bytes that a conversion stored.
pub(crate) fn stored(said: &str) -> u64 {
    let (_, uploaded) = said.rsplit_once("uploaded ").unwrap();
    let mut words = uploaded.split_whitespace();
    let number: f64 = words.next().unwrap().parse().unwrap();
    let unit = match words.next().unwrap() {
        "B" => 1.0,
        "KiB" => 1024.0,
        "MiB" => 1048576.0,
        other => panic!("{other}"),
    };
    (number * unit) as u64
}

#[test]
fn the_next_version_costs_what_changed() {
    let lazuli = Lazuli::new();
    let registry = Registry::start();
    let image = |tag: &str| registry.image(&format!("app:{tag}"));
    let versions: Vec<String> = (0..4).map(|version| write(&lazuli, version)).collect();

    let first = lazuli.ok(["convert", &versions[0], &image("1.0")]);
    assert!(stored(&first) > 6_000_000 && !first.contains("known"), "{first}");

    // The changed layer, one chunk of the rebuilt one, and the tables.
    let second = lazuli.ok(["convert", &versions[1], &image("1.1")]);
    assert!(second.contains("in 4 layers, 2 of them known"), "{second}");
    assert!(stored(&second) < 60_000, "{second}");

    // Nothing is read when nothing has changed, and the tag's manifest stays the same.
    let again = lazuli.ok(["convert", &versions[1], &image("1.1")]);
    assert!(again.contains("4 of them known") && stored(&again) == 0, "{again}");

    // A machine that remembers nothing reads the layers and stores as little. Blobs that are too
    // small to be looked into are made again, and are the same: they are not stored twice.
    std::fs::remove_dir_all(lazuli.path("cache")).unwrap();
    let third = lazuli.ok(["convert", &versions[2], &image("1.2")]);
    assert!(!third.contains("known"), "{third}");
    assert!(stored(&third) < 60_000, "{third}");
    for (version, tag) in [(1, "1.1"), (2, "1.2")] {
        lazuli.ok(["check", &image(tag), "--against", &versions[version]]);
    }
}

#[test]
fn deleted_blobs_are_made_again() {
    let lazuli = Lazuli::new();
    let registry = Registry::start();
    let image = registry.image("app:x");
    let source = write(&lazuli, 0);
    lazuli.ok(["convert", &source, &image]);
    let said = lazuli.ok(["inspect", &image, "--json"]);
    let said: Value = serde_json::from_str(&said).unwrap();
    registry.remove_blob(said["blobs"][0]["id"].as_str().unwrap());
    let again = lazuli.ok(["convert", &source, &image]);
    assert!(again.contains("in 4 layers, 3 of them known"), "{again}");
    assert!(stored(&again) > 3_900_000, "{again}");
    lazuli.ok(["check", &image]);
}

#[test]
fn dict_reuses_the_chunks_of_a_named_image() {
    let lazuli = Lazuli::new();
    let registry = Registry::start();
    let (one, two) = (write(&lazuli, 0), write(&lazuli, 1));
    let image = |tag: &str| registry.image(&format!("app:{tag}"));
    // Four tags: more than `convert` considers.
    lazuli.ok(["convert", &one, &image("zzz")]);
    for tag in ["a1", "a2", "a3"] {
        let other = lazuli.directory(tag);
        std::fs::write(other.join("file"), tag).unwrap();
        lazuli.ok(["convert", &format!("dir:{tag}"), &image(tag)]);
    }
    std::fs::remove_dir_all(lazuli.path("cache")).unwrap();
    let with = lazuli.ok(["convert", &two, &image("a4"), "--dict", &image("zzz")]);
    assert!(stored(&with) < 60_000, "{with}");
    lazuli.ok(["check", &image("a4"), "--against", &two]);

    let elsewhere = registry.image("other:x");
    let with = lazuli.ok(["convert", &two, &elsewhere, "--dict", &image("zzz")]);
    assert!(stored(&with) < 60_000, "{with}");
    lazuli.ok(["check", &elsewhere, "--against", &two]);
    let error = lazuli.fails(["convert", &two, "oci:elsewhere:x", "--dict", &image("zzz")]);
    assert!(error.contains("is not in the registry of"), "{error}");
    let missing = lazuli.fails(["convert", &two, &image("a4"), "--dict", &image("none")]);
    assert!(missing.contains("none"), "{missing}");
    let usage = lazuli.fails(["convert", &two, &image("a5"), "--dict", "x", "--trace", "y"]);
    assert!(usage.contains("cannot be used with"), "{usage}");
}

#[test]
fn an_image_of_old_and_new_blobs_mounts_as_one() {
    if !require(Feature::Root) {
        return;
    }
    let lazuli = Lazuli::new();
    let (one, two) = (write(&lazuli, 0), write(&lazuli, 1));
    lazuli.ok(["convert", &one, "oci:lazy:1"]);
    lazuli.ok(["convert", &two, "oci:lazy:2"]);
    lazuli.ok(["convert", &two, "oci:whole:2"]);
    let mount = |image: &str, at: &str| {
        let mountpoint = lazuli.directory(at);
        lazuli.ok(["mount", image, mountpoint.to_str().unwrap()]);
        mountpoint
    };
    let (old, new) = (mount("oci:whole:2", "old"), mount("oci:lazy:2", "new"));
    listing::assert_equal(&old, &new);
    for mountpoint in [old, new] {
        lazuli.ok(["umount", mountpoint.to_str().unwrap()]);
    }
}

/// The cost of an update from `one` to `two` beside its metadata: bytes stored, bytes fetched by a
/// node with all of `one`, and bytes of the chunks that only `two` has, as stored.
fn update(lazuli: &Lazuli, one: &str, two: &str) -> (u64, u64, u64) {
    let registry = Registry::start();
    let [old, new] = ["app:1", "app:2"].map(|name| registry.image(name));
    lazuli.ok(["convert", one, &old]);
    lazuli.ok(["prefetch", &old, "--wait"]);
    let said = lazuli.ok(["convert", two, &new]);
    let json = |arguments: &[&str]| -> Value {
        serde_json::from_slice(&lazuli.output(arguments).stdout).unwrap()
    };
    let described = json(&["inspect", &new, "--json"]);
    let blobs = described["blobs"].as_array().unwrap().iter();
    let data: u64 = blobs.map(|blob| blob["stored_bytes"].as_u64().unwrap()).sum();
    let metadata = described["bytes_total"].as_u64().unwrap() - data;
    let changed = json(&["diff", "--json", &old, &new]);
    let changed = changed["chunks"]["only_b"]["stored_bytes"].as_u64().unwrap();
    let directory = lazuli.directory("new");
    let mountpoint = directory.to_str().unwrap();
    lazuli.ok(["mount", &new, mountpoint]);
    lazuli.ok(["prefetch", &new, "--wait"]);
    let fetched = lazuli.mount_status(&directory)["bytes_fetched"].as_u64().unwrap();
    lazuli.ok(["umount", mountpoint]);
    // Manifest and config have some kB.
    (stored(&said).saturating_sub(metadata), fetched.saturating_sub(metadata + 20_000), changed)
}

fn assert_cheap((stored, fetched, changed): (u64, u64, u64)) {
    assert!(changed > 0 && stored * 10 <= changed * 11, "{stored} stored for {changed} changed");
    assert!(fetched * 10 <= changed * 11, "{fetched} fetched for {changed} changed");
}

/// A rebuilt layer with a tenth of its files changed, some removed and some new, on an unchanged
/// base.
#[test]
fn an_update_costs_the_chunks_that_changed() {
    if !require(Feature::Root) {
        return;
    }
    let lazuli = Lazuli::new();
    for version in 0..2u64 {
        let file = |number: u64| {
            let changed = if number.is_multiple_of(10) { 1000 * version } else { 0 };
            Entry::file(format!("app/{number}"), odd::random(changed + number, 300_000))
        };
        let files: Vec<_> = (4 * version..80 + 2 * version).map(file).collect();
        let base = tar_of("base/file", &odd::random(5000, 4_000_000));
        let layers = [base, tarball::write(&files)];
        let layers = layers.map(|tar| Layer::new(tar, Compression::Gzip));
        Image::new(layers).write_layout(&lazuli.path(&format!("app{version}")), "x").unwrap();
    }
    assert_cheap(update(&lazuli, "oci:app0:x", "oci:app1:x"));
}

/// Its base was rebuilt, and everything on top of it.
#[test]
fn an_update_of_a_real_image_costs_the_chunks_that_changed() {
    if !require(Feature::Root) {
        return;
    }
    let Some(layouts) = corpus("redis").zip(corpus("redis-next")) else { return };
    let lazuli = Lazuli::new();
    let [one, two] = [layouts.0, layouts.1].map(|layout| format!("oci:{}", layout.display()));
    assert_cheap(update(&lazuli, &one, &two));
}
