//! Images that the node was delivered with.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use lazuli_image::{Algorithm, Digest};
use lazuli_testkit::registry::{Fault, Login};

use crate::scene::{Scene, header, noise};

/// Longer than any test.
const LONG: Duration = Duration::from_secs(60);

/// Asks until the registry has decided: it may rest, and on a busy machine count as silent.
async fn until(mut has_decided: impl AsyncFnMut() -> bool) {
    let asked = Instant::now();
    while !has_decided().await {
        assert!(asked.elapsed() < LONG);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Asks until the registry has moved the tag.
async fn moved(scene: &Scene, to: Digest) {
    until(async || {
        let answer = scene.get("manifests/1").await;
        header(&answer, "docker-content-digest") == to.to_string()
    })
    .await;
}

/// The files of the answers that the mirror keeps, once there are any: they are written in the
/// background.
async fn kept(scene: &Scene) -> Vec<PathBuf> {
    let below = |directory: PathBuf| {
        let entries = std::fs::read_dir(directory).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path())
    };
    let asked = Instant::now();
    loop {
        let answers = below(scene.directory.path().join("mirror/answers"));
        let files: Vec<_> = answers.flat_map(below).flat_map(below).collect();
        let is_partial = |file: &PathBuf| file.extension().is_some();
        if !files.is_empty() && !files.iter().any(is_partial) {
            return files;
        }
        assert!(asked.elapsed() < LONG);
        tokio::time::sleep(Duration::from_millis(10)).await;
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
    kept(&scene).await;
    let kept = scene.directory.path().join("mirror/answers");
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
async fn answers_that_are_kept_for_others_do_not_hide_the_bundle() {
    let scene = Scene::new().await;
    let [index, ..] = scene.put_image("1", b"layer");
    scene.bundle("1").await;
    scene.put_image("2", b"other layer");
    assert_eq!(scene.get("manifests/2").await.status(), 200);
    kept(&scene).await;
    let scene = scene.restarted().await;
    scene.registry.go_away();
    // The client without a login has another tag, then one that has expired.
    for age in [0, 7200] {
        let past = std::time::SystemTime::now() - Duration::from_secs(age);
        for file in kept(&scene).await {
            std::fs::File::options().append(true).open(file).unwrap().set_modified(past).unwrap();
        }
        let answer = scene.get("manifests/1").await;
        assert_eq!(header(&answer, "docker-content-digest"), index.to_string(), "{age}");
    }
    // What nobody has, another client's login may still see.
    assert_eq!(scene.get("manifests/3").await.status(), 401);
}

#[tokio::test]
async fn a_registry_that_refuses_is_not_away() {
    let scene = Scene::new().await;
    scene.put_image("1", b"layer");
    scene.bundle("1").await;
    until(async || {
        scene.registry.fault("GET", "manifests/1", 1, Fault::Status(404));
        scene.get("manifests/1").await.status() == 404
    })
    .await;
    scene.registry.require(Login::Basic("ann".to_owned(), "secret".to_owned()));
    let scene = scene.restarted().await;
    until(async || scene.get("manifests/1").await.status() == 401).await;
    until(async || scene.get_as("ann", "secret", "manifests/1").await.status() == 200).await;
}

#[tokio::test]
async fn a_registry_that_answers_others_is_not_away() {
    let scene = Scene::new().await;
    scene.put_image("1", b"layer");
    scene.bundle("1").await;
    until(async || {
        scene.registry.fault("GET", "manifests/1", 1, Fault::Hang(LONG));
        let silent = scene.get("manifests/1");
        tokio::pin!(silent);
        // Each is another question to the registry.
        for number in 0.. {
            let path = format!("manifests/other-{number}");
            tokio::select! {
                answer = &mut silent => return answer.status() == 503,
                _ = scene.get(&path) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
        unreachable!()
    })
    .await;
}
