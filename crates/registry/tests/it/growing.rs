//! Blobs that are pushed while they are made.

use std::{
    fs::File,
    io::Write as _,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use lazuli_registry::{Growing, Growth, Layout, Pull, Push, Pushed};
use lazuli_testkit::registry::{FakeRegistry, Fault};
use tempfile::TempDir;
use tokio::{sync::watch, time::sleep};

use crate::support::{noise, open, push, sha256};

/// Bytes of one request.
const PIECE: usize = 8 << 20;

/// A blob that is empty so far.
fn growing(directory: &TempDir) -> (File, watch::Sender<Growth>, Growing) {
    let path = directory.path().join("blob");
    let file = File::create(&path).unwrap();
    let (sender, growth) = watch::channel(Growth::Bytes(0));
    (file, sender, Growing { file: path, growth })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_growing_blob_is_sent_while_it_is_written() {
    let piece = PIECE as u64;
    // At the last byte of a request, and beyond.
    for (size, fault) in [
        (3 * PIECE, None),
        (3 * PIECE + 1, None),
        (3 * PIECE + 5, Some(Fault::ResetAfter(1 << 20))),
        (3 * PIECE + 5, Some(Fault::LoseAnswer)),
        (3 * PIECE + 5, Some(Fault::Status(404))),
    ] {
        let server = FakeRegistry::start().unwrap();
        // The registry reports that it forgot the first upload.
        let forgotten = usize::from(fault == Some(Fault::Status(404)));
        if let Some(fault) = fault {
            server.fault("PATCH", "/uploads/", 1, Fault::Latency(Duration::ZERO));
            server.fault("PATCH", "/uploads/", 1, fault);
        }
        let directory = tempfile::tempdir().unwrap();
        let (mut file, growth, blob) = growing(&directory);
        let content = noise(size, 3);
        let registry = open(&server, "app");
        let seen = AtomicU64::new(0);
        let count = |bytes| {
            seen.fetch_add(bytes, Relaxed);
        };
        let make = async {
            file.write_all(&content[..2 * PIECE + 1]).unwrap();
            growth.send_replace(Growth::Bytes(2 * piece + 1));
            while seen.load(Relaxed) < piece {
                sleep(Duration::from_millis(5)).await;
            }
            file.write_all(&content[2 * PIECE + 1..]).unwrap();
            growth.send_replace(Growth::Whole(sha256(&content), size as u64));
        };
        let (pushed, ()) = tokio::join!(registry.push_growing(blob, &count), make);
        assert!(matches!(pushed.unwrap(), Pushed::Uploaded(sent) if sent >= size as u64));
        assert!(server.blob("app", &sha256(&content)).unwrap() == content);
        assert_eq!(seen.into_inner(), size as u64);
        assert_eq!((server.violations(), server.open_uploads()), (Vec::new(), forgotten));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unfinished_blob_is_removed() {
    let server = FakeRegistry::start().unwrap();
    let directory = tempfile::tempdir().unwrap();
    for first in [10, 2 * PIECE + 1] {
        let (mut file, growth, blob) = growing(&directory);
        file.write_all(&noise(first, 3)).unwrap();
        growth.send_replace(Growth::Bytes(first as u64));
        let registry = open(&server, "app");
        let give_up = async {
            sleep(Duration::from_millis(200)).await;
            drop(growth);
        };
        let (pushed, ()) = tokio::join!(registry.push_growing(blob, &|_| {}), give_up);
        assert!(pushed.unwrap_err().to_string().contains("the rest of the blob was never written"));
        assert_eq!(server.open_uploads(), 0);
    }
}

/// Neither a running request nor data queued behind it delays that.
#[tokio::test(flavor = "multi_thread")]
async fn an_abandoned_blob_is_not_sent() {
    let size = 4 * PIECE + 1;
    let content = noise(size, 3);
    let whole = Growth::Whole(sha256(&content), size as u64);
    for (said, last) in [
        (None, None),
        (Some(Growth::GivenUp), None),
        // While the rest is stored.
        (Some(Growth::GivenUp), Some(whole)),
    ] {
        let server = FakeRegistry::start().unwrap();
        server.fault("PATCH", "/uploads/", 1, Fault::Latency(Duration::ZERO));
        server.fault("PATCH", "/uploads/", 9, Fault::Latency(Duration::from_secs(20)));
        let directory = tempfile::tempdir().unwrap();
        let (mut file, growth, blob) = growing(&directory);
        file.write_all(&content).unwrap();
        growth.send_replace(Growth::Bytes(size as u64));
        let registry = open(&server, "app");
        let sent = || server.log().iter().filter(|logged| logged.method == "PATCH").count();
        let give_up = async {
            while sent() < 2 {
                sleep(Duration::from_millis(5)).await;
            }
            last.map(|last| growth.send_replace(last));
            sleep(Duration::from_millis(50)).await;
            said.map(|said| growth.send_replace(said));
            drop(growth);
            Instant::now()
        };
        let (pushed, given_up) = tokio::join!(registry.push_growing(blob, &|_| {}), give_up);
        assert!(given_up.elapsed() < Duration::from_secs(10), "{:?}", given_up.elapsed());
        assert!(pushed.unwrap_err().to_string().contains("the rest of the blob was never written"));
        assert_eq!((sent(), server.open_uploads()), (2, 0));
    }
}

/// It would be a hole in the blob, or beyond its end.
#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_has_more_than_was_sent_begins_anew() {
    let server = FakeRegistry::start().unwrap();
    server.fault("PATCH", "/uploads/", 1, Fault::LoseAnswer);
    let claimed = format!("0-{}", 4 * PIECE - 1);
    server.fault("GET", "/uploads/", 1, Fault::Header("range", claimed));
    let directory = tempfile::tempdir().unwrap();
    let (mut file, growth, blob) = growing(&directory);
    let size = 2 * PIECE + 5;
    let content = noise(size, 3);
    file.write_all(&content).unwrap();
    growth.send_replace(Growth::Bytes(size as u64));
    let registry = open(&server, "app");
    let make = async {
        sleep(Duration::from_millis(500)).await;
        growth.send_replace(Growth::Whole(sha256(&content), size as u64));
    };
    let (pushed, ()) = tokio::join!(registry.push_growing(blob, &|_| {}), make);
    assert_eq!(pushed.unwrap(), Pushed::Uploaded((size + PIECE) as u64));
    assert!(server.blob("app", &sha256(&content)).unwrap() == content);
    assert_eq!(server.violations(), Vec::<String>::new());
}

/// A blob that is complete before a request is full is looked up first; a directory stores it once
/// it is complete.
#[tokio::test(flavor = "multi_thread")]
async fn a_small_growing_blob_is_pushed_in_one_request() {
    let server = FakeRegistry::start().unwrap();
    let registry = open(&server, "app");
    let content = noise(1000, 5);
    push(&registry, &content).await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    let layout = format!("oci:{}", directory.path().join("layout").display());
    let layout = match layout.parse().unwrap() {
        lazuli_registry::ImageName::Layout(name) => Layout::open(name),
        lazuli_registry::ImageName::Registry(name) => panic!("{name}"),
    };
    let (mut file, growth, blob) = growing(&directory);
    file.write_all(&content).unwrap();
    growth.send_replace(Growth::Whole(sha256(&content), 1000));
    let pushed = registry.push_growing(blob.clone(), &|_| {}).await.unwrap();
    assert_eq!(pushed, Pushed::Existed);
    let pushed = layout.push_growing(blob, &|_| {}).await.unwrap();
    assert_eq!(pushed, Pushed::Uploaded(1000));
    assert!(layout.has_blob(&sha256(&content)).await.unwrap());
}
