//! The contract of every repository, run against each kind.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use lazuli_image::{Stored, oci::media_type};
use lazuli_registry::{BlobContent, Pushed, RegistryError, Repository, TAGS, into_blocking, open};
use lazuli_testkit::registry::FakeRegistry;
use tokio::io::AsyncReadExt as _;

use crate::support::{manifest, noise, options, push, read, sha256};

/// Bigger than one piece of an upload.
const BIG: usize = (8 << 20) + 12_345;

/// The contract of [`Repository`]. `reopen(tag)` opens the same place at a tag.
pub(crate) async fn check(reopen: impl Fn(&str) -> Arc<dyn Repository>) {
    let repository = reopen("1");
    let absent = sha256(b"absent");

    // The repository is empty at first.
    assert_eq!(repository.tags(9).await.unwrap(), [""; 0]);
    assert!(!repository.has_blob(&absent).await.unwrap());
    for error in [
        repository.manifest(None).await.map(drop).unwrap_err(),
        repository.blob(&absent, 6).await.map(drop).unwrap_err(),
        repository.read(&absent, 1, Stored(0)..Stored(1), &|_| {}).await.map(drop).unwrap_err(),
    ] {
        assert!(matches!(error, RegistryError::Missing { .. }), "{error}");
    }

    // Blobs of awkward sizes come back whole and in parts, and are stored once.
    for size in [0, 1, 4096, BIG] {
        let content = noise(size, size as u32 + 1);
        let digest = sha256(&content);
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), &content).unwrap();
        let reported = AtomicU64::new(0);
        let progress = |bytes| {
            reported.fetch_add(bytes, Ordering::Relaxed);
        };
        let from = BlobContent::File(file.path().to_owned());
        let pushed =
            repository.push_blob(&digest, size as u64, from, None, &progress).await.unwrap();
        assert_eq!(pushed, Pushed::Uploaded(size as u64));
        assert_eq!(reported.into_inner(), size as u64);
        assert_eq!(push(&*repository, &content).await.unwrap(), Pushed::Existed);
        assert!(repository.has_blob(&digest).await.unwrap());

        let mut whole = Vec::new();
        let mut reader = repository.blob(&digest, size as u64).await.unwrap();
        reader.read_to_end(&mut whole).await.unwrap();
        assert!(whole == content, "{size} bytes came back different");

        let size = size as u64;
        for range in [0..size, 0..size.min(1), size / 3..size / 2, size.saturating_sub(1)..size] {
            let part = read(&*repository, &content, range.clone()).await.unwrap();
            assert!(
                part == content[range.start as usize..range.end as usize],
                "{range:?} of {size}"
            );
        }
        for range in [0..size + 1, size..size + 1, size + 5..size + 9] {
            assert!(
                read(&*repository, &content, range.clone()).await.is_err(),
                "{range:?} of {size}"
            );
        }
    }

    // A wrong size or digest is noticed, at the end at the latest.
    let content = noise(70_000, 9);
    push(&*repository, &content).await.unwrap();
    for size in [0, 69_999, 70_001] {
        let error = match repository.blob(&sha256(&content), size).await {
            Ok(mut reader) => reader.read_to_end(&mut Vec::new()).await.unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        assert!(error.contains("bytes, expected"), "{error}");
    }
    let false_name = sha256(b"something else");
    let bytes = BlobContent::Bytes(content.clone().into());
    repository.push_blob(&false_name, 70_000, bytes, None, &|_| {}).await.unwrap_err();
    let bytes = BlobContent::Bytes(content.clone().into());
    repository.push_blob(&absent, 70_001, bytes, None, &|_| {}).await.unwrap_err();
    for digest in [false_name, absent] {
        assert!(!repository.has_blob(&digest).await.unwrap());
    }

    // A manifest is stored to the byte, under its tag and its digest; a tag can move.
    let config = b"{}";
    push(&*repository, config).await.unwrap();
    let first = manifest(config, &[]);
    let second = manifest(config, &[&content]);
    for raw in [&first, &second] {
        let digest =
            repository.push_manifest(raw.clone().into(), media_type::MANIFEST).await.unwrap();
        assert_eq!(digest, sha256(raw));
        let found = repository.manifest(None).await.unwrap();
        assert!(found.raw == *raw && found.digest == digest);
        assert_eq!(found.media_type, media_type::MANIFEST);
        assert_eq!(repository.small_blob(&found.parsed.config).await.unwrap().content, &config[..]);
    }
    let other = reopen("2");
    other.push_manifest(first.clone().into(), media_type::MANIFEST).await.unwrap();
    assert_eq!(other.manifest(None).await.unwrap().digest, sha256(&first));
    assert_eq!(repository.manifest(None).await.unwrap().digest, sha256(&second));

    // Many at a time. Each its own: docker-registry may answer 500 while two push the same blob.
    let tasks: Vec<_> = (0..8)
        .map(|number| {
            let repository = reopen(&format!("many-{number}"));
            let raw = manifest(config, &[&content]);
            let content = noise(100_000, number);
            tokio::spawn(async move {
                push(&*repository, &content).await.unwrap();
                repository.push_manifest(raw.into(), media_type::MANIFEST).await.unwrap();
                read(&*repository, &content, 5..77_777).await.unwrap() == content[5..77_777]
            })
        })
        .collect();
    for task in tasks {
        assert!(task.await.unwrap());
    }
    for number in 0..8 {
        reopen(&format!("many-{number}")).manifest(None).await.unwrap();
    }
    assert_eq!(repository.tags(5).await.unwrap().len(), 5);
    let mut tags = repository.tags(TAGS).await.unwrap();
    tags.sort();
    let many = (0..8).map(|number| format!("many-{number}"));
    assert_eq!(tags, ["1".to_owned(), "2".to_owned()].into_iter().chain(many).collect::<Vec<_>>());

    let named = reopen("many-3");
    let digest = named.manifest(None).await.unwrap().digest;
    assert_eq!(named.digest().await.unwrap(), digest);
    assert!(reopen("none").digest().await.unwrap_err().is_missing());

    // A synchronous reader gets the same bytes.
    let reader = repository.blob(&sha256(&content), 70_000).await.unwrap();
    let handle = tokio::runtime::Handle::current();
    let copied = std::thread::spawn(move || {
        let mut copied = Vec::new();
        std::io::copy(&mut into_blocking(reader, handle), &mut copied).map(|_| copied)
    });
    let copied =
        tokio::task::spawn_blocking(move || copied.join().unwrap()).await.unwrap().unwrap();
    assert!(copied == content);
}

#[tokio::test]
async fn a_layout_keeps_the_contract_and_leaves_no_partial_files() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("deep/images");
    check(|tag| {
        open(&format!("oci:{}:{tag}", root.display()).parse().unwrap(), &options()).unwrap()
    })
    .await;
    let hidden = |path: &std::path::Path| {
        let names = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with(".partial")).count()
    };
    assert_eq!((hidden(&root), hidden(&root.join("blobs/sha256"))), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_keeps_the_contract() {
    let server = FakeRegistry::start().unwrap();
    let name = |tag: &str| format!("{}/some/app:{tag}", server.host()).parse().unwrap();
    check(|tag| open(&name(tag), &options()).unwrap()).await;
    assert_eq!(server.violations(), Vec::<String>::new());
    assert_eq!(server.open_uploads(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_redirects_keeps_the_contract() {
    let server = FakeRegistry::start().unwrap();
    server.redirect_blobs();
    let name = |tag: &str| format!("{}/some/app:{tag}", server.host()).parse().unwrap();
    check(|tag| open(&name(tag), &options()).unwrap()).await;
    assert_eq!(server.violations(), Vec::<String>::new());
}
