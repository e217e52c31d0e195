//! Readers that are frozen while the kernel asks for them.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use lazuli_runtime::Settings;
use lazuli_testkit::{
    freezer::{Freezer, Version},
    kernel::{Feature, require},
};
use tokio::sync::Semaphore;

use crate::{
    fanotify::{EVICTING, Node, able, file},
    sample::{CHUNK, Mood, Sample},
};

/// Longer than any step here takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Files that are read in turns, so that the cache always exceeds its limit.
const OTHERS: usize = 24;

/// Between two of them. A turn takes more than twice the grace period, or nothing would ever be
/// idle on a quick machine.
const PAUSE: Duration = Duration::from_millis(40);

/// The number of readers that are frozen, one after the other, where a test has a long form.
fn readers() -> u32 {
    if std::env::var_os("LAZULI_SOAK").is_some_and(|value| value == "1") { 30 } else { 1 }
}

/// Leaves the number of readers that got their bytes for `make soak`.
fn report(name: &str) {
    if let Some(results) = std::env::var_os("LAZULI_RESULTS") {
        let figures = format!("{{\"readers\": {}}}\n", readers());
        fs::write(Path::new(&results).join(format!("{name}.json")), figures).unwrap();
    }
}

/// A node with far less room than its image takes.
fn node() -> Node {
    let mut files: Vec<_> = (0..OTHERS).map(|n| file(&format!("f{n}"), 1, 300_000)).collect();
    files.extend([file("frozen", 0, CHUNK), file("never read", 0, CHUNK)]);
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    let grace = Duration::from_millis(300);
    let settings = Settings { max_bytes: Some(2 << 20), grace, ..Settings::default() };
    Node::with_cache(Sample::new(files), dir, &cache, settings)
}

/// Such a node, where a reader of the file `frozen` is frozen before the data
/// arrives. The file has one chunk, of a blob that is never complete.
async fn freeze_a_reader(freezer: &Freezer) -> (Node, Child) {
    let node = node();
    // Readers frozen before are tested separately.
    node.cache.start_evicting();
    read_others_until(&node, "something is evicted", || node.cache.evictions().chunks > 0).await;
    let gate = Arc::new(Semaphore::new(0));
    node.sources[0].set(Mood::Blocked(gate.clone()));
    let reader = Command::new("cat").arg(node.path("frozen")).stdout(Stdio::piped()).spawn();
    let reader = reader.unwrap();
    until("it waits", || node.blobs[0].stats().misses > 0).await;
    freezer.add(reader.id()).unwrap();
    freezer.freeze().unwrap();
    gate.add_permits(1000);
    until("the data is here", || node.blobs[0].stats().chunks_ready == 1).await;
    (node, reader)
}

/// Dropped last-made first: a session ends when no reader is left in its wait, frozen or not.
fn thawed_first(freezer: Freezer) -> Freezer {
    freezer
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < TIMEOUT, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn read_others_until(node: &Node, what: &str, mut done: impl FnMut() -> bool) {
    let (began, mut turn) = (Instant::now(), 0);
    while !done() {
        assert!(began.elapsed() < TIMEOUT, "{what}: {:?}", node.cache.evictions());
        let name = format!("f{}", turn % OTHERS);
        let content = node.sample.files[&name].clone();
        let read = move |at: &Path| fs::read(at.join(name)).unwrap() == content;
        assert!(node.read(read).await);
        turn += 1;
        if turn % OTHERS == 0 {
            node.drop_pages().await;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_cgroup_v1_froze_gets_its_bytes_however_late() {
    if !able() || !require(Feature::Freezer(Version::V1)) {
        return;
    }
    let _alone = EVICTING.lock().await;
    for _ in 0..readers() {
        thaw_late().await;
    }
    report("frozen-v1");
}

async fn thaw_late() {
    let freezer = Freezer::create(Version::V1).unwrap();
    let (node, reader) = freeze_a_reader(&freezer).await;
    let freezer = thawed_first(freezer);
    // The latest request for its chunk is the oldest, and all other chunks are evicted and fetched
    // several times.
    let before = node.cache.evictions().chunks;
    let all = 3 * OTHERS as u64 * 300_000_u64.div_ceil(CHUNK as u64);
    read_others_until(&node, "others go", || node.cache.evictions().chunks > before + all).await;
    assert_eq!(node.blobs[0].stats().chunks_ready, 1, "what it was let through to stays");
    freezer.thaw().unwrap();
    let output = tokio::task::spawn_blocking(|| reader.wait_with_output().unwrap()).await.unwrap();
    assert!(output.stdout == node.sample.files["frozen"], "zeros, or other bytes");
    let is_gone = || node.blobs[0].stats().chunks_ready == 0;
    read_others_until(&node, "no reader needs it any more", is_gone).await;
}

/// A cache opened later must assume that a frozen reader in the wait is its own, let through by an
/// earlier worker.
#[tokio::test(flavor = "multi_thread")]
async fn while_a_reader_is_frozen_since_before_nothing_in_use_goes() {
    if !able() || !require(Feature::Freezer(Version::V1)) {
        return;
    }
    let _alone = EVICTING.lock().await;
    let freezer = Freezer::create(Version::V1).unwrap();
    let (_node, mut reader) = freeze_a_reader(&freezer).await;
    let freezer = thawed_first(freezer);
    let later = node();
    later.cache.start_evicting();
    read_others_until(&later, "there is too much", || later.cache.evictions().is_over).await;
    // Several times the grace period.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(later.cache.evictions().chunks, 0);
    freezer.thaw().unwrap();
    reader.wait().unwrap();
    read_others_until(&later, "chunks go", || later.cache.evictions().chunks > 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_cgroup_v2_froze_has_read_before_it_stopped() {
    if !able() || !require(Feature::Freezer(Version::V2)) {
        return;
    }
    let _alone = EVICTING.lock().await;
    for _ in 0..readers() {
        stop_after_reading().await;
    }
    report("frozen-v2");
}

async fn stop_after_reading() {
    let freezer = Freezer::create(Version::V2).unwrap();
    let (node, reader) = freeze_a_reader(&freezer).await;
    let freezer = thawed_first(freezer);
    until("it stops, on the way back to the program", || freezer.is_frozen().unwrap()).await;
    let is_gone = || node.blobs[0].stats().chunks_ready == 0;
    read_others_until(&node, "its chunk goes", is_gone).await;
    freezer.thaw().unwrap();
    let output = tokio::task::spawn_blocking(|| reader.wait_with_output().unwrap()).await.unwrap();
    assert!(output.stdout == node.sample.files["frozen"], "zeros, or other bytes");
}
