//! Misbehaving registries.

use std::time::{Duration, Instant};

use bytes::Bytes;
use lazuli_image::{Stored, oci::media_type};
use lazuli_registry::{
    BlobContent, Options, Platform, Pull, Push, Pushed, Registry, RegistryError, Timeouts,
};
use lazuli_testkit::registry::{FakeRegistry, Fault};
use serde_json::json;
use tokio::io::AsyncReadExt as _;

use crate::support::{manifest, noise, open, options, push, read, sha256};

fn is_right(part: Result<Bytes, RegistryError>, expected: &[u8]) {
    assert!(part.unwrap() == expected);
}

#[tokio::test]
async fn each_fault_of_a_ranged_read_is_named_and_the_next_read_is_right() {
    let content = noise(100_000, 1);
    let short = Options {
        timeouts: Timeouts { idle: Duration::from_millis(300), ..Timeouts::default() },
        ..options()
    };
    let cases: [(Fault, bool, &str); 10] = [
        (Fault::Status(500), true, "answered 500"),
        (Fault::Status(501), false, "answered 501"),
        (Fault::Status(404), false, "has no bytes 5..60000 of blob sha256:"),
        (Fault::Status(403), false, "docker login 127.0.0.1:"),
        (Fault::Busy(429, 7), true, "answered 429"),
        (Fault::ResetAfter(30_000), true, "broke off"),
        (Fault::TruncateAfter(30_000), true, "broke off"),
        (Fault::IgnoreRange, false, "does not support ranged reads"),
        (Fault::WrongContentRange, false, "Content-Range is `bytes 6-60000/*`"),
        (Fault::Hang(Duration::from_secs(2)), true, "nothing arrived in time"),
    ];
    for redirect in [false, true] {
        let server = FakeRegistry::start().unwrap();
        server.put_blob("app", &content);
        if redirect {
            server.redirect_blobs();
        }
        let name = format!("{}/app", server.host()).parse().unwrap();
        let registry = Registry::open(name, &short).unwrap();
        for (fault, transient, text) in &cases {
            // With redirects on, the fault is the storage's, and its refusals mean "expired".
            let path = if redirect { "/app/sha256:" } else { "/blobs/" };
            if redirect && matches!(fault, Fault::Status(403 | 404)) {
                continue;
            }
            server.clear_faults();
            server.fault("GET", path, 1, fault.clone());
            let error = read(&registry, &content, 5..60_000).await.unwrap_err();
            assert!(error.to_string().contains(text), "{fault:?}: {error}");
            assert_eq!(error.is_transient(), *transient, "{fault:?}: {error}");
            is_right(read(&registry, &content, 5..60_000).await, &content[5..60_000]);
        }
        assert_eq!(server.violations(), Vec::<String>::new());
    }
}

#[tokio::test]
async fn retry_after_is_reported() {
    let server = FakeRegistry::start().unwrap();
    let content = noise(10, 2);
    server.put_blob("app", &content);
    server.fault("", "", 1, Fault::Busy(429, 7));
    let error = read(&open(&server, "app"), &content, 0..5).await.unwrap_err();
    assert_eq!(error.retry_after(), Some(Duration::from_secs(7)));
}

#[tokio::test]
async fn wrong_bytes_are_caught_where_the_digest_is_known() {
    let server = FakeRegistry::start().unwrap();
    let content = noise(50_000, 3);
    server.put_blob("app", &content);
    let registry = open(&server, "app:1");
    server.fault("GET", "/blobs/", 1, Fault::WrongBytes);
    let mut reader = registry.blob(&sha256(&content), 50_000).await.unwrap();
    let error = reader.read_to_end(&mut Vec::new()).await.unwrap_err().to_string();
    assert!(error.contains("it is corrupt"), "{error}");

    let raw = manifest(b"{}", &[&content]);
    let digest = server.put_manifest("app", "1", media_type::MANIFEST, &raw);
    server.put_manifest(
        "app",
        &digest.to_string(),
        media_type::MANIFEST,
        b"{\"schemaVersion\": 2}",
    );
    let error = open(&server, &format!("app@{digest}")).manifest(None).await.unwrap_err();
    assert!(matches!(error, RegistryError::WrongDigest { .. }), "{error}");

    for (fault, text) in
        [(Fault::ResetAfter(9), "broke off"), (Fault::TruncateAfter(9), "broke off")]
    {
        server.fault("GET", "/blobs/", 1, fault);
        let mut reader = registry.blob(&sha256(&content), 50_000).await.unwrap();
        let error = reader.read_to_end(&mut Vec::new()).await.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

#[tokio::test]
async fn a_redirect_is_followed_once_and_again_when_it_expired() {
    let server = FakeRegistry::start().unwrap();
    server.redirect_blobs();
    let content = noise(10_000, 4);
    server.put_blob("app", &content);
    let registry = open(&server, "app");
    let at_registry = || server.log().iter().filter(|request| !request.storage).count();
    for start in 0..5 {
        is_right(
            read(&registry, &content, start..start + 7).await,
            &content[start as usize..][..7],
        );
    }
    assert_eq!((at_registry(), server.stats().requests), (1, 6));
    assert!(server.stats().connections <= 2, "{:?}", server.stats());
    server.expire_redirects();
    for start in 0..5 {
        is_right(
            read(&registry, &content, start..start + 7).await,
            &content[start as usize..][..7],
        );
    }
    // The refused request, the detour, and the storage again.
    assert_eq!((at_registry(), server.stats().requests), (2, 13));
    assert_eq!(server.violations(), Vec::<String>::new());
}

#[tokio::test]
async fn a_registry_that_is_down_is_named() {
    let server = FakeRegistry::start().unwrap();
    let host = server.host();
    let registry = open(&server, "app");
    drop(server);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let error = registry.manifest(None).await.unwrap_err();
    assert!(error.is_transient());
    let text = error.to_string();
    assert!(text.contains(&host) && text.contains("is the registry up?"), "{text}");
    assert!(text.contains("refused"), "{text}");
}

#[tokio::test]
async fn documents_are_bounded() {
    let server = FakeRegistry::start().unwrap();
    server.put_manifest("app", "1", media_type::MANIFEST, &vec![b' '; (4 << 20) + 1]);
    let error = open(&server, "app:1").manifest(None).await.unwrap_err();
    assert!(matches!(error, RegistryError::TooLarge { .. }), "{error}");
    for (raw, text) in [
        ("", "EOF"),
        ("[]", "is malformed"),
        (r#"{"schemaVersion": 1}"#, "schemaVersion is 1, expected 2"),
        (r#"{"schemaVersion": 2, "mediaType": "text/plain"}"#, "media type `text/plain`"),
        (r#"{"schemaVersion": 2}"#, "missing field"),
    ] {
        server.put_manifest("app", "1", media_type::MANIFEST, raw.as_bytes());
        let error = open(&server, "app:1").manifest(None).await.unwrap_err().to_string();
        assert!(error.contains(text) && error.contains("app:1"), "{raw}: {error}");
    }
}

#[tokio::test]
async fn the_platform_is_chosen_or_the_others_are_listed() {
    let server = FakeRegistry::start().unwrap();
    let entry = |platform: &str| {
        let raw = manifest(platform.as_bytes(), &[]);
        let platform: Platform = platform.parse().unwrap();
        let digest = server.put_manifest("app", "x", media_type::MANIFEST, &raw);
        json!({"mediaType": media_type::MANIFEST, "digest": digest, "size": raw.len(), "platform": platform})
    };
    let platforms =
        ["unknown/unknown", "linux/arm/v6", "linux/arm/v7", "linux/arm64/v8", "linux/amd64"];
    let entries: Vec<_> = platforms.iter().map(|platform| entry(platform)).collect();
    let index = json!({"schemaVersion": 2, "mediaType": media_type::INDEX, "manifests": entries})
        .to_string();
    server.put_manifest("app", "1", media_type::INDEX, index.as_bytes());
    let registry = open(&server, "app:1");
    for (wanted, expected) in [
        ("linux/amd64", "linux/amd64"),
        ("linux/arm64", "linux/arm64/v8"),
        ("linux/arm", "linux/arm/v6"),
        ("linux/arm/v7", "linux/arm/v7"),
    ] {
        let found = registry.manifest(Some(&wanted.parse().unwrap())).await.unwrap();
        assert_eq!(found.parsed.config.digest, sha256(expected.as_bytes()), "{wanted}");
    }
    let error =
        registry.manifest(Some(&"linux/s390x".parse().unwrap())).await.unwrap_err().to_string();
    assert!(
        error.contains("linux/s390x") && error.contains("linux/arm64/v8, linux/amd64"),
        "{error}"
    );
    assert!(!error.contains("unknown"), "{error}");
}

/// Three pieces and a bit.
const BIG: usize = (24 << 20) + 77;

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_goes_on_where_it_broke_off() {
    let content = noise(BIG, 5);
    let digest = sha256(&content);
    let piece = 8u64 << 20;
    // The fault of the second PATCH, and how many bytes travel because of it.
    let cases = [
        (Fault::ResetAfter(1 << 20), Some(BIG as u64 + piece)),
        (Fault::Status(503), Some(BIG as u64 + piece)),
        (Fault::LoseAnswer, Some(BIG as u64)),
        (Fault::Status(404), None),
    ];
    for (fault, sent) in cases {
        let server = FakeRegistry::start().unwrap();
        let registry = open(&server, "app");
        server.fault("PATCH", "/uploads/", 1, Fault::Latency(Duration::ZERO));
        server.fault("PATCH", "/uploads/", 1, fault.clone());
        let bytes = BlobContent::Bytes(content.clone().into());
        let pushed = registry.push_blob(&digest, BIG as u64, bytes, None, &|_| {}).await.unwrap();
        let Pushed::Uploaded(bytes) = pushed else { panic!("{pushed:?}") };
        assert!(sent.is_none_or(|sent| bytes <= sent), "{fault:?}: {bytes}");
        assert!(server.blob("app", &digest).unwrap() == content, "{fault:?}");
        assert_eq!(server.violations(), Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_restarts_does_not_fail_an_upload() {
    let server = FakeRegistry::start().unwrap();
    let registry = open(&server, "app");
    let content = noise(BIG, 6);
    let restart = server.clone();
    let once = std::sync::Once::new();
    let progress = move |_| once.call_once(|| restart.refuse_for(Duration::from_millis(700)));
    let bytes = BlobContent::Bytes(content.clone().into());
    registry.push_blob(&sha256(&content), BIG as u64, bytes, None, &progress).await.unwrap();
    assert!(server.blob("app", &sha256(&content)).unwrap() == content);
}

#[tokio::test]
async fn an_upload_that_cannot_succeed_ends_and_leaves_nothing() {
    let server = FakeRegistry::start().unwrap();
    let registry = open(&server, "app");
    let content = noise(1000, 7);
    server.fault("PUT", "/uploads/", 1, Fault::Status(413));
    let error = push(&registry, &content).await.unwrap_err();
    assert!(error.to_string().contains("413"), "{error}");
    assert_eq!(server.open_uploads(), 0);

    server.fault("PUT", "/uploads/", 100, Fault::Status(500));
    let start = Instant::now();
    push(&registry, &content).await.unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(20));
    assert_eq!(server.open_uploads(), 0);
    assert!(server.blob("app", &sha256(&content)).is_none());
    // Small blobs take three requests: look up, begin, send everything.
    server.clear_faults();
    server.reset_stats();
    push(&registry, &content).await.unwrap();
    assert_eq!(server.stats().requests, 3, "{:?}", server.log());
}

#[tokio::test]
async fn blobs_are_linked_from_other_repositories() {
    let server = FakeRegistry::start().unwrap();
    let registry = open(&server, "new/app");
    let content = noise(1000, 8);
    let digest = sha256(&content);
    let bytes = || BlobContent::Bytes(content.clone().into());
    let pushed = registry.push_blob(&digest, 1000, bytes(), Some("base"), &|_| {}).await.unwrap();
    assert_eq!(pushed, Pushed::Uploaded(1000));
    server.put_blob("base", &noise(500, 9));
    let other = noise(500, 9);
    let bytes = BlobContent::Bytes(other.clone().into());
    let pushed =
        registry.push_blob(&sha256(&other), 500, bytes, Some("base"), &|_| {}).await.unwrap();
    assert_eq!(pushed, Pushed::Mounted);
    assert!(registry.has_blob(&sha256(&other)).await.unwrap());
    assert_eq!(server.open_uploads(), 0);
    let error = registry.read(&digest, 1000, Stored(9)..Stored(3), &|_| {}).await.unwrap_err();
    assert!(error.to_string().contains("inverted"), "{error}");
}
