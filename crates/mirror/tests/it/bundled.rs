//! Images that the node was delivered with.

use std::time::{Duration, Instant};

use lazuli_image::{Algorithm, Digest};
use lazuli_testkit::registry::{Fault, Login};

use crate::scene::{Scene, header, noise};

/// Longer than any test.
const LONG: Duration = Duration::from_secs(60);

/// Asks until the registry, which may rest, has moved the tag.
async fn moved(scene: &Scene, to: Digest) {
    let asked = Instant::now();
    loop {
        let answer = scene.get("manifests/1").await;
        if header(&answer, "docker-content-digest") == to.to_string() {
            return;
        }
        assert!(asked.elapsed() < LONG);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_pull_needs_no_registry() {
    let scene = Scene::new().await;
    let layer = noise(1 << 20);
    let [index, manifest, config] = scene.put_image("1", &layer);
    scene.bundle("1").await;
    scene.registry.go_away();
    for answer in [scene.head("manifests/1").await, scene.get("manifests/1").await] {
        assert_eq!(answer.status(), 200);
        assert_eq!(header(&answer, "docker-content-digest"), index.to_string());
    }
    for path in [format!("manifests/{manifest}"), format!("blobs/{config}")] {
        assert_eq!(scene.get(&path).await.status(), 200, "{path}");
    }
    let blob = format!("blobs/{}", Algorithm::Sha256.digest(&layer));
    assert!(scene.get(&blob).await.bytes().await.unwrap() == layer);
    let part = scene.range(&blob, "bytes=5-9004").await;
    assert!(part.status() == 206 && part.bytes().await.unwrap() == layer[5..9005]);
    assert_eq!(scene.get("manifests/2").await.status(), 503);
}

#[tokio::test]
async fn the_registry_decides_and_its_last_word_counts() {
    let scene = Scene::new().await;
    let [bundled, ..] = scene.put_image("1", b"bundled");
    scene.bundle("1").await;
    let [newer, ..] = scene.put_image("1", b"newer");
    moved(&scene, newer).await;
    // Written in the background.
    let kept = scene.directory.path().join("mirror/answers");
    let written = Instant::now();
    while std::fs::read_dir(&kept).map_or(0, Iterator::count) == 0 {
        assert!(written.elapsed() < LONG);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let scene = scene.restarted().await;
    scene.registry.go_away();
    let answer = scene.get("manifests/1").await;
    assert_eq!(header(&answer, "docker-content-digest"), newer.to_string());
    // What the bundle answered is nobody's last word.
    std::fs::remove_dir_all(&kept).unwrap();
    let scene = scene.restarted().await;
    let answer = scene.get("manifests/1").await;
    assert_eq!(header(&answer, "docker-content-digest"), bundled.to_string());
    assert!(!kept.exists());
    scene.registry.come_back();
    moved(&scene, newer).await;
}

#[tokio::test]
async fn a_registry_that_refuses_is_not_away() {
    let scene = Scene::new().await;
    scene.put_image("1", b"layer");
    scene.bundle("1").await;
    scene.registry.fault("GET", "manifests/1", 1, Fault::Status(404));
    assert_eq!(scene.get("manifests/1").await.status(), 404);
    scene.registry.require(Login::Basic("ann".to_owned(), "secret".to_owned()));
    let scene = scene.restarted().await;
    assert_eq!(scene.get("manifests/1").await.status(), 401);
    assert_eq!(scene.get_as("ann", "secret", "manifests/1").await.status(), 200);
}
