//! Eviction: which chunks go, in which order, and which never do.

use std::{
    io,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::Instant,
};

use lazuli_image::Digest;

use super::*;
use crate::{
    cache::{ExtraFiles, KeepFree},
    sharing::Account,
};

const CHUNK: usize = 64 << 10;

fn limited(max_bytes: u64, grace: Duration) -> Settings {
    Settings { max_bytes: Some(max_bytes), grace, ..settings(0) }
}

/// Waits until `done`, for which there is plenty of time.
async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(60), "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn used(cache: &Cache) -> u64 {
    cache.usage().unwrap().1
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_go_on_far_above_the_budget() {
    let dir = tempfile::tempdir().unwrap();
    let max = 1 << 20;
    let sample = Sample::new(&[CHUNK; 64]);
    let cache = Cache::open(dir.path(), limited(max, Duration::from_millis(200))).unwrap();
    let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
    cache.start_evicting();
    let until_then = Instant::now() + Duration::from_secs(4);
    let readers = [0_usize, 40].into_iter().map(|reader| {
        let (sample, blob) = (sample.clone(), blob.clone());
        tokio::spawn(async move {
            let mut step = reader;
            while Instant::now() < until_then {
                step = (step * 13 + 17) % 64;
                let range = sample.chunks(step..step + 1);
                blob.ensure(range.clone()).await.unwrap();
                assert!(sample.is_right(&blob, &range), "chunk {step}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
    });
    for reader in join_all(readers).await {
        reader.unwrap();
    }
    let evicted = cache.evictions();
    assert!(evicted.chunks > 64, "{evicted:?}");
    until("the budget is kept", || used(&cache) <= max).await;
    assert!(!cache.evictions().is_over);
    blob.ensure(sample.all()).await.unwrap();
    assert!(sample.is_right(&blob, &sample.all()));
}

#[tokio::test(flavor = "multi_thread")]
async fn young_chunks_stay_even_above_the_budget() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::new(&[CHUNK; 64]);
    let cache = Cache::open(dir.path(), limited(1 << 20, Duration::from_secs(3600))).unwrap();
    let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
    cache.start_evicting();
    blob.ensure(sample.all()).await.unwrap();
    cache.enforce().unwrap();
    assert!(cache.evictions().is_over);
    assert_eq!((cache.evictions().chunks, blob.stats().chunks_ready), (0, 64));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_fills_the_cache_evicts_nothing_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path(), limited(2 << 20, Duration::from_millis(200))).unwrap();
    // 512 KiB, a quarter of the budget.
    let small = Sample::new(&[CHUNK; 8]);
    let victim = cache.blob(&small.blob, small.source([])).unwrap();
    let _victims = victim.owned_by(Digest::sha256([1; 32]));
    victim.ensure(small.all()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    cache.start_evicting();
    let large = Sample::new(&[CHUNK + 1; 100]);
    let hog = cache.blob(&large.blob, large.source([])).unwrap();
    let _hogs = hog.owned_by(Digest::sha256([2; 32]));
    for _ in 0..2 {
        for at in 0..100 {
            hog.ensure(large.chunks(at..at + 1)).await.unwrap();
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    until("the budget is kept", || used(&cache) <= 2 << 20).await;
    assert!(cache.evictions().chunks > 50, "{:?}", cache.evictions());
    assert_eq!(victim.stats().chunks_ready, 8);
}

#[tokio::test]
async fn unused_blobs_go_first_the_one_used_longest_ago_first_of_all() {
    let dir = tempfile::tempdir().unwrap();
    // A blob of 256 KiB each.
    let samples: Vec<_> = (1..5).map(|n| Sample::new(&[CHUNK - n; 4])).collect();
    // A task that is going to flush has the blob open, too.
    let flush_after = Duration::from_millis(10);
    let settings = Settings { flush_after, ..limited(700 << 10, Duration::from_secs(3600)) };
    let cache = Cache::open(dir.path(), settings).unwrap();
    let mut paths = Vec::new();
    let mut used_still = None;
    // The first one stays in use.
    for sample in &samples {
        let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
        blob.ensure(sample.all()).await.unwrap();
        blob.completed().await;
        paths.push(blob.path());
        used_still.get_or_insert(blob);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    cache.enforce().unwrap();
    assert_eq!(cache.evictions().blobs, 0, "it is not known yet which blobs are in use");
    cache.start_evicting();
    until("something goes", || cache.evictions().blobs == 2).await;
    cache.enforce().unwrap();
    let there: Vec<_> = paths.iter().map(|path| path.exists()).collect();
    assert_eq!(there, [true, false, false, true]);
    assert!(used(&cache) <= 700 << 10);
    let blob = used_still.unwrap();
    assert!(samples[0].is_right(&blob, &samples[0].all()));
}

/// Other uses of the disk must not evict chunks that readers use.
#[tokio::test]
async fn a_full_disk_evicts_unused_blobs_only() {
    let dir = tempfile::tempdir().unwrap();
    let samples: Vec<_> = (1..3).map(|n| Sample::new(&[CHUNK - n; 4])).collect();
    let times = Settings {
        flush_after: Duration::from_millis(10),
        grace: Duration::from_millis(10),
        ..settings(0)
    };
    // More than the disk has, as far as the cache can know.
    let keep_free = Some(KeepFree::Bytes(u64::MAX));
    let cache = Cache::open(dir.path(), Settings { keep_free, ..times }).unwrap();
    let mut blobs = Vec::new();
    for sample in &samples {
        let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
        blob.ensure(sample.all()).await.unwrap();
        blob.completed().await;
        blobs.push(blob);
    }
    let unused = blobs.remove(0).path();
    cache.enforce().unwrap();
    assert!(unused.exists(), "it is not known yet which blobs are in use");
    cache.start_evicting();
    until("the unused blob goes", || cache.evictions().blobs == 1).await;
    assert!(!unused.exists());
    cache.enforce().unwrap();
    assert_eq!((cache.evictions().chunks, blobs[0].stats().chunks_ready), (0, 4));
    assert!(!cache.has_room_for_the_rest(1));
}

#[tokio::test]
async fn after_a_boot_unused_blobs_go_for_the_budget_and_full_disks_only() {
    let sample = Sample::new(&[CHUNK; 4]);
    let after_boot = Duration::MAX;
    let keep_free = Some(KeepFree::Bytes(u64::MAX));
    let evicts = async |settings: Settings, press: fn(&Cache, Account)| {
        let dir = tempfile::tempdir().unwrap();
        let flush_after = Duration::from_millis(10);
        let cache = Cache::open(dir.path(), Settings { flush_after, ..settings }).unwrap();
        let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
        blob.ensure(sample.all()).await.unwrap();
        blob.completed().await;
        let (account, open) = (blob.account(), Arc::downgrade(&blob));
        drop(blob);
        until("the blob is closed", || open.strong_count() == 0).await;
        cache.start_evicting();
        press(&cache, account);
        cache.evictions().blobs == 1
    };
    let enforce = |cache: &Cache, _: Account| cache.enforce().unwrap();
    assert!(!evicts(Settings { keep_free, after_boot, ..settings(0) }, enforce).await);
    let full = |cache: &Cache, account: Account| cache.make_room(1, account);
    assert!(evicts(Settings { keep_free, after_boot, ..settings(0) }, full).await);
    assert!(evicts(Settings { after_boot, ..limited(1, Duration::ZERO) }, enforce).await);
    assert!(evicts(Settings { keep_free, ..settings(0) }, enforce).await);
}

/// With bytes that would leave a twentieth of the disk free: far from both limits, since other
/// programs use the disk as well.
#[tokio::test]
async fn keep_free_replaces_the_tenth_that_background_work_leaves_free() {
    let dir = tempfile::tempdir().unwrap();
    let disk = rustix::fs::statvfs(dir.path()).unwrap();
    let (all, free) = (disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize);
    // At most a twentieth is left.
    let bytes = free.saturating_sub(all / 20);
    let has_room = |keep_free| {
        let cache = Cache::open(dir.path(), Settings { keep_free, ..settings(0) }).unwrap();
        cache.has_room_for_the_rest(bytes)
    };
    assert!(!has_room(None));
    assert!(has_room(Some(KeepFree::Bytes(0))));
    assert!(!has_room(Some(KeepFree::Bytes(all / 10))));
}

#[tokio::test]
async fn metadata_of_images_counts() {
    let dir = tempfile::tempdir().unwrap();
    let images = dir.path().join("images");
    std::fs::create_dir_all(images.join("one")).unwrap();
    std::fs::write(images.join("one/bootstrap"), [1; 100_000]).unwrap();
    let limits = Settings { metadata: vec![images], ..settings(0) };
    let cache = Cache::open(&dir.path().join("cache"), limits).unwrap();
    let (blobs, bytes) = cache.usage().unwrap();
    assert!(blobs == 0 && bytes >= 100_000, "{bytes}");
}

/// Files in a directory, all of which may go.
#[derive(Debug)]
struct Files(std::path::PathBuf);

impl ExtraFiles for Files {
    fn unused(&self) -> Vec<(std::time::SystemTime, std::path::PathBuf)> {
        let entries = std::fs::read_dir(&self.0).unwrap().flatten();
        entries.map(|it| (it.metadata().unwrap().modified().unwrap(), it.path())).collect()
    }

    fn remove(&self, path: &std::path::Path) -> std::io::Result<u64> {
        let bytes = std::fs::metadata(path)?.len();
        std::fs::remove_file(path).map(|()| bytes)
    }
}

#[tokio::test]
async fn unused_files_beside_the_cache_go_oldest_first() {
    let dir = tempfile::tempdir().unwrap();
    let beside = dir.path().join("beside");
    let kind = beside.join("kind");
    std::fs::create_dir_all(&kind).unwrap();
    let sample = Sample::new(&[CHUNK; 4]);
    let size = 4 * CHUNK as u64;
    for name in ["old", "young"] {
        std::fs::write(kind.join(name), vec![1; size as usize]).unwrap();
    }
    let an_hour_ago = std::time::SystemTime::now() - Duration::from_secs(3600);
    let old = std::fs::File::options().append(true).open(kind.join("old")).unwrap();
    old.set_modified(an_hour_ago).unwrap();
    let limits = Settings { metadata: vec![beside], ..limited(size * 5 / 2, Duration::ZERO) };
    let cache = Cache::open(&dir.path().join("cache"), limits).unwrap();
    cache.evict_extra_files(std::sync::Arc::new(Files(kind.clone())));
    let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
    blob.ensure(sample.all()).await.unwrap();
    blob.completed().await;
    cache.start_evicting();
    until("the old file goes", || !kind.join("old").exists()).await;
    cache.enforce().unwrap();
    assert!(kind.join("young").exists() && sample.is_right(&blob, &sample.all()));
    assert_eq!(cache.evictions().bytes, size);
}

#[tokio::test]
async fn discarded_blobs_go_unless_they_are_open() {
    let dir = tempfile::tempdir().unwrap();
    let samples: Vec<_> = (1..4).map(|n| Sample::new(&[CHUNK - n; 4])).collect();
    let flush_after = Duration::from_millis(10);
    let cache = Cache::open(dir.path(), Settings { flush_after, ..settings(0) }).unwrap();
    let mut blobs = Vec::new();
    for sample in &samples {
        let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
        blob.ensure(sample.all()).await.unwrap();
        blob.completed().await;
        blobs.push(blob);
    }
    let paths: Vec<_> = blobs.iter().map(|blob| blob.path()).collect();
    let in_use = blobs.remove(0);
    drop(blobs);
    let [first, second] = [0, 1].map(|at: usize| samples[at].blob.id);
    until("nothing is flushed any more", || cache.discard(&[second].into())).await;
    assert!(!cache.discard(&[first, second].into()), "one of them is open");
    let there: Vec<_> = paths.iter().map(|path| path.exists()).collect();
    assert_eq!(there, [true, false, true]);
    assert!(samples[0].is_right(&in_use, &samples[0].all()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_complete_blob_is_watched_before_anything_of_it_goes() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::new(&[CHUNK; 64]);
    let cache = Cache::open(dir.path(), limited(1 << 20, Duration::from_millis(200))).unwrap();
    let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
    let (fails, calls) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
    let (failing, called) = (fails.clone(), calls.clone());
    blob.set_guard(
        "test",
        Arc::new(move || {
            called.fetch_add(1, Ordering::SeqCst);
            if failing.load(Ordering::SeqCst) { Err(io::ErrorKind::Other.into()) } else { Ok(()) }
        }),
    );
    blob.ensure(sample.all()).await.unwrap();
    blob.completed().await;
    cache.start_evicting();
    until("it is tried", || calls.load(Ordering::SeqCst) > 3).await;
    assert_eq!((cache.evictions().chunks, blob.stats().chunks_ready), (0, 64));
    fails.store(false, Ordering::SeqCst);
    until("chunks go", || cache.evictions().chunks > 0).await;
    assert!(!blob.is_complete());
    until("the budget is kept", || used(&cache) <= 1 << 20).await;
    blob.ensure(sample.all()).await.unwrap();
    assert!(sample.is_right(&blob, &sample.all()));
}

#[test]
fn the_next_process_knows_what_was_given_up() {
    for boot in ["a", "b"] {
        let dir = tempfile::tempdir().unwrap();
        let sample = Sample::new(&[5000; 40]);
        live(dir.path(), "a", &sample, async |node| {
            node.ensure(0..40).await.unwrap();
            node.blob.completed().await;
            node.blob.rearm(Hold::UntilReleased).unwrap();
            let evicted = node.blob.evict(&[3, 4, 30]).unwrap();
            assert_eq!((evicted.chunks, evicted.bytes), (0, 0), "they were just asked for");
        });
        live(dir.path(), "a", &sample, async |node| {
            node.blob.rearm(Hold::UntilReleased).unwrap();
            tokio::time::sleep(Duration::from_millis(400)).await;
            node.ensure(30..31).await.unwrap();
            let evicted = node.blob.evict(&[3, 4, 30]).unwrap();
            assert_eq!((evicted.chunks, evicted.bytes), (2, 2 * 8192));
            let hole = Sample { file: vec![0; sample.file.len()], ..sample.clone() };
            assert!(hole.is_right(&node.blob, &hole.chunks(3..5)));
        });
        live(dir.path(), boot, &sample, async |node| {
            let stats = node.blob.stats();
            assert_eq!(stats.chunks_ready + stats.chunks_suspect, 38, "boot {boot}");
            node.ensure(0..40).await.unwrap();
            assert_eq!((node.source.reads(), node.blob.stats().chunks_wrong), (1, 0));
        });
    }
}

#[tokio::test]
async fn blob_is_complete_again_after_a_needless_rearm() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::new(&[CHUNK; 4]);
    let cache = Cache::open(dir.path(), limited(1 << 20, Duration::from_secs(3600))).unwrap();
    let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
    blob.ensure(sample.all()).await.unwrap();
    blob.completed().await;
    blob.rearm(Hold::UntilReleased).unwrap();
    assert!(!blob.is_complete());
    blob.flush().unwrap();
    assert!(!blob.is_complete(), "as long as chunks of it may go");
    cache.enforce().unwrap();
    tokio::time::timeout(Duration::from_secs(60), blob.completed()).await.unwrap();
}

/// A blob with everything in it and on the disk, of which chunks may be given up at once.
async fn complete(dir: &Path, sample: &Sample) -> (Arc<Cache>, Arc<CachedBlob>) {
    let cache = Cache::open(dir, Settings { grace: Duration::ZERO, ..settings(0) }).unwrap();
    let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
    blob.ensure(sample.all()).await.unwrap();
    blob.completed().await;
    (cache, blob)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blob_that_is_completed_while_it_is_guarded_is_guarded_again() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::new(&[CHUNK; 4]);
    let (_cache, blob) = complete(dir.path(), &sample).await;
    let calls = Arc::new(AtomicUsize::new(0));
    let (weak, called) = (Arc::downgrade(&blob), calls.clone());
    blob.set_guard(
        "test",
        Arc::new(move || {
            if called.fetch_add(1, Ordering::SeqCst) == 0 {
                // Eviction ends, and a flush calls the blob complete, which takes the mark away.
                let blob = weak.upgrade().unwrap();
                blob.release();
                blob.flush().unwrap();
                assert!(blob.is_complete());
            }
            Ok(())
        }),
    );
    blob.rearm(Hold::UntilReleased).unwrap();
    assert_eq!((calls.load(Ordering::SeqCst), blob.is_complete()), (2, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_goes_of_a_blob_that_is_completed_after_its_chunks_were_chosen() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::new(&[CHUNK; 4]);
    let (_cache, blob) = complete(dir.path(), &sample).await;
    blob.rearm(Hold::UntilReleased).unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let chosen: Vec<_> = blob.idle().into_iter().map(|(_, at)| at).collect();
    assert_eq!(chosen.len(), 4);
    let evicting = {
        // Holds up the eviction.
        let _flights = blob.hold_up_fetches();
        let evicting = {
            let blob = blob.clone();
            std::thread::spawn(move || blob.evict(&chosen).unwrap())
        };
        std::thread::sleep(Duration::from_millis(300));
        blob.release();
        blob.flush().unwrap();
        assert!(blob.is_complete());
        evicting
    };
    assert_eq!(evicting.join().unwrap().chunks, 0);
    assert_eq!(blob.stats().chunks_ready, 4);
}
