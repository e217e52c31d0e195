//! Registries that are slow, busy or away.

use std::time::{Duration, Instant};

use lazuli_mirror::ANSWER_LIMIT;
use lazuli_testkit::registry::{Fault, Login};

use crate::scene::{APP, Scene, header, noise};

/// Longer than any test.
const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_slow_registry_is_left_to_the_client() {
    let scene = Scene::new().await;
    scene.put_image("1", b"layer");
    let blob = scene.registry.put_blob(APP, &noise(1 << 20));
    for path in ["manifests/1".to_owned(), format!("blobs/{blob}")] {
        scene.registry.fault("GET", &path, 10, Fault::Latency(LONG));
        let asked = Instant::now();
        assert_eq!(scene.get(&path).await.status(), 503, "{path}");
        // Before containerd's 30 s, also on a busy machine.
        assert!(
            asked.elapsed() >= ANSWER_LIMIT && asked.elapsed() < LONG / 3,
            "{:?}",
            asked.elapsed()
        );
    }
}

#[tokio::test]
async fn an_answer_that_comes_late_is_there_for_the_next_question() {
    let scene = Scene::new().await;
    let [index, ..] = scene.put_image("1", b"layer");
    let late = ANSWER_LIMIT + Duration::from_secs(1);
    let path = format!("manifests/{index}");
    scene.registry.fault("GET", &path, 1, Fault::Latency(late));
    assert_eq!(scene.get(&path).await.status(), 503);
    assert_eq!(scene.get(&path).await.status(), 200);
    assert_eq!(scene.asked().iter().filter(|request| request.ends_with(&path)).count(), 1);
}

#[tokio::test]
async fn a_part_that_breaks_off_is_asked_for_again() {
    let scene = Scene::new().await;
    let layer = noise(7 << 20);
    let digest = scene.registry.put_blob(APP, &layer);
    // Neither the size nor the first part.
    scene.registry.fault("GET", "/blobs/", 2, Fault::Latency(Duration::ZERO));
    scene.registry.fault("GET", "/blobs/", 2, Fault::ResetAfter(1000));
    scene.registry.fault("GET", "/blobs/", 1, Fault::Status(503));
    assert!(scene.get(&format!("blobs/{digest}")).await.bytes().await.unwrap() == layer);
}

#[tokio::test]
async fn a_registrys_rate_limit_is_respected() {
    let scene = Scene::new().await;
    scene.put_image("1", b"layer");
    scene.registry.fault("GET", "/manifests/", 100, Fault::Busy(429, 30));
    // An anonymous client may have a login, with which it may ask more often.
    assert_eq!(scene.get("manifests/1").await.status(), 401);
    scene.registry.reset_stats();
    let answer = scene.get_as("ann", "secret", "manifests/1").await;
    assert_eq!((answer.status().as_u16(), header(&answer, "retry-after")), (429, "30"));
    let again = scene.get_as("ann", "secret", "manifests/2").await;
    assert_eq!(again.status(), 429);
    assert_eq!(scene.asked().len(), 1, "{:?}", scene.asked());
}

#[tokio::test]
async fn wrong_manifests_are_not_passed_on() {
    let scene = Scene::new().await;
    let [index, ..] = scene.put_image("1", b"layer");
    scene.registry.fault("GET", "/manifests/", 2, Fault::WrongBytes);
    assert_eq!(scene.get(&format!("manifests/{index}")).await.status(), 502);
    assert_eq!(scene.get("manifests/1").await.status(), 502);
    assert_eq!(scene.get("manifests/1").await.status(), 200);
}

/// Pods with `imagePullPolicy: Always` restart while the registry is away. Each client gets only
/// answers that its own login was given before.
#[tokio::test]
async fn manifests_are_answered_while_the_registry_is_away() {
    let scene = Scene::new().await;
    let [index, ..] = scene.put_image("1", b"layer");
    scene.registry.require(Login::Basic("ann".to_owned(), "secret".to_owned()));
    assert_eq!(scene.get_as("ann", "secret", "manifests/1").await.status(), 200);
    // Written in the background.
    let kept = scene.directory.path().join("mirror/answers");
    let written = Instant::now();
    while std::fs::read_dir(&kept).map_or(0, Iterator::count) == 0 {
        assert!(written.elapsed() < LONG);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let scene = scene.restarted().await;
    scene.registry.go_away();
    assert_eq!(scene.get("manifests/1").await.status(), 401);
    let answer = scene.get_as("ann", "secret", "manifests/1").await;
    assert_eq!(header(&answer, "docker-content-digest"), index.to_string());
    assert_eq!(scene.mirror.activity().stale, 1);
    for (user, password) in [("bob", "secret"), ("ann", "other")] {
        assert_eq!(scene.get_as(user, password, "manifests/1").await.status(), 503);
    }
    assert_eq!(scene.get_as("ann", "secret", "manifests/2").await.status(), 503);
    // Nothing is left of it after a refusal.
    scene.registry.require(Login::Basic("ann".to_owned(), "changed".to_owned()));
    scene.registry.come_back();
    let back = Instant::now();
    let refused = loop {
        match scene.get_as("ann", "secret", "manifests/1").await.status().as_u16() {
            // It takes a moment to listen again.
            200 if back.elapsed() < LONG => tokio::time::sleep(Duration::from_millis(10)).await,
            other => break other,
        }
    };
    assert_eq!(refused, 403);
    let scene = scene.restarted().await;
    scene.registry.go_away();
    assert_eq!(scene.get_as("ann", "secret", "manifests/1").await.status(), 503);
}
