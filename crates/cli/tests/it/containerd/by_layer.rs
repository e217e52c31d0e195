//! Ordinary images with their layers' indexes in a repository of indexes.

use std::fs;

use lazuli_image::{Algorithm, Digest, oci::layer_index_tag};
use lazuli_testkit::{
    oci::{Compression, Layer},
    registry::FakeRegistry,
};
use serde_json::{Value, json};

use super::{
    chain_ids::{WHO, busybox, push, who},
    programs::{Containerd, on_both},
    unmodified::{ON_DEMAND, Scene, layers, referrers},
};
use crate::policy::signer::{Signer, digest_of};

on_both!(
    images_with_the_same_base_start_lazily_by_its_indexes,
    a_layer_whose_index_no_trusted_key_states_is_left_to_containerd,
);

fn scene(containerd: Containerd) -> Option<Scene> {
    let registry = FakeRegistry::start().unwrap();
    let repository = format!("repository = \"{}/indexes\"", registry.host());
    let settings = format!("first = \"leave\"\n{repository}{ON_DEMAND}");
    Scene::with(containerd, &settings, registry)
}

impl Scene {
    /// Indexes the layers of an image.
    fn index_layers(&self, image: &str, signer: Option<&Signer>) {
        let to = format!("{}/indexes", self.registry.host());
        let key = signer.map(|signer| signer.private().to_str().unwrap().to_owned());
        let sign = key.iter().flat_map(|key| ["--sign", key.as_str()]);
        self.rig.lazuli.ok(["index", image, "--to", &to].into_iter().chain(sign));
    }
}

fn images_with_the_same_base_start_lazily_by_its_indexes(containerd: Containerd) {
    let Some(scene) = scene(containerd) else { return };
    let Scene { rig, registry, signer } = &scene;
    let layers = layers();
    let first = push(registry, "app", &layers);
    scene.index_layers(&first, Some(signer));
    assert!(referrers(registry, "app", &digest_of(registry, "app", "1")).is_empty());
    let other = [&layers[..2], &[who("other")]].concat();
    let second = push(registry, "other", &other);
    registry.reset_stats();
    rig.pull(&first).unwrap();
    assert_eq!(layers.each_ref().map(|layer| scene.fetched(layer)), [0; 3]);
    // The layers that containerd unpacks are stacked on the lower mount.
    rig.pull(&second).unwrap();
    assert!(scene.fetched(&other[2]) > 0, "it has no index");
    assert_eq!(scene.run(&second, &WHO), "other\n");
    assert_eq!(scene.run(&first, &WHO), "me\n");
    let (fetched, all) = (scene.fetched(&layers[1]), layers[1].stored().unwrap().len() as u64);
    assert!(fetched < all, "{fetched} of {all}");
    // Whichever worker has found them.
    rig.kill_worker();
    assert_eq!(scene.run(&first, &WHO), "me\n");
    rig.remove_images(&[&first, &second]);
    rig.nothing_left();
    // Without containerd.
    let at = rig.lazuli.directory("at");
    rig.lazuli.ok(["mount", &first, at.to_str().unwrap()]);
    assert!(fs::read_to_string(at.join("etc/who")).is_ok_and(|who| who == "me\n"));
    rig.lazuli.ok(["umount", at.to_str().unwrap()]);
}

/// The content of the statement about a layer's index.
fn stated(layer: &Layer, index: &str) -> Value {
    let stored = Algorithm::Sha256.digest(&layer.stored().unwrap()).to_string();
    let diff_id = layer.diff_id().to_string();
    let converter = json!({ "version": "0" });
    json!({ "converter": converter, "layer": stored, "diffId": diff_id, "index": index })
}

fn a_layer_whose_index_no_trusted_key_states_is_left_to_containerd(containerd: Containerd) {
    let Some(scene) = scene(containerd) else { return };
    let Scene { rig, registry, signer } = &scene;
    let evil = Signer::new(&rig.lazuli.directory(""), "evil");
    let of = |name: &str| [Layer::new(busybox(), Compression::Gzip), who(name)];
    let mut images = Vec::new();
    for (name, key) in [("unsigned", None), ("stranger", Some(&evil))] {
        let image = push(registry, name, &of(name));
        scene.index_layers(&image, key);
        images.push(image);
    }
    // Unsigned images, so that each has only the following statement.
    let forge = |name: &'static str, subject: &str, change: &dyn Fn(&mut Value)| {
        let image = push(registry, name, &of(name));
        scene.index_layers(&image, None);
        for layer in of(name) {
            let digest = Algorithm::Sha256.digest(&layer.stored().unwrap());
            let tag = layer_index_tag(&digest);
            let manifest = registry.manifest("indexes", &tag).unwrap();
            let parsed: Value = serde_json::from_slice(&manifest).unwrap();
            let mut predicate = stated(&layer, parsed["layers"][0]["digest"].as_str().unwrap());
            change(&mut predicate);
            let manifest: Digest = Algorithm::Sha256.digest(&manifest);
            let kind = ("urn:lazuli:layer-index:v1", predicate);
            signer.state(registry, "indexes", (Some(subject), &manifest), kind);
        }
        image
    };
    let own = format!("{}/indexes", registry.host());
    let other = digest_of(registry, "stranger", "1").to_string();
    images.push(forge("tar", &own, &|it| it["diffId"] = other.clone().into()));
    images.push(forge("layer", &own, &|it| it["layer"] = other.clone().into()));
    images.push(forge("index", &own, &|it| it["index"] = other.clone().into()));
    let elsewhere = format!("{}/tar", registry.host());
    images.push(forge("renamed", &elsewhere, &|_| {}));
    for image in &images {
        rig.pull(image).unwrap();
        let name = image.rsplit_once('/').unwrap().1.split(':').next().unwrap();
        assert_eq!(scene.run(image, &WHO), format!("{name}\n"));
        assert!(rig.mounts().is_empty(), "{image}: {:#?}", rig.mounts());
    }
    // Unknown indexes are not looked up again at once.
    let good = forge("good", &own, &|_| {});
    scene.rig.kill_worker();
    rig.remove_images(&images.iter().map(String::as_str).collect::<Vec<_>>());
    rig.pull(&good).unwrap();
    assert_eq!(scene.run(&good, &WHO), "good\n");
    assert_eq!(rig.mounts().len(), 1, "a statement as it should be");
}
