//! Images whose configurations claim layers that are other images' own.
//!
//! containerd names a layer by an image's configuration, and doesn't fetch a layer if it has a
//! snapshot of that name. So one image's claims determine what others show.

use std::{fs, io::Read as _};

use lazuli_image::Digest;
use lazuli_testkit::{
    cri::CriError,
    oci::{Compression, Image, Layer},
    registry::FakeRegistry,
    tarball::{self, Entry},
};
use rustix::{
    fs::{CWD, FileType, Mode, mknodat},
    process::Signal,
};
use serde_json::{Value, json};

use super::{
    programs::{Containerd, on_both},
    rig::{Rig, wait},
};
use crate::lazuli::corpus;

on_both!(
    an_image_that_claims_the_layers_of_another_is_refused,
    a_layer_that_is_listed_as_data_is_not_shown_as_empty,
    an_annotation_that_names_a_file_of_the_node_is_refused,
);

/// Prints which image a container runs on.
pub(super) const WHO: [&str; 2] = ["cat", "/etc/who"];

/// A registry with an ordinary image as the victim, and a lazy one that attacks it.
struct Scene {
    rig: Rig,
    registry: FakeRegistry,
    /// The layers of the image that is attacked.
    layers: [Layer; 2],
    /// The victim, and an image that shares its lower layer.
    victim: String,
    base: String,
}

impl Scene {
    fn new(containerd: Containerd) -> Option<Self> {
        let rig = Rig::new(containerd, "busybox")?;
        let registry = FakeRegistry::start().unwrap();
        rig.plain_http(&registry.host());
        let base = Layer::new(busybox(), Compression::Gzip);
        let layers = [base.clone(), who("victim")];
        // In one layer, which becomes one data layer.
        let mut attacker = who("attacker").tar;
        let end = attacker.iter().rposition(|byte| *byte != 0).unwrap();
        attacker.truncate(end.next_multiple_of(512));
        attacker.extend(&base.tar);
        let attacker = Image::new([Layer::new(attacker, Compression::Gzip)]);
        let layout = rig.lazuli.directory("layout");
        attacker.write_layout(&layout, "made").unwrap();
        let made = format!("{}/evil:made", registry.host());
        rig.lazuli.ok(["convert", &format!("oci:{}:made", layout.display()), &made]);
        let victim = push(&registry, "victim", &layers);
        let base = push(&registry, "base", &layers[..1]);
        Some(Scene { rig, registry, layers, victim, base })
    }

    /// The layers of the lazy image as converted: one with data, and the bootstrap.
    fn made(&self) -> [Value; 2] {
        let manifest = self.registry.manifest("evil", "made").unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        let layers: Vec<Value> = serde_json::from_value(manifest["layers"].clone()).unwrap();
        layers.try_into().unwrap()
    }

    /// The digests of the tars of its layers.
    fn made_diff_ids(&self) -> Vec<String> {
        let diff_ids = self.config()["rootfs"]["diff_ids"].clone();
        serde_json::from_value(diff_ids).unwrap()
    }

    fn config(&self) -> Value {
        let manifest = self.registry.manifest("evil", "made").unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        let digest: Digest = manifest["config"]["digest"].as_str().unwrap().parse().unwrap();
        serde_json::from_slice(&self.registry.blob("evil", &digest).unwrap()).unwrap()
    }

    /// Pushes the lazy image with other layers, and a configuration that claims these DiffIDs.
    fn forge(&self, tag: &str, layers: &[Value], diff_ids: &[String]) -> String {
        let mut config = self.config();
        config["rootfs"]["diff_ids"] = json!(diff_ids);
        config.as_object_mut().unwrap().remove("history");
        put_manifest(&self.registry, "evil", tag, &config, layers)
    }

    fn run(&self, image: &str) -> Result<String, CriError> {
        let output = self.rig.cri.run(&image.replace(['/', ':'], "-"), image, &WHO)?;
        Ok(String::from_utf8(output.stdout).unwrap())
    }
}

/// The tar of the image in the corpus, which has one layer.
pub(super) fn busybox() -> Vec<u8> {
    let layout = corpus("busybox").unwrap();
    let blob = |digest: &Value| {
        let hex = digest.as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned();
        fs::read(layout.join("blobs/sha256").join(hex)).unwrap()
    };
    let json = |content: &[u8]| serde_json::from_slice::<Value>(content).unwrap();
    let index = json(&fs::read(layout.join("index.json")).unwrap());
    let manifest = json(&blob(&index["manifests"][0]["digest"]));
    let mut tar = Vec::new();
    let layer = blob(&manifest["layers"][0]["digest"]);
    flate2::read::MultiGzDecoder::new(&layer[..]).read_to_end(&mut tar).unwrap();
    tar
}

/// A layer by which images are told.
pub(super) fn who(name: &str) -> Layer {
    let entries = [Entry::directory("etc"), Entry::file("etc/who", format!("{name}\n"))];
    Layer::new(tarball::write(&entries), Compression::Gzip)
}

/// Puts an ordinary image into the registry.
pub(super) fn push(registry: &FakeRegistry, repository: &str, layers: &[Layer]) -> String {
    let mut config = Image::new([]).config;
    let diff_ids: Vec<_> = layers.iter().map(|layer| layer.diff_id().to_string()).collect();
    config["rootfs"] = json!({ "type": "layers", "diff_ids": diff_ids });
    let described = layers.iter().map(|layer| {
        let stored = layer.stored().unwrap();
        let digest = registry.put_blob(repository, &stored).to_string();
        json!({ "mediaType": layer.media_type(), "digest": digest, "size": stored.len() })
    });
    put_manifest(registry, repository, "1", &config, &described.collect::<Vec<_>>())
}

pub(super) fn put_manifest(
    registry: &FakeRegistry,
    repository: &str,
    tag: &str,
    config: &Value,
    layers: &[Value],
) -> String {
    let config = config.to_string();
    let digest = registry.put_blob(repository, config.as_bytes()).to_string();
    let media_type = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": media_type,
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": digest,
            "size": config.len(),
        },
        "layers": layers,
    });
    registry.put_manifest(repository, tag, media_type, manifest.to_string().as_bytes());
    format!("{}/{repository}:{tag}", registry.host())
}

/// All layers of an ordinary image, and one lower layer, claimed by a leading bootstrap.
fn an_image_that_claims_the_layers_of_another_is_refused(containerd: Containerd) {
    let Some(scene) = Scene::new(containerd) else { return };
    let victims = scene.layers.each_ref().map(|layer| layer.diff_id().to_string());
    let [data, bootstrap] = scene.made();
    let all = scene.forge("all", &[data.clone(), bootstrap.clone()], &victims);
    let own = scene.made_diff_ids();
    let lower = [victims[0].clone(), own[0].clone()];
    let lower = scene.forge("lower", &[bootstrap.clone(), data.clone()], &lower);
    let top = [own[0].clone(), victims[1].clone()];
    let top = scene.forge("top", &[data, bootstrap], &top);
    for evil in [&all, &lower, &top] {
        let error = scene.rig.pull(evil).unwrap_err().to_string();
        let reason = format!("image {evil} is refused: its configuration calls a layer sha256:");
        assert!(error.contains(&reason), "{error}");
        assert!(evil == &top || error.contains(&victims[0]), "{error}");
    }
    assert!(scene.rig.mounts().is_empty(), "{:#?}", scene.rig.mounts());
    // The victim has its own files, and the attacker under its own names has its own.
    let made = format!("{}/evil:made", scene.registry.host());
    for (image, says) in [(&scene.victim, "victim\n"), (&made, "attacker\n")] {
        scene.rig.pull(image).unwrap();
        assert_eq!(scene.run(image).unwrap(), says);
    }
    scene.rig.remove_images(&[&scene.victim, &made]);
    scene.rig.nothing_left();
}

/// The genuine tar of another image's layer as a data blob: the claim is true, but the snapshot has
/// no files.
fn a_layer_that_is_listed_as_data_is_not_shown_as_empty(containerd: Containerd) {
    let Some(scene) = Scene::new(containerd) else { return };
    let [data, bootstrap] = scene.made();
    let tar = &scene.layers[0].tar;
    let mut listed = data.clone();
    listed["digest"] = json!(scene.registry.put_blob("evil", tar).to_string());
    listed["size"] = json!(tar.len());
    let diff_ids = [vec![scene.layers[0].diff_id().to_string()], scene.made_diff_ids()].concat();
    let evil = scene.forge("data", &[listed, data, bootstrap], &diff_ids);
    scene.rig.pull(&evil).unwrap();
    assert_eq!(scene.run(&evil).unwrap(), "attacker\n");

    // containerd believes that it has the lower layer, and requests the one on top.
    let unpacked = scene.rig.pull(&scene.victim).unwrap_err().to_string();
    let _ = scene.rig.pull(&scene.base);
    let started = scene.run(&scene.base).unwrap_err().to_string();
    for error in [unpacked, started] {
        let reason = format!("is listed as data of the lazy image {evil}, and has no files");
        assert!(error.contains(&reason), "{error}");
        assert!(error.contains(&scene.layers[0].diff_id().to_string()), "{error}");
    }

    // As soon as the name is free, they are pulled.
    for sandbox in scene.rig.cri.sandboxes().unwrap() {
        scene.rig.cri.remove(&sandbox.id).unwrap();
    }
    scene.rig.remove_images(&[&evil, &scene.base]);
    wait("the victim", || scene.rig.pull(&scene.victim).is_ok());
    assert_eq!(scene.run(&scene.victim).unwrap(), "victim\n");
    scene.rig.remove_images(&[&scene.victim]);
    scene.rig.nothing_left();
}

/// A client that adds no labels lets an image's own annotations pass for them. A pipe without a
/// writer is never opened.
fn an_annotation_that_names_a_file_of_the_node_is_refused(containerd: Containerd) {
    let Some(scene) = Scene::new(containerd) else { return };
    let volume = scene.rig.lazuli.directory("volume");
    mknodat(CWD, volume.join("index.json"), FileType::Fifo, Mode::RWXU, 0).unwrap();
    let [_, mut bootstrap] = scene.made();
    let label = |name: &str| format!("containerd.io/snapshot/cri.{name}");
    bootstrap["annotations"][label("image-ref")] = json!(format!("oci:{}", volume.display()));
    bootstrap["annotations"][label("manifest-digest")] = bootstrap["digest"].clone();
    let evil = scene.forge("file", &[bootstrap], &scene.made_diff_ids()[1..]);
    // The default.
    let path = scene.rig.lazuli.path("containerd.toml");
    let configuration = fs::read_to_string(&path).unwrap();
    let [no, yes] = ["false", "true"].map(|is| format!("disable_snapshot_annotations = {is}"));
    assert!(configuration.contains(&no));
    let configuration = configuration.replace(&no, &yes);
    fs::write(&path, configuration.replace("enable_remote_snapshot_annotations", "x")).unwrap();
    scene.rig.end_containerd(Signal::TERM);
    scene.rig.start_containerd();
    let error = scene.rig.pull(&evil).unwrap_err().to_string();
    let reason = "its label must name an image in a registry: `oci:/";
    assert!(error.contains(reason), "{error}");
    scene.rig.nothing_left();
}
