//! `--sign`: the evidence beside a stored image, and cosign's verdict on it.

mod cosign;
mod evidence;
mod nodes;

use std::process::Command;

use lazuli_image::Digest;
use lazuli_testkit::{
    oci::{Compression, Image, Layer},
    odd,
    registry::{FakeRegistry, Fault},
};

use crate::{copy::refer, lazuli::Lazuli, mount::tar_of};

use evidence::Evidence;

/// A key pair of openssl: PKCS#8, as --sign takes it, and the public key.
struct Keys {
    private: String,
    public: String,
}

fn openssl(lazuli: &Lazuli, arguments: &[&str]) {
    let mut openssl = Command::new("openssl");
    let output = openssl.args(arguments).current_dir(lazuli.path("")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

impl Keys {
    /// `kind` are the arguments of `openssl genpkey`.
    fn make(lazuli: &Lazuli, name: &str, kind: &[&str]) -> Self {
        let [private, public] = ["key", "pub"].map(|end| format!("{name}.{end}"));
        openssl(lazuli, &[&["genpkey", "-out", &private], kind].concat());
        openssl(lazuli, &["pkey", "-in", &private, "-pubout", "-out", &public]);
        Keys { private, public }
    }

    fn p256(lazuli: &Lazuli, name: &str) -> Self {
        Self::make(lazuli, name, &["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"])
    }
}

/// An ordinary image in the layout `source`.
fn source(lazuli: &Lazuli) {
    let tars = [tar_of("base", &odd::random(1, 300_000)), tar_of("app", &odd::random(2, 5000))];
    let image = Image::new(tars.map(|tar| Layer::new(tar, Compression::Gzip)));
    image.write_layout(&lazuli.path("source"), "x").unwrap();
}

/// The same in a registry, and its digest.
fn in_registry(lazuli: &Lazuli, registry: &FakeRegistry) -> (String, Digest) {
    source(lazuli);
    let name = format!("{}/app:1", registry.host());
    lazuli.ok(["copy", "oci:source:x", &name]);
    let digest = Evidence::of(&lazuli.path(""), &name, None).digest;
    (name, digest)
}

/// The evidence beside `image` that `keys` verify.
fn evidence(lazuli: &Lazuli, image: &str, keys: &Keys) -> Evidence {
    let public = std::fs::read(lazuli.path(&keys.public)).unwrap();
    Evidence::of(&lazuli.path(""), image, Some(&public))
}

#[test]
fn a_signed_image_has_its_signatures_before_its_name() {
    signed(true);
}

#[test]
fn an_image_is_signed_in_a_registry_that_lists_no_referrers() {
    signed(false);
}

fn signed(api: bool) {
    let lazuli = Lazuli::new();
    let registry = FakeRegistry::start().unwrap();
    if !api {
        registry.without_referrers();
    }
    source(&lazuli);
    let keys = Keys::p256(&lazuli, "ours");
    let image = format!("{}/team/app:1", registry.host());
    let convert = ["convert", "oci:source:x", &image, "--sign", &keys.private];
    lazuli.ok(convert);
    let found = evidence(&lazuli, &image, &keys);
    let name = format!("{}/team/app", registry.host());
    assert_eq!(found.payloads, std::slice::from_ref(&name));
    assert_eq!(found.signed, [name]);
    // Policies don't cover names of layouts.
    assert_eq!(found.conversions, []);
    let puts: Vec<_> = registry.log().into_iter().filter(|it| it.method == "PUT").collect();
    assert!(puts.last().unwrap().target.ends_with("/manifests/1"), "{puts:#?}");

    // The same key has nothing to add, another one adds its own.
    lazuli.ok(convert);
    assert_eq!(evidence(&lazuli, &image, &keys), found);
    let others = Keys::p256(&lazuli, "others");
    assert_eq!(evidence(&lazuli, &image, &others).payloads, [""; 0]);
    lazuli.ok(["convert", "oci:source:x", &image, "--sign", &others.private]);
    for keys in [&keys, &others] {
        let found = evidence(&lazuli, &image, keys);
        assert_eq!((found.payloads.len(), found.signed.len()), (1, 1));
    }
    assert_eq!(registry.violations(), [""; 0]);
}

#[test]
fn a_conversion_states_what_it_was_made_from() {
    let lazuli = Lazuli::new();
    let registry = FakeRegistry::start().unwrap();
    let keys = Keys::p256(&lazuli, "ours");
    let (ordinary, digest) = in_registry(&lazuli, &registry);
    let lazy = format!("{}/lazy:1", registry.host());
    lazuli.ok(["convert", &ordinary, &lazy, "--sign", &keys.private, "--batch", "64"]);
    let [first] = &evidence(&lazuli, &lazy, &keys).conversions[..] else { panic!("not one") };
    assert_eq!(first.source.name, ordinary);
    assert_eq!((first.source.digest, first.source.manifest), (digest, digest));
    assert_eq!(first.converter.version, env!("CARGO_PKG_VERSION"));
    assert!(first.converter.program.is_some());
    assert_eq!(first.options["batch"], "64");
    assert_eq!((first.trace, &first.reused), (None, &vec![]));

    // The same again has nothing to add, though it finds its own blobs.
    let found = evidence(&lazuli, &lazy, &keys);
    lazuli.ok(["convert", &ordinary, &lazy, "--sign", &keys.private, "--batch", "64"]);
    assert_eq!(evidence(&lazuli, &lazy, &keys), found);

    // Another version uses the blobs of the one before, which is unsigned.
    let [before, after] = [1, 2].map(|tag| format!("{}/plain:{tag}", registry.host()));
    lazuli.ok(["convert", &ordinary, &before]);
    let before = evidence(&lazuli, &before, &keys);
    assert_eq!((before.signed, before.conversions), (vec![], vec![]));
    let tars = [tar_of("base", &odd::random(1, 300_000)), tar_of("app", &odd::random(3, 5000))];
    let image = Image::new(tars.map(|tar| Layer::new(tar, Compression::Gzip)));
    image.write_layout(&lazuli.path("next"), "x").unwrap();
    lazuli.ok(["copy", "oci:next:x", &ordinary]);
    let next = evidence(&lazuli, &ordinary, &keys).digest;
    let pinned = format!("{ordinary}@{next}");
    lazuli.ok(["convert", &pinned, &after, "--sign", &keys.private]);
    let [second] = &evidence(&lazuli, &after, &keys).conversions[..] else { panic!("not one") };
    assert_eq!(second.reused, [before.digest]);
    assert_eq!((&second.source.name, second.source.digest), (&ordinary, next));
}

/// A client finds a signature of the index, and of the lazy and the ordinary image in it.
#[test]
fn both_images_of_a_tag_and_their_index_are_signed() {
    let lazuli = Lazuli::new();
    let registry = FakeRegistry::start().unwrap();
    let keys = Keys::p256(&lazuli, "ours");
    let (ordinary, digest) = in_registry(&lazuli, &registry);
    let both = format!("{}/both:1", registry.host());
    lazuli.ok(["convert", &ordinary, &both, "--keep-oci", "--sign", &keys.private]);
    let index = evidence(&lazuli, &both, &keys);
    assert_eq!(index.manifests.len(), 2);
    assert!(index.manifests.contains(&digest));
    let name = format!("{}/both", registry.host());
    for image in [index.digest, index.manifests[0], index.manifests[1]] {
        let found = evidence(&lazuli, &format!("{name}@{image}"), &keys);
        assert_eq!((found.payloads, found.signed), (vec![name.clone()], vec![name.clone()]));
        let is_lazy = image == index.manifests[1];
        assert_eq!(found.conversions.len(), usize::from(is_lazy));
    }
}

#[test]
fn every_verb_that_stores_an_image_signs_it() {
    let lazuli = Lazuli::new();
    let registry = FakeRegistry::start().unwrap();
    let keys = Keys::p256(&lazuli, "ours");
    source(&lazuli);
    let image = |tag: &str| format!("{}/app:{tag}", registry.host());
    let [one, two] = [image("one"), image("two")];
    for image in [&one, &two] {
        lazuli.ok(["convert", "oci:source:x", image]);
    }
    let signed = |image: &str| {
        let found = evidence(&lazuli, image, &keys);
        (found.payloads.len(), found.signed.len())
    };
    let sign = ["--sign", &*keys.private];
    lazuli.ok([&["merge", &one, &two, &image("merged")], &sign[..]].concat());
    assert_eq!(signed(&image("merged")), (1, 1));
    std::fs::write(lazuli.directory("upper").join("new"), "new").unwrap();
    lazuli.ok([&["commit", "upper", &image("committed"), "--base", &one], &sign[..]].concat());
    assert_eq!(signed(&image("committed")), (1, 1));
    crate::bake::trace(&lazuli, &one, &[0]);
    let optimized = image("optimized");
    lazuli.ok([&["optimize", &one, &optimized, "--trace", "trace"], &sign[..]].concat());
    assert_eq!(signed(&optimized), (1, 1));
    assert_eq!(signed(&one), (0, 0));
}

#[test]
fn an_image_that_cannot_be_signed_gets_no_name() {
    let lazuli = Lazuli::new();
    let registry = FakeRegistry::start().unwrap();
    source(&lazuli);
    let keys = Keys::p256(&lazuli, "ours");
    let image = format!("{}/app:1", registry.host());
    let convert = |key: &str| lazuli.fails(["convert", "oci:source:x", &image, "--sign", key]);
    let cosigns =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../policy/tests/fixtures/cosign/cosign.key");
    for (key, expected) in [
        ("no-such-file", "no-such-file"),
        (&*keys.public, "PKCS#8"),
        (cosigns, "COSIGN_PASSWORD"),
        ("/dev/zero", "at most"),
    ] {
        let error = convert(key);
        assert!(error.contains(expected), "{key}: {error}");
    }
    let wrong = lazuli
        .command(["convert", "oci:source:x", &image, "--sign", cosigns])
        .env("COSIGN_PASSWORD", "wrong")
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("is not that of this key"));
    // All of that is said before anything is asked.
    assert_eq!(registry.log(), []);

    for (method, path) in [("GET", "/referrers/"), ("PUT", ".sig")] {
        registry.fault(method, path, 1000, Fault::Status(403));
        let error = convert(&keys.private);
        assert!(error.contains("cannot sign sha256:"), "{error}");
        assert_eq!(registry.manifest("app", "1"), None);
        registry.clear_faults();
    }
    let signed = |arguments: &[&str]| {
        lazuli.fails([&["convert", "oci:source:x", "oci:lazy:1"], arguments].concat())
    };
    let error = signed(&["--sign", &keys.private]);
    assert!(error.contains("--sign-as"), "{error}");
    assert!(signed(&["--sign-as", "registry.example/app"]).contains("--sign <KEY>"));
}

/// A signature for the final place of the image; all of its evidence is copied along.
#[test]
fn signatures_and_statements_go_where_the_image_goes() {
    let lazuli = Lazuli::new();
    let (from, old, to) = (
        FakeRegistry::start().unwrap(),
        FakeRegistry::start().unwrap(),
        FakeRegistry::start().unwrap(),
    );
    old.without_referrers();
    let keys = Keys::p256(&lazuli, "ours");
    let (ordinary, _) = in_registry(&lazuli, &from);
    let first = format!("{}/app:lazy", from.host());
    let name = "registry.example/app:1";
    let as_name = ["--sign", &keys.private, "--sign-as", name];
    lazuli.ok([&["convert", &ordinary, "oci:layout:lazy"], &as_name[..]].concat());
    lazuli.ok(["copy", "oci:layout:lazy", &first]);
    let signed = evidence(&lazuli, &first, &keys);
    assert_eq!(
        (&signed.payloads[..], &signed.signed[..]),
        (&[name.to_owned()][..], &[name.to_owned()][..])
    );
    assert_eq!(signed.conversions.len(), 1);
    // notation's signatures are referrers of a type of their own.
    let notation = "application/vnd.cncf.notary.signature";
    let theirs = refer(&from, &signed.digest, notation, b"a JWS envelope");

    let second = format!("{}/copied:lazy", old.host());
    let third = format!("{}/copied:lazy", to.host());
    for pair in [[&*first, &second], [&second, "oci:other:lazy"], ["oci:other:lazy", &third]] {
        lazuli.ok(["copy", pair[0], pair[1]]);
        assert_eq!(evidence(&lazuli, pair[1], &keys), signed, "{}", pair[1]);
    }
    for registry in [&old, &to] {
        let copied = registry.manifest("copied", &theirs.to_string());
        assert_eq!(copied, from.manifest("app", &theirs.to_string()));
    }
}
