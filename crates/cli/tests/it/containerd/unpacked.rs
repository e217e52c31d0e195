//! Ordinary images that containerd has unpacked, and that are indexed afterwards.

use std::{fs, time::SystemTime};

use lazuli_image::Digest;
use lazuli_testkit::oci::{Compression, Layer};

use super::{
    chain_ids::{WHO, push, who},
    programs::{Containerd, on_both},
    rig::wait,
    unmodified::{ON_DEMAND, Scene, index_of, layers, referrers},
};
use crate::policy::signer::digest_of;

on_both!(
    the_first_node_unpacks_and_the_second_starts_lazily,
    indexes_of_removed_images_are_evicted,
    an_image_that_cannot_be_indexed_is_not_looked_at_forever,
);

const AFTERWARDS: &str = "first = \"leave\"\ncontent_store = \"CONTENT\"";

/// Number of images waiting to be indexed.
fn waiting(scene: &Scene) -> usize {
    fs::read_dir(scene.rig.lazuli.root().join("indexes/unpacked")).unwrap().count()
}

fn the_first_node_unpacks_and_the_second_starts_lazily(containerd: Containerd) {
    let publish = format!("{AFTERWARDS}\npublish = true\nkey = \"KEY\"{ON_DEMAND}");
    let Some(first) = Scene::new(containerd, &publish) else { return };
    let layers = layers();
    let image = push(&first.registry, "app", &layers);
    first.rig.pull(&image).unwrap();
    first.registry.reset_stats();
    // The queue is on disk.
    first.rig.kill_worker();
    assert_eq!(first.run(&image, &WHO), "me\n");
    assert!(first.rig.mounts().is_empty(), "{:#?}", first.rig.mounts());
    let subject = digest_of(&first.registry, "app", "1");
    let listed = |digest: &Digest| referrers(&first.registry, "app", digest);
    wait("an index", || !listed(&subject).is_empty());
    wait("a statement", || !listed(&index_of(&first.registry, "app")).is_empty());
    assert_eq!(layers.each_ref().map(|layer| first.fetched(layer)), [0; 3]);
    wait("nothing to be indexed", || waiting(&first) == 0);
    // Pulled again, it is lazy: its layers are proven.
    first.rig.remove_images(&[&image]);
    first.rig.nothing_left();
    first.rig.pull(&image).unwrap();
    assert_eq!(layers.each_ref().map(|layer| first.fetched(layer)), [0; 3]);
    assert_eq!(first.run(&image, &WHO), "me\n");
    assert_eq!(first.rig.mounts().len(), 1);
    let settings = format!("first = \"leave\"{ON_DEMAND}");
    let Some(second) = first.succeeded_by(containerd, &settings) else { return };
    second.registry.reset_stats();
    second.rig.pull(&image).unwrap();
    assert_eq!(layers.each_ref().map(|layer| second.fetched(layer)), [0; 3]);
    assert_eq!(second.run(&image, &WHO), "me\n");
    let (fetched, all) = (second.fetched(&layers[1]), layers[1].stored().unwrap().len() as u64);
    assert!(fetched < all, "{fetched} of {all}");
}

/// No disk has this much free space, so unused indexes are evicted once they are old.
fn indexes_of_removed_images_are_evicted(containerd: Containerd) {
    let Some(scene) =
        Scene::new(containerd, &format!("{AFTERWARDS}\n[cache]\nkeep_free = {}", 1_u64 << 50))
    else {
        return;
    };
    let image = push(&scene.registry, "app", &layers());
    scene.rig.pull(&image).unwrap();
    wait("an indexed image", || waiting(&scene) == 0);
    scene.rig.remove_images(&[&image]);
    scene.rig.pull(&image).unwrap();
    let blobs = scene.rig.lazuli.root().join("indexes/blobs");
    let age = || {
        let an_hour_ago = SystemTime::now() - std::time::Duration::from_secs(3600);
        for entry in fs::read_dir(&blobs).unwrap().flatten() {
            let file = fs::File::options().append(true).open(entry.path()).unwrap();
            file.set_modified(an_hour_ago).unwrap();
        }
        fs::read_dir(&blobs).unwrap().count()
    };
    assert_eq!(age(), 3);
    std::thread::sleep(std::time::Duration::from_secs(8));
    // containerd has the image: without its indexes it would not start.
    assert_eq!(age(), 3);
    assert_eq!(scene.run(&image, &WHO), "me\n");
    scene.rig.remove_images(&[&image]);
    wait("no index", || age() == 0);
    // It is as if nothing had been known.
    scene.rig.pull(&image).unwrap();
    assert_eq!(scene.run(&image, &WHO), "me\n");
}

/// containerd has pulled a layer of a kind that has no index.
fn an_image_that_cannot_be_indexed_is_not_looked_at_forever(containerd: Containerd) {
    let Some(scene) = Scene::new(containerd, AFTERWARDS) else { return };
    let zstd = Layer::new(who("zstd").tar, Compression::Zstd);
    let image = push(&scene.registry, "zstd", &[layers()[0].clone(), zstd]);
    scene.rig.pull(&image).unwrap();
    assert_eq!(waiting(&scene), 1);
    wait("the end of that", || waiting(&scene) == 0);
    let indexes = fs::read_dir(scene.rig.lazuli.root().join("indexes/layers")).unwrap();
    assert_eq!(indexes.count(), 1, "the layer below");
    assert_eq!(scene.run(&image, &WHO), "zstd\n");
}
