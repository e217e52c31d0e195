//! Lazy images with signed sources, and converters' statements.

use lazuli_testkit::{
    oci::{Compression, Image, Layer},
    odd,
};
use serde_json::{Value, json};

use super::{
    Scene,
    signer::{MANIFEST, Signer, digest_of},
};
use crate::mount::tar_of;

#[test]
fn a_conversion_runs_with_a_trusted_statement_and_a_signed_source() {
    let Some(scene) = Scene::new() else { return };
    let Scene { lazuli, registry, signer: author, digest } = &scene;
    let converter = Signer::new(&lazuli.directory(""), "converter");
    let source = digest_of_source(&scene);
    let (host, target) = (registry.host(), scene.repository());
    scene.policy(&format!(
        "default = 'reject'\n[images]\n'{target}' = {{ statements = [{:?}] }}\n'{host}/source' = {{ keys = [{:?}] }}\n",
        converter.public(),
        author.public(),
    ));
    let (subject, from) = ((&*target, digest), (&*format!("{host}/source:1"), &source));
    author.tag(registry, "source", &source, &format!("{host}/source"));
    assert!(scene.refused(&scene.image()).contains("asks for a conversion statement"));
    // The author may sign sources, and state nothing.
    author.convert(registry, "app", subject, from);
    scene.refused(&scene.image());
    // Of another image, as another name.
    converter.convert(registry, "app", (&*format!("{host}/other"), digest), from);
    assert!(scene.refused(&scene.image()).contains("is about"));
    converter.convert(registry, "app", subject, (from.0, digest));
    assert!(scene.refused(&scene.image()).contains("its source"));
    converter.convert(registry, "app", subject, from);
    let mountpoint = scene.mountpoint("mnt");
    lazuli.ok(["mount", &scene.image(), &mountpoint]);
    lazuli.ok(["umount", &mountpoint]);
}

/// An ordinary image in the repository `source`.
fn digest_of_source(scene: &Scene) -> lazuli_image::Digest {
    let tar = tar_of("file", &odd::random(1, 10_000));
    let layout = scene.lazuli.path("ordinary");
    Image::new([Layer::new(tar, Compression::Gzip)]).write_layout(&layout, "x").unwrap();
    let name = format!("{}/source:1", scene.registry.host());
    scene.lazuli.ok(["copy", "oci:ordinary:x", &name]);
    digest_of(&scene.registry, "source", "1")
}

#[test]
fn a_lazy_image_replaces_an_ordinary_one_only_by_a_trusted_statement() {
    let Some(scene) = Scene::new() else { return };
    let Scene { lazuli, registry, signer: author, .. } = &scene;
    let converter = Signer::new(&lazuli.directory(""), "converter");
    let source = digest_of_source(&scene);
    let repository = format!("{}/source", registry.host());
    let name = format!("{repository}:1");
    author.tag(registry, "source", &source, &repository);
    // A client that may push puts a lazy image beside it.
    lazuli.ok(["convert", &name, &format!("{repository}:lazy")]);
    let raw = registry.manifest("source", "lazy").unwrap();
    let mut manifest: Value = serde_json::from_slice(&raw).unwrap();
    let size = registry.manifest("source", "1").unwrap().len();
    manifest["subject"] = json!({ "mediaType": MANIFEST, "digest": source, "size": size });
    let raw = manifest.to_string();
    let lazy = registry.put_manifest("source", "beside", MANIFEST, raw.as_bytes());
    let rule = |statements: &str| {
        let key = author.public();
        scene.policy(&format!("default = {{ keys = [{key:?}]{statements} }}\n"));
    };
    let mountpoint = scene.mountpoint("mnt");
    rule("");
    let error = lazuli.fails(["check", &name]);
    assert!(error.contains("not a lazy image"), "{error}");
    lazuli.assert_is_pulled_whole(&name);
    rule(&format!(", statements = [{:?}]", converter.public()));
    scene.refused(&name);
    // Of an earlier version, which is signed as well.
    let earlier = lazuli_image::Digest::sha256([7; 32]);
    author.tag(registry, "source", &earlier, &repository);
    converter.convert(registry, "source", (&*repository, &lazy), (&*name, &earlier));
    assert!(scene.refused(&name).contains("not from what the tag means"));
    converter.convert(registry, "source", (&*repository, &lazy), (&*name, &source));
    lazuli.ok(["mount", &name, &mountpoint]);
    lazuli.ok(["umount", &mountpoint]);
}
