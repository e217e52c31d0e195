//! Small blobs, in parts at the same time.

use std::{collections::BTreeMap, time::Duration};

use lazuli_image::oci::{Descriptor, media_type};
use lazuli_registry::{Mirrors, Options, Pull, RegistryError};
use lazuli_testkit::registry::{FakeRegistry, Fault};

use crate::support::{noise, open, options, sha256};

fn descriptor(content: &[u8]) -> Descriptor {
    Descriptor {
        media_type: media_type::LAYER_GZIP.to_owned(),
        digest: sha256(content),
        size: content.len() as u64,
        annotations: BTreeMap::new(),
        platform: None,
        artifact_type: None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn blobs_beyond_the_first_window_come_in_parts() {
    for (size, parts) in
        [(0, 1), (14_000, 1), (14_001, 2), (224_000, 16), (300_001, 8), (4 << 20, 10)]
    {
        let server = FakeRegistry::start().unwrap();
        let content = noise(size, 11);
        server.put_blob("app", &content);
        // Nothing is answered before all had time to arrive.
        server.fault("GET", "/blobs/", parts, Fault::Latency(Duration::from_millis(300)));
        let small = open(&server, "app").small_blob(&descriptor(&content)).await.unwrap();
        assert!(small.content == content, "{size}");
        let stats = server.stats();
        let parts = parts as u64;
        assert_eq!((small.requests, stats.requests), (parts, parts));
        assert_eq!(stats.max_concurrency, parts, "{size}");
        assert!(server.log().iter().all(|request| request.range.is_some() == (parts > 1)));
    }
}

#[tokio::test]
async fn near_servers_deliver_in_one_request() {
    let server = FakeRegistry::start().unwrap();
    let content = noise(300_000, 16);
    server.put_blob("app", &content);
    let image = open(&server, "app");
    image.request_policy().health().unwrap().answered(Duration::from_millis(1));
    let small = image.small_blob(&descriptor(&content)).await.unwrap();
    assert!(small.content == content);
    assert_eq!((small.requests, server.stats().requests), (1, 1));
}

#[tokio::test]
async fn storage_behind_redirects_has_parts_too() {
    let server = FakeRegistry::start().unwrap();
    server.redirect_blobs();
    let content = noise(300_000, 12);
    server.put_blob("app", &content);
    let small = open(&server, "app").small_blob(&descriptor(&content)).await.unwrap();
    assert!(small.content == content);
    assert_eq!(server.violations(), Vec::<String>::new());
}

#[tokio::test]
async fn a_server_without_ranges_delivers_the_whole() {
    for times in [1, 100] {
        let server = FakeRegistry::start().unwrap();
        let content = noise(300_000, 13);
        server.put_blob("app", &content);
        server.fault("GET", "/blobs/", times, Fault::IgnoreRange);
        let small = open(&server, "app").small_blob(&descriptor(&content)).await.unwrap();
        assert!(small.content == content);
        assert_eq!(small.requests, 9);
        let whole = server.log().iter().filter(|request| request.range.is_none()).count();
        assert_eq!(whole, 1);
    }
}

#[tokio::test]
async fn a_wrong_part_fails_the_blob() {
    let content = noise(300_000, 14);
    let ask = async |fault: Fault| {
        let server = FakeRegistry::start().unwrap();
        server.put_blob("app", &content);
        server.fault("GET", "/blobs/", 1, fault);
        let answer = open(&server, "app").small_blob(&descriptor(&content)).await;
        answer.map(drop)
    };
    let wrong = ask(Fault::WrongBytes).await.unwrap_err();
    assert!(matches!(wrong, RegistryError::WrongDigest { .. }), "{wrong}");
    for fault in [Fault::TruncateAfter(100), Fault::ResetAfter(100), Fault::Status(503)] {
        let broken = ask(fault).await.unwrap_err();
        assert!(broken.is_transient(), "{broken}");
    }
    let missing = ask(Fault::Status(404)).await.unwrap_err();
    assert!(matches!(missing, RegistryError::Missing { .. }), "{missing}");
    let server = FakeRegistry::start().unwrap();
    let huge = Descriptor { size: (4 << 20) + 1, ..descriptor(&content) };
    let error = open(&server, "app").small_blob(&huge).await.unwrap_err();
    assert!(matches!(error, RegistryError::TooLarge { .. }), "{error}");
}

#[tokio::test]
async fn a_blob_that_a_mirror_lacks_comes_from_the_next_server() {
    let [mirror, registry] = [(), ()].map(|()| FakeRegistry::start().unwrap());
    let content = noise(300_000, 15);
    for server in [&mirror, &registry] {
        server.put_blob("app", &content);
    }
    let mut mirrors = Mirrors::default();
    let url = format!("http://{}", mirror.host()).parse().unwrap();
    mirrors.set(&registry.host(), vec![url]).unwrap();
    let options = Options { mirrors, ..options() };
    let name = format!("{}/app", registry.host()).parse().unwrap();
    for fault in [Fault::WrongBytes, Fault::TruncateAfter(9), Fault::Status(404)] {
        mirror.fault("GET", "/blobs/", 1, fault);
        registry.reset_stats();
        let image = lazuli_registry::open(&name, &options).unwrap();
        let small = image.small_blob(&descriptor(&content)).await.unwrap();
        assert!(small.content == content);
        assert_eq!(registry.stats().requests, 8);
        // Longer than the mirror's pause after a failure, at most 1.5 s.
        tokio::time::sleep(Duration::from_millis(1600)).await;
    }
}
