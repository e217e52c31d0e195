//! Chunks that two blobs have: the second one takes them from the first, and believes nothing.

use super::*;

/// Three chunks, and the same three with a fourth one.
const OLD: [usize; 3] = [64 << 10, 5000, 64 << 10];
const NEW: [usize; 4] = [64 << 10, 5000, 64 << 10, 9000];

/// A cache that had the whole old version, which is not in use any more, and where that is.
async fn unused() -> (Arc<Cache>, std::path::PathBuf, TempDir) {
    let (sample, dir) = (Sample::new(&OLD), tempfile::tempdir().unwrap());
    let flush_after = Duration::from_millis(1);
    let cache = Cache::open(dir.path(), Settings { flush_after, ..settings(0) }).unwrap();
    let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
    blob.ensure(sample.all()).await.unwrap();
    let path = blob.path();
    drop(blob);
    while !cache.in_use().is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    (cache, path, dir)
}

/// Opens the new version beside the old one in `node`'s cache and reads all of it.
async fn read_new(cache: &Cache) -> (Sample, Arc<CachedBlob>) {
    let sample = Sample::new(&NEW);
    let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
    blob.ensure(sample.all()).await.unwrap();
    assert!(sample.is_right(&blob, &sample.all()));
    (sample, blob)
}

/// How many chunks `blob` was given and how many bytes it has fetched.
fn copied_and_fetched(blob: &CachedBlob) -> (u64, u64) {
    (blob.stats().bytes_copied, blob.stats().bytes_fetched)
}

fn all_of_old() -> u64 {
    OLD.iter().sum::<usize>() as u64
}

#[tokio::test]
async fn chunk_of_another_blob_is_copied_not_fetched() {
    let node = Node::new(&OLD, 0);
    node.ensure(0..3).await.unwrap();
    let (sample, blob) = read_new(&node.cache).await;
    let fourth = u64::from(sample.blob.chunks[3].stored_size);
    assert_eq!(copied_and_fetched(&blob), (all_of_old(), fourth));
}

#[tokio::test]
async fn chunk_of_another_blob_is_copied_by_a_prefetch_too() {
    let node = Node::new(&OLD, 0);
    node.ensure(0..2).await.unwrap();
    let sample = Sample::new(&NEW);
    let blob = node.cache.blob(&sample.blob, sample.source([])).unwrap();
    for (_, request) in blob.prefetch(&[0, 1, 2, 3], u64::MAX, BytesFrom::Request) {
        request.await.unwrap().unwrap();
    }
    assert!(blob.missing().is_empty());
    let fetched = sample.blob.chunks[2..].iter().map(|chunk| u64::from(chunk.stored_size)).sum();
    assert_eq!(copied_and_fetched(&blob), ((OLD[0] + OLD[1]) as u64, fetched));
}

#[tokio::test]
async fn unused_blob_still_provides_chunks() {
    let (cache, _, _dir) = unused().await;
    let (_, blob) = read_new(&cache).await;
    assert_eq!(blob.stats().bytes_copied, all_of_old());
}

#[test]
fn next_process_knows_the_chunk_index() {
    for (is_told, copied) in [(true, all_of_old()), (false, 0)] {
        let dir = tempfile::tempdir().unwrap();
        let old = Sample::new(&OLD);
        live(dir.path(), "a", &old, async |node: &Node| node.ensure(0..3).await.unwrap());
        let empty = Sample::new(&[100]);
        live(dir.path(), "a", &empty, async |node: &Node| {
            if is_told {
                node.cache.remember(&old.blob).unwrap();
            }
            let (_, blob) = read_new(&node.cache).await;
            assert_eq!(blob.stats().bytes_copied, copied);
        });
    }
}

#[tokio::test]
async fn damaged_copy_is_fetched_instead() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 3] = [
        ("changed", |path| {
            let file = fs::File::options().write(true).open(path).unwrap();
            file.write_all_at(b"not what it was", 64 << 10).unwrap();
        }),
        ("cut", |path| fs::File::options().write(true).open(path).unwrap().set_len(100).unwrap()),
        ("removed", |path| fs::remove_file(path).unwrap()),
    ];
    for (what, damage) in damages {
        let (cache, path, _dir) = unused().await;
        damage(&path);
        let (_, blob) = read_new(&cache).await;
        assert!(blob.stats().bytes_copied < all_of_old(), "{what}");
        assert!(blob.stats().bytes_fetched > 9000, "{what}");
    }
}

#[tokio::test]
async fn evicted_chunk_is_not_offered_any_more() {
    let node = Node::new(&OLD, 0);
    node.ensure(0..2).await.unwrap();
    tokio::time::sleep(node.cache.settings.grace * 3).await;
    assert_eq!(node.blob.evict(&[0]).unwrap().chunks, 1);
    let (_, blob) = read_new(&node.cache).await;
    assert_eq!(blob.stats().bytes_copied, OLD[1] as u64);
}
