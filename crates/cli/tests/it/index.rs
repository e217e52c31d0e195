//! Ordinary images that start lazily as they are, with an index beside them.

use std::fs;

use lazuli_testkit::{
    kernel::{Feature, require},
    listing,
    oci::{Compression, Image, Layer},
    odd,
    registry::{FakeRegistry, runs},
    tarball::{self, Entry},
};

use crate::{
    drivers::able,
    lazuli::Lazuli,
    mount::unpack,
    numbered::{assert_checked, files, read},
    policy::signer::Signer,
};

const TRUST: &str = "[index]\ntrust = \"repository\"\n[fetch]\namplify_bytes = 0\n";

/// Files that take some MiB together.
fn image(compression: Compression) -> Image {
    Image::new([Layer::new(tarball::write(&files()), compression)])
}

#[test]
fn odd_trees_show_what_is_in_the_layers() {
    for (driver, compression) in [
        ("fanotify", Compression::Gzip),
        ("fuse", Compression::Gzip),
        ("fanotify", Compression::None),
    ] {
        if !able(driver) || !require(Feature::Program("umoci")) {
            continue;
        }
        let lazuli = Lazuli::new();
        let layout = lazuli.path("layout");
        odd::image().compressed_with(compression).write_layout(&layout, "odd").unwrap();
        let reference = unpack(&layout, "odd", &lazuli);
        let before = fs::read(layout.join("index.json")).unwrap();
        lazuli.ok(["index", "oci:layout:odd"]);
        let mountpoint = lazuli.directory("mnt");
        let at = mountpoint.to_str().unwrap();
        lazuli.ok(["mount", "oci:layout:odd", at, "--driver", driver]);
        listing::assert_equal(reference, mountpoint.clone());
        lazuli.ok(["unpack", "oci:layout:odd", "unpacked"]);
        listing::assert_equal(lazuli.path("unpacked"), mountpoint.clone());
        lazuli.ok(["umount", at]);
        lazuli.ok(["check", "oci:layout:odd", "--against", "oci:layout:odd"]);
        // Once more: everything exists, byte for byte.
        let first = fs::read(layout.join("index.json")).unwrap();
        assert_ne!(before, first);
        lazuli.ok(["index", "oci:layout:odd"]);
        assert_eq!(fs::read(layout.join("index.json")).unwrap(), first);
    }
}

/// A registry with an ordinary image that has an index, and the image's name and digest there.
fn indexed(lazuli: &Lazuli, compression: Compression) -> (FakeRegistry, String, String) {
    let registry = FakeRegistry::start().unwrap();
    let digest = image(compression).write_layout(&lazuli.path("source"), "x").unwrap();
    let name = format!("{}/app:1", registry.host());
    lazuli.ok(["copy", "oci:source:x", &name]);
    let before = registry.manifest("app", "1").unwrap();
    lazuli.ok(["index", &name]);
    assert_eq!(registry.manifest("app", "1").unwrap(), before);
    let pinned = format!("{name}@{digest}");
    (registry, name, pinned)
}

#[test]
fn unmodified_names_start_lazily_where_the_operator_says_so() {
    for driver in ["fanotify", "fuse"] {
        if !able(driver) {
            continue;
        }
        let lazuli = Lazuli::new();
        let (registry, name, pinned) = indexed(&lazuli, Compression::Gzip);
        let mountpoint = lazuli.directory("mnt");
        let at = mountpoint.to_str().unwrap();
        lazuli.configure("[index]\ntrust = \"nothing\"\n");
        let error = lazuli.fails(["mount", &name, at, "--driver", driver]);
        assert!(error.contains("not a lazy image") && error.contains("index.trust"), "{error}");
        let _ = lazuli.output(["stop"]);
        lazuli.configure(TRUST);
        for name in [&name, &pinned] {
            lazuli.ok(["mount", name, at, "--driver", driver]);
            lazuli.ok(["umount", at]);
        }
        registry.reset_stats();
        lazuli.ok(["mount", &name, at, "--driver", driver]);
        read(&mountpoint, 11).unwrap();
        // All of that was in one piece, which is a part of the layer.
        let layer = lazuli.mount_status(&mountpoint);
        let fetched: u64 = runs(&registry.log()).iter().map(|(_, run)| run.end - run.start).sum();
        let total = layer["bytes_total"].as_u64().unwrap();
        assert!(fetched < total * 3 / 4, "{fetched} of {total}");
        (0..20).for_each(|number| read(&mountpoint, number).unwrap());
        lazuli.ok(["umount", at]);
        // It is found again after a restart, without the registry.
        lazuli.ok(["mount", &name, at, "--driver", driver]);
        lazuli.kill(lazuli.worker());
        (0..20).for_each(|number| read(&mountpoint, number).unwrap());
        lazuli.ok(["umount", at]);
        lazuli.ok(["check", &name, "--against", "oci:source:x"]);
        lazuli.ok(["prefetch", &name, "--wait"]);
        assert_eq!(registry.violations(), Vec::<String>::new());
    }
}

#[test]
fn an_index_goes_along_when_its_image_is_copied() {
    if !able("fuse") {
        return;
    }
    let lazuli = Lazuli::new();
    let (registry, name, _) = indexed(&lazuli, Compression::Gzip);
    lazuli.configure(TRUST);
    let copy = format!("{}/other:1", registry.host());
    lazuli.ok(["copy", &name, &copy]);
    let mountpoint = lazuli.directory("mnt");
    let at = mountpoint.to_str().unwrap();
    lazuli.ok(["mount", &copy, at, "--driver", "fuse"]);
    (0..20).for_each(|number| read(&mountpoint, number).unwrap());
    lazuli.ok(["umount", at]);
}

/// A node never shows bytes that it could not check, wherever the layer was changed.
#[test]
fn another_layer_under_the_same_index_gives_errors() {
    for (driver, compression) in
        [("fanotify", Compression::Gzip), ("fuse", Compression::Gzip), ("fuse", Compression::None)]
    {
        if !able(driver) {
            continue;
        }
        let lazuli = Lazuli::new();
        let layout = lazuli.path("layout");
        image(compression).write_layout(&layout, "1").unwrap();
        lazuli.ok(["index", "oci:layout:1"]);
        let mountpoint = lazuli.directory("mnt");
        let at = mountpoint.to_str().unwrap();
        lazuli.ok(["mount", "oci:layout:1", at, "--driver", driver]);
        let stored = image(compression).layers[0].stored().unwrap();
        assert_checked(&mountpoint, &layout, &stored);
        lazuli.ok(["umount", at]);
    }
}

#[test]
fn images_that_cannot_be_indexed_are_refused_by_name() {
    let lazuli = Lazuli::new();
    let layout = lazuli.path("layout");
    image(Compression::Zstd).write_layout(&layout, "1").unwrap();
    let error = lazuli.fails(["index", "oci:layout:1"]);
    assert!(error.contains("zstd") && error.contains("lazuli convert"), "{error}");
    image(Compression::Gzip).write_layout(&layout, "1").unwrap();
    lazuli.ok(["convert", "oci:layout:1", "oci:lazy:1"]);
    let error = lazuli.fails(["index", "oci:lazy:1"]);
    assert!(error.contains("needs no index"), "{error}");
    // A configuration that contradicts the layers.
    let mut lying = image(Compression::Gzip);
    lying.layers.push(Layer::new(tarball::write(&[Entry::file("a", "b")]), Compression::Gzip));
    lying.write_layout(&layout, "1").unwrap();
    let index = fs::read_to_string(layout.join("index.json")).unwrap();
    let at = index.find("sha256:").unwrap();
    let manifest = layout.join("blobs/sha256").join(&index[at + 7..at + 71]);
    let text = fs::read_to_string(&manifest).unwrap();
    let mut document: serde_json::Value = serde_json::from_str(&text).unwrap();
    document["layers"].as_array_mut().unwrap().swap(0, 1);
    let swapped = document.to_string();
    let digest = lazuli_image::Algorithm::Sha256.digest(swapped.as_bytes());
    fs::write(layout.join("blobs/sha256").join(digest.hex()), &swapped).unwrap();
    let index = index.replace(&index[at..at + 71], &digest.to_string());
    let index =
        index.replace(&format!("\"size\":{}", text.len()), &format!("\"size\":{}", swapped.len()));
    fs::write(layout.join("index.json"), index).unwrap();
    let error = lazuli.fails(["index", "oci:layout:1"]);
    assert!(error.contains("its config says"), "{error}");
}

/// An index starts an image only if its statement is signed by a key that the node's policy trusts
/// for the image's name.
#[test]
fn an_index_is_used_only_if_a_trusted_key_states_it() {
    if !able("fuse") || !require(Feature::Program("openssl")) {
        return;
    }
    let lazuli = Lazuli::new();
    let (registry, name, pinned) = indexed(&lazuli, Compression::Gzip);
    let [good, evil] = ["good", "evil"].map(|key| Signer::new(&lazuli.directory(""), key));
    let policy = lazuli.path("policy.toml");
    let trust = |signer: &Signer| {
        let rule = format!("default = {{ accept = true, statements = [{:?}] }}", signer.public());
        fs::write(&policy, rule).unwrap();
    };
    trust(&good);
    lazuli.configure_all(&format!("policy = {policy:?}"));
    let mountpoint = lazuli.directory("mnt");
    let at = mountpoint.to_str().unwrap();
    let refused = |name: &str| {
        let error = lazuli.fails(["check", name]);
        assert!(error.contains("not a lazy image"), "{error}");
        lazuli.assert_is_pulled_whole(name);
    };
    refused(&name);
    let key = |signer: &Signer| signer.private().to_str().unwrap().to_owned();
    lazuli.ok(["index", &name, "--sign", &key(&evil)]);
    refused(&name);
    lazuli.ok(["index", &name, "--sign", &key(&good)]);
    for name in [&name, &pinned] {
        lazuli.ok(["mount", name, at, "--driver", "fuse"]);
        (0..20).for_each(|number| read(&mountpoint, number).unwrap());
        lazuli.ok(["umount", at]);
    }
    // Neither index nor statement is asked for again, also by another worker: what is asked is what
    // the tag means.
    lazuli.kill(lazuli.worker());
    let before = registry.log().len();
    lazuli.ok(["mount", &name, at, "--driver", "fuse"]);
    let asked: Vec<_> = registry.log().drain(before..).map(|entry| entry.target).collect();
    assert!(asked.len() <= 2 && !asked.iter().any(|it| it.contains("/blobs/")), "{asked:#?}");
    lazuli.ok(["umount", at]);
    lazuli.ok(["check", &name, "--against", "oci:source:x"]);
    // The statement is copied along, and is for the original name.
    let copy = format!("{}/other:1", registry.host());
    lazuli.ok(["copy", &name, &copy]);
    refused(&copy);
    // A statement by a key that is no longer trusted is worthless.
    trust(&evil);
    lazuli.ok(["mount", &name, at, "--driver", "fuse"]);
    lazuli.ok(["umount", at]);
    fs::write(&policy, "default = 'accept'").unwrap();
    refused(&name);
    lazuli.ok(["stop"]);
    trust(&good);
    lazuli.configure_all(&format!("policy = {policy:?}\n[index]\ntrust = \"proven\""));
    refused(&name);
}
