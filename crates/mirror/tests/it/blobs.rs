//! Blobs: ranges, digests, registries without range support.

use lazuli_testkit::registry::Fault;

use crate::scene::{APP, Scene, header, noise};

/// More than several parts.
const BIG: usize = 7 << 20;

#[tokio::test]
async fn a_blob_arrives_in_parts_and_whole() {
    let scene = Scene::new().await;
    let layer = noise(BIG);
    let digest = scene.registry.put_blob(APP, &layer);
    let path = format!("blobs/{digest}");
    let answer = scene.get(&path).await;
    assert_eq!((answer.status().as_u16(), header(&answer, "accept-ranges")), (200, "bytes"));
    assert_eq!(header(&answer, "docker-content-digest"), digest.to_string());
    assert_eq!(answer.content_length(), Some(BIG as u64));
    assert!(answer.bytes().await.unwrap() == layer);
    assert!(scene.registry.log().len() > 3, "{:?}", scene.asked());
    let head = scene.head(&path).await;
    assert_eq!(header(&head, "content-length"), BIG.to_string());
    assert_eq!(scene.mirror.activity().bytes, BIG as u64);
}

#[tokio::test]
async fn a_transfer_that_broke_off_goes_on_where_it_was() {
    let scene = Scene::new().await;
    let layer = noise(BIG);
    let digest = scene.registry.put_blob(APP, &layer);
    let path = format!("blobs/{digest}");
    let from = 3_000_001;
    let rest = scene.range(&path, &format!("bytes={from}-")).await;
    assert_eq!(rest.status(), 206);
    assert_eq!(header(&rest, "content-range"), format!("bytes {from}-{}/{BIG}", BIG - 1));
    assert!(rest.bytes().await.unwrap() == layer[from..]);
    let end = scene.range(&path, "bytes=-5").await;
    assert!(end.bytes().await.unwrap() == layer[BIG - 5..]);
    let beyond = scene.range(&path, &format!("bytes={BIG}-")).await;
    assert_eq!(beyond.status(), 416);
    assert_eq!(header(&beyond, "content-range"), format!("bytes */{BIG}"));
    let small = scene.registry.put_blob(APP, b"small");
    let part = scene.range(&format!("blobs/{small}"), "bytes=1-2").await;
    assert_eq!((part.status().as_u16(), &part.bytes().await.unwrap()[..]), (206, &b"ma"[..]));
    assert_eq!(scene.get(&format!("blobs/{small}")).await.bytes().await.unwrap(), "small");
}

#[tokio::test]
async fn a_registry_without_ranges_is_read_from_its_beginning() {
    let scene = Scene::new().await;
    let layer = noise(BIG);
    let digest = scene.registry.put_blob(APP, &layer);
    let path = format!("blobs/{digest}");
    scene.registry.fault("GET", "/blobs/", 1000, Fault::IgnoreRange);
    assert!(scene.get(&path).await.bytes().await.unwrap() == layer);
    let rest = scene.range(&path, "bytes=70000-100000").await;
    assert!(rest.bytes().await.unwrap() == layer[70_000..=100_000]);
}

#[tokio::test]
async fn redirects_to_storage_are_followed() {
    let scene = Scene::new().await;
    scene.registry.redirect_blobs();
    let layer = noise(BIG);
    let digest = scene.registry.put_blob(APP, &layer);
    assert!(scene.get(&format!("blobs/{digest}")).await.bytes().await.unwrap() == layer);
}

/// A client never has all of a blob that has another digest, and is then sent to the registry.
#[tokio::test]
async fn wrong_bytes_are_never_the_whole_blob() {
    for size in [10, 100_000, 300_000, BIG] {
        let scene = Scene::new().await;
        let layer = noise(size);
        let digest = scene.registry.put_blob(APP, &layer);
        let path = format!("blobs/{digest}");
        // The request for the size comes first.
        scene.registry.fault("GET", &format!("{digest}"), 1, Fault::Latency(Default::default()));
        scene.registry.fault("GET", &format!("{digest}"), 1000, Fault::WrongBytes);
        let answer = scene.get(&path).await;
        let status = answer.status();
        if status == 200 {
            assert!(answer.bytes().await.is_err(), "{size}");
            assert_eq!(scene.get(&path).await.status(), 502, "{size}");
        } else {
            assert_eq!(status, 502, "{size}");
        }
    }
}

#[tokio::test]
async fn a_blob_that_is_not_there_is_left_to_the_registry() {
    let scene = Scene::new().await;
    let digest = lazuli_image::Algorithm::Sha256.digest(b"nowhere");
    assert_eq!(scene.get(&format!("blobs/{digest}")).await.status(), 404);
    assert_eq!(scene.head(&format!("blobs/{digest}")).await.status(), 404);
}
