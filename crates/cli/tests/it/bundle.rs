//! `lazuli bundle`, and nodes that start from its result without a registry.

use std::{collections::BTreeMap, fs, path::Path};

use lazuli_image::Algorithm;
use lazuli_testkit::{
    kernel::{Feature, require},
    oci::{Compression, Image, Layer},
    registry::FakeRegistry,
    tarball::{self, Entry},
};
use serde_json::json;

use crate::{
    lazuli::Lazuli,
    policy::signer::{MANIFEST, Signer, digest_of},
    prefetch::{fill, read},
};

/// Files of the image, and bytes of each.
const FILES: usize = 20;
const SIZE: usize = 100_000;

/// The build machine, with a registry that has a converted image.
fn build() -> Option<(Lazuli, FakeRegistry, String)> {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return None;
    }
    let (build, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    fill(&build.directory("source"), FILES, SIZE);
    let image = format!("{}/app:1", registry.host());
    build.ok(["convert", "dir:source", &image]);
    Some((build, registry, image))
}

/// Makes a bundle of `images` for the node.
fn deliver(build: &Lazuli, node: &Lazuli, images: &[&str]) {
    let directory = node.root().join("bundle");
    build.ok([&["bundle", "--to", directory.to_str().unwrap()], images].concat());
}

fn mount(node: &Lazuli, image: &str) {
    let mountpoint = node.directory("mnt");
    node.ok(["mount", image, mountpoint.to_str().unwrap()]);
}

fn umount(node: &Lazuli) {
    node.ok(["umount", node.path("mnt").to_str().unwrap()]);
}

/// The content of every file.
fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(files(&path));
        } else {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            all.insert(name, fs::read(path).unwrap());
        }
    }
    all
}

#[test]
fn a_node_starts_a_bundled_image_without_its_registry() {
    let Some((build, registry, image)) = build() else { return };
    let node = Lazuli::new();
    deliver(&build, &node, &[&image]);
    registry.go_away();
    node.ok(["prefetch", "--wait", &image]);
    mount(&node, &image);
    (0..FILES).for_each(|number| read(&node, number, SIZE));
    umount(&node);
    // Another image of the same repository is not in it.
    let mountpoint = node.path("mnt");
    let other = image.replace(":1", ":2");
    let error = node.fails(["mount", &other, mountpoint.to_str().unwrap()]);
    assert!(error.contains("cannot reach"), "{error}");
}

#[test]
fn the_same_images_make_the_same_bundle() {
    let Some((build, _registry, image)) = build() else { return };
    let nodes = [Lazuli::new(), Lazuli::new()];
    let [one, two] = nodes.each_ref().map(|node| {
        deliver(&build, node, &[&image]);
        files(&node.root().join("bundle"))
    });
    assert!(one.len() > 4 && one == two, "{:?} {:?}", one.keys(), two.keys());
    deliver(&build, &nodes[0], &[&image]);
    assert!(files(&nodes[0].root().join("bundle")) == one, "a second time");
}

#[test]
fn the_policy_of_the_node_is_asked_without_a_registry() {
    if !require(Feature::Program("openssl")) {
        return;
    }
    let Some((build, registry, image)) = build() else { return };
    let unsigned = image.replace("app:1", "unsigned:1");
    build.ok(["copy", &image, &unsigned]);
    let [good, other] = ["good", "other"].map(|name| Signer::new(&build.directory(""), name));
    let repository = image.strip_suffix(":1").unwrap();
    good.tag(&registry, "app", &digest_of(&registry, "app", "1"), repository);
    let node = Lazuli::new();
    let policy = node.path("policy.toml");
    node.configure(&format!("policy = {policy:?}\n"));
    let require = |signer: &Signer| {
        fs::write(&policy, format!("default = {{ keys = [{:?}] }}\n", signer.public())).unwrap();
    };
    require(&other);
    deliver(&build, &node, &[&image, &unsigned]);
    registry.go_away();
    let mountpoint = node.directory("mnt");
    let mountpoint = mountpoint.to_str().unwrap();
    let refused = |image: &str| {
        let error = node.fails(["mount", image, mountpoint]);
        assert!(error.contains("may not run"), "{error}");
    };
    refused(&image);
    require(&good);
    refused(&unsigned);
    mount(&node, &image);
    read(&node, 3, SIZE);
    umount(&node);
}

#[test]
fn an_image_that_no_pod_could_start_is_not_bundled() {
    let (build, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let refused = |image: &str, reason: &str| {
        let error = build.fails(["bundle", "--to", "bundle", image]);
        assert!(error.contains(image) && error.contains(reason), "{error}");
        assert!(!build.path("bundle").exists());
    };
    refused("oci:layout", "only an image in a registry has a name");
    refused(&format!("{}/app:1", registry.host()), "has no");
    let platform = json!({"os": "linux", "architecture": "vax"});
    let digest = registry.put_blob("app", b"{}");
    let entry = json!({"mediaType": MANIFEST, "digest": digest, "size": 2, "platform": platform});
    let kind = "application/vnd.oci.image.index.v1+json";
    let index = json!({"schemaVersion": 2, "mediaType": kind, "manifests": [entry]});
    registry.put_manifest("app", "1", kind, index.to_string().as_bytes());
    refused(&format!("{}/app:1", registry.host()), "it has linux/vax");
}

#[test]
fn a_layer_that_is_not_what_its_image_says_fails_the_bundle() {
    let (build, registry) = (Lazuli::new(), FakeRegistry::start().unwrap());
    let layer = |name: &str, compression| {
        Layer::new(tarball::write(&[Entry::file(name, "content")]), compression)
    };
    let push = |name: &str, layer: Layer| {
        let (layout, image) = (build.path(name), format!("{}/{name}:1", registry.host()));
        Image::new([layer]).write_layout(&layout, "1").unwrap();
        build.ok(["copy", &format!("oci:{}:1", layout.display()), &image]);
        image
    };
    fn arguments(image: &str) -> [&str; 6] {
        ["bundle", "--platform", "linux/amd64", "--to", "bundle", image]
    }
    // Its DiffID is that of another tar.
    let (one, other) = (layer("one", Compression::Gzip), layer("other", Compression::Gzip));
    let (tar, stored) = (tarball::write(&[Entry::file("one", "content")]), other.stored().unwrap());
    let lying = Layer::stored_as(tar, stored, one.media_type(), Vec::new());
    let error = build.fails(arguments(&push("lying", lying)));
    assert!(error.contains("its tar has the digest"), "{error}");
    // What the directory has of it, of the right size, is damaged.
    for (name, compression) in [("gzip", Compression::Gzip), ("zstd", Compression::Zstd)] {
        let layer = layer(name, compression);
        let (stored, image) = (layer.stored().unwrap(), push(name, layer));
        build.ok(arguments(&image));
        let digest = Algorithm::Sha256.digest(&stored);
        let blob = build.path("bundle").join("blobs/sha256").join(digest.hex());
        fs::write(&blob, vec![0; stored.len()]).unwrap();
        let _ = fs::remove_dir_all(build.path("bundle/indexes"));
        let error = build.fails(arguments(&image));
        assert!(error.contains(&digest.to_string()), "{error}");
    }
}
