//! First pulls that are broken off.

use std::{fs, time::Duration};

use lazuli_image::Algorithm;
use lazuli_testkit::{
    oci::{Compression, Layer},
    odd,
    registry::Fault,
    tarball::{self, Entry},
};

use super::{
    chain_ids::{WHO, busybox, push, who},
    programs::{Containerd, on_both},
    rig::wait,
    unmodified::Scene,
};

on_both!(
    a_pull_goes_on_where_the_worker_was_killed,
    a_part_of_a_layer_that_breaks_off_is_fetched_again,
    a_spool_with_other_bytes_costs_a_pull_from_the_start,
);

/// Stored bytes of one request.
const PART: u64 = 2 << 20;

/// A layer of seven parts.
fn long() -> Layer {
    let file = |number| Entry::file(format!("file{number}"), odd::random(number, 1 << 20));
    Layer::new(tarball::write(&(0..12).map(file).collect::<Vec<_>>()), Compression::Gzip)
}

fn digest(layer: &Layer) -> String {
    Algorithm::Sha256.digest(&layer.stored().unwrap()).to_string()
}

fn layers() -> [Layer; 3] {
    [Layer::new(busybox(), Compression::Gzip), long(), who("me")]
}

/// Asserts that the image shows its own files, by its index.
fn is_shown(scene: &Scene, image: &str) {
    assert_eq!(scene.run(image, &WHO), "me\n");
    let content: Vec<_> = (0..12).flat_map(|number| odd::random(number, 1 << 20)).collect();
    let files: Vec<_> = (0..12).map(|number| format!("/file{number}")).collect();
    let script = format!("cat {} | sha256sum", files.join(" "));
    let sum = Algorithm::Sha256.digest(&content);
    assert_eq!(scene.run(image, &["sh", "-c", &script]), format!("{}  -\n", sum.hex()));
    assert_eq!(scene.rig.mounts().len(), 1, "containerd has unpacked it");
}

/// Bytes in spools.
fn spooled(scene: &Scene) -> u64 {
    let entries = fs::read_dir(scene.rig.lazuli.root().join("indexes/spools")).unwrap();
    entries.flatten().map(|entry| entry.metadata().map_or(0, |metadata| metadata.len())).sum()
}

fn a_pull_goes_on_where_the_worker_was_killed(containerd: Containerd) {
    let Some(scene) = Scene::new(containerd, "first = \"pull\"") else { return };
    let layers = layers();
    let (digest, size) = (digest(&layers[1]), layers[1].stored().unwrap().len() as u64);
    let image = push(&scene.registry, "app", &layers);
    scene.registry.reset_stats();
    // Four parts arrive.
    scene.registry.fault("GET", &digest, 4, Fault::Latency(Duration::from_millis(1)));
    scene.registry.fault("GET", &digest, usize::MAX, Fault::Hang(Duration::from_secs(300)));
    std::thread::scope(|scope| {
        let pull = scope.spawn(|| scene.rig.pull(&image));
        let is_asked = || scene.fetched(&layers[1]) == size && spooled(&scene) == 4 * PART;
        let hangs = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait("requests for the rest", is_asked);
        }));
        scene.registry.clear_faults();
        scene.registry.reset_stats();
        scene.rig.kill_worker();
        let _ = pull.join();
        hangs.unwrap();
    });
    // containerd may still be removing the remains of its own failed pull.
    wait("a pull", || scene.rig.pull(&image).is_ok());
    assert_eq!(scene.fetched(&layers[1]), size - 4 * PART);
    is_shown(&scene, &image);
    assert_eq!(spooled(&scene), 0);
    scene.rig.remove_images(&[&image]);
    scene.rig.nothing_left();
}

fn a_part_of_a_layer_that_breaks_off_is_fetched_again(containerd: Containerd) {
    let Some(scene) = Scene::new(containerd, "first = \"pull\"") else { return };
    let layers = layers();
    let (digest, size) = (digest(&layers[1]), layers[1].stored().unwrap().len() as u64);
    let image = push(&scene.registry, "app", &layers);
    scene.registry.reset_stats();
    scene.registry.fault("GET", &digest, 3, Fault::ResetAfter(1000));
    scene.rig.pull(&image).unwrap();
    let fetched = scene.fetched(&layers[1]);
    assert!((size..=size + 3 * PART).contains(&fetched), "{fetched} of {size}");
    is_shown(&scene, &image);
}

/// As a power cut may leave it, or a registry that lied before the worker was killed.
fn a_spool_with_other_bytes_costs_a_pull_from_the_start(containerd: Containerd) {
    let Some(scene) = Scene::new(containerd, "first = \"pull\"") else { return };
    let layers = layers();
    let size = layers[1].stored().unwrap().len() as u64;
    let image = push(&scene.registry, "app", &layers);
    let key = format!("{}/app\n{}", scene.registry.host(), digest(&layers[1]));
    let key = Algorithm::Sha256.digest(key.as_bytes()).hex();
    let spool = scene.rig.lazuli.root().join("indexes/spools").join(key);
    let mut stored = layers[1].stored().unwrap();
    stored.truncate(3 << 20);
    stored[1 << 20] ^= 1;
    fs::write(&spool, stored).unwrap();
    scene.registry.reset_stats();
    scene.rig.pull(&image).unwrap();
    assert!(scene.fetched(&layers[1]) >= size, "the spool is not the layer's");
    is_shown(&scene, &image);
    assert!(!spool.exists());
}
