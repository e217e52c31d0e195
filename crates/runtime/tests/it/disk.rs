//! Mounted images whose cache is limited: by a full disk, or by a budget.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use lazuli_runtime::Settings;
use lazuli_testkit::ext4::{self, Ext4};
use tempfile::TempDir;

use crate::{
    fanotify::{EVICTING, Node, able, file, is_eio},
    sample::Sample,
};

const MIB: usize = 1 << 20;

/// A file system of its own for the cache.
fn disk(dir: &TempDir) -> Ext4 {
    let at = dir.path().join("disk");
    fs::create_dir(&at).unwrap();
    Ext4::create(&dir.path().join("disk.image"), 32 << 20, &at).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_full_disk_readers_wait_get_errors_and_go_on_when_there_is_room() {
    if !able() || !ext4::able() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = disk(&dir);
    let filler = disk.fill(2 << 20).unwrap();
    let sample = Sample::new(vec![file("a", 0, 4 * MIB), file("b", 1, 4 * MIB)]);
    let deadline = Duration::from_secs(2);
    let settings = Settings { deadline, ..Settings::default() };
    let node = Node::with_cache(sample, dir, &disk.path().join("cache"), settings);
    let started = Instant::now();
    is_eio(node.read(|at| fs::read(at.join("a"))).await);
    assert!(started.elapsed() >= deadline / 2, "a reader waits before it gets an error");
    // Space is freed while a reader waits.
    let late = {
        let at = node.path("a");
        tokio::task::spawn_blocking(move || fs::read(at))
    };
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!late.is_finished());
    fs::remove_file(filler).unwrap();
    assert!(late.await.unwrap().unwrap() == node.sample.files["a"]);
    node.compare().await;
    for blob in &node.blobs {
        tokio::time::timeout(Duration::from_secs(60), blob.completed()).await.unwrap();
    }
    node.drop_pages().await;
    node.compare().await;
    drop((node, disk));
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_evicts_unread_chunks() {
    if !able() || !ext4::able() {
        return;
    }
    let _alone = EVICTING.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let disk = disk(&dir);
    // Space for one of the files.
    disk.fill(7 << 20).unwrap();
    let sample = Sample::new(vec![file("a", 0, 5 * MIB), file("b", 1, 5 * MIB)]);
    let settings = Settings { grace: Duration::from_millis(300), ..Settings::default() };
    let node = Node::with_cache(sample, dir, &disk.path().join("cache"), settings);
    node.cache.start_evicting();
    for _ in 0..2 {
        node.compare().await;
        node.drop_pages().await;
    }
    assert!(node.cache.evictions().chunks > 0);
    drop((node, disk));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_far_larger_than_the_budget_is_read_and_never_mounted_again() {
    if !able() {
        return;
    }
    let _alone = EVICTING.lock().await;
    let files = (0..24).map(|n| file(&format!("f{n}"), n % 2, 300_000)).collect();
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    let max = 2 * MIB as u64;
    let grace = Duration::from_millis(300);
    let settings = Settings { max_bytes: Some(max), grace, ..Settings::default() };
    let node = Node::with_cache(Sample::new(files), dir, &cache, settings);
    // Complete it first: the kernel then reads the files without events, which must be turned on
    // again before eviction.
    node.compare().await;
    for blob in &node.blobs {
        tokio::time::timeout(Duration::from_secs(60), blob.completed()).await.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    let quiet = node.events();
    node.drop_pages().await;
    node.compare().await;
    assert_eq!(node.events(), quiet);
    node.cache.start_evicting();
    let until = Instant::now() + Duration::from_secs(5);
    let mut turn = 0;
    while Instant::now() < until {
        turn += 1;
        let name = format!("f{}", (turn * 7) % 24);
        let content = node.sample.files[&name].clone();
        let read = move |at: &Path| fs::read(at.join(name)).unwrap() == content;
        assert!(node.read(read).await);
        if turn % 8 == 0 {
            node.drop_pages().await;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let evicted = node.cache.evictions();
    assert!(evicted.chunks > 0 && node.events() > quiet, "{evicted:?}");
    for _ in 0..300 {
        if node.cache.usage().unwrap().1 <= max {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(node.cache.usage().unwrap().1 <= max, "{:?}", node.cache.evictions());
    node.compare().await;
    node.drop_pages().await;
    node.compare().await;
}
