//! An ordinary image and, beside it without a name of its own, the lazy one that refers to it.

use lazuli_testkit::{
    kernel::{Feature, require},
    listing,
    oci::{Compression, Image, Layer},
    odd,
    registry::FakeRegistry,
};
use serde_json::{Value, json};

use crate::{copy::refer, lazuli::Lazuli, mount::tar_of};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

#[test]
fn a_trusted_referrer_replaces_a_tag_and_never_a_digest() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let lazuli = Lazuli::new();
    let registry = FakeRegistry::start().unwrap();
    let tar = tar_of("dir/file", &odd::random(1, 100_000));
    let layer = Layer::new(tar, Compression::Gzip);
    Image::new([layer]).write_layout(&lazuli.path("source"), "x").unwrap();
    let [ordinary, lazy] = ["1", "lazy"].map(|tag| format!("{}/app:{tag}", registry.host()));
    lazuli.ok(["copy", "oci:source:x", &ordinary]);
    let raw = registry.manifest("app", "1").unwrap();
    let subject = lazuli_image::Algorithm::Sha256.digest(&raw);
    refer(&registry, &subject, "text/signature", b"a signature");
    let mountpoint = lazuli.directory("mnt");
    let mountpoint = mountpoint.to_str().unwrap();
    let error = lazuli.fails(["check", &ordinary]);
    assert!(error.contains("not a lazy image"), "{error}");

    lazuli.ok(["convert", &ordinary, &lazy]);
    let manifest = registry.manifest("app", "lazy").unwrap();
    let mut manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let pinned = format!("{ordinary}@{subject}");
    manifest["subject"] = json!({ "mediaType": MANIFEST, "digest": subject, "size": raw.len() });
    registry.put_manifest("app", "beside", MANIFEST, manifest.to_string().as_bytes());
    // Any client that may push can add a referrer, so only the operator can trust it.
    let error = lazuli.fails(["check", &ordinary]);
    assert!(error.contains("images.referrers"), "{error}");
    lazuli.assert_is_pulled_whole(&ordinary);
    let other = format!("[images]\nreferrers = ['{}/other']\n", registry.host());
    for config in [&other, &other.replace("other", "app")] {
        let error = lazuli.fails(["check", &ordinary]);
        assert!(error.contains("not a lazy image"), "{error}");
        lazuli.assert_is_pulled_whole(&ordinary);
        let _ = lazuli.output(["stop"]);
        lazuli.configure(config);
    }
    lazuli.ok(["mount", &ordinary, mountpoint]);
    lazuli.ok(["unpack", &lazy, "unpacked"]);
    listing::assert_equal(lazuli.path("unpacked"), mountpoint);
    lazuli.ok(["umount", mountpoint]);
    lazuli.ok(["check", &ordinary, "--against", "oci:source:x"]);
    lazuli.ok(["prefetch", &ordinary, "--wait"]);
    assert!(lazuli.fails(["optimize", &ordinary]).contains("say TARGET"));
    let error = lazuli.fails(["check", &pinned]);
    assert!(error.contains("not a lazy image"), "{error}");
    lazuli.assert_is_pulled_whole(&pinned);
    registry.without_referrers();
    assert!(lazuli.fails(["check", &ordinary]).contains("not a lazy image"));
    assert_eq!(registry.violations(), Vec::<String>::new());
}
