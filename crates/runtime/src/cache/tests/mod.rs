//! The cache and the fetches below it, against sources in memory that misbehave as told.

mod behind;
mod chunk_index;
mod crash;
mod evict;
mod fetch_in_order;
mod power;

use std::{
    fs,
    ops::Range,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use lazuli_image::{Algorithm, BLOCK_SIZE, Blob, Chunk, Codec, Decoded, Stored, codec::Encoder};
use lazuli_testkit::{
    kernel::{Feature, require},
    odd::random,
};
use proptest::prelude::*;
use tempfile::TempDir;

use super::{BytesFrom, Cache, CacheError, CachedBlob, Settings, blob::Hold};
use crate::{
    error::ReadError,
    source::{
        Memory,
        faulty::{Fault, Faulty},
    },
};

/// A blob with everything that is known about it.
#[derive(Clone)]
struct Sample {
    blob: Blob,
    stored: Vec<u8>,
    /// The content of the complete cache file.
    file: Vec<u8>,
}

impl Sample {
    /// A blob of random chunks of these sizes, of which every third is stored compressed with zeros
    /// behind it.
    fn new(sizes: &[usize]) -> Self {
        let (mut stored, mut file, mut chunks) = (Vec::new(), Vec::new(), Vec::new());
        for (number, size) in sizes.iter().enumerate() {
            let mut content = random(number as u64 + 1, *size);
            let mut bytes = content.clone();
            if number % 3 == 2 {
                content[size / 2..].fill(0);
                let mut encoder = Encoder::new(Codec::Zstd, 3).unwrap();
                bytes = encoder.encode(&content).unwrap_or(&content).to_vec();
            }
            chunks.push(Chunk {
                number: number as u32,
                digest: Algorithm::Blake3.digest(&content),
                stored: Stored(stored.len() as u64),
                stored_size: bytes.len() as u32,
                decoded: Decoded(file.len() as u64),
                decoded_size: *size as u32,
                part: None,
            });
            stored.extend(bytes);
            file.extend(content);
            file.resize(file.len().next_multiple_of(BLOCK_SIZE as usize), 0);
        }
        let blob = Blob {
            id: Algorithm::Sha256.digest(&stored),
            codec: Codec::Zstd,
            points: lazuli_image::Points::default(),
            stored_size: stored.len() as u64,
            decoded_size: file.len() as u64,
            chunks: chunks.into(),
        };
        Sample { blob, stored, file }
    }

    fn source(&self, faults: impl IntoIterator<Item = Fault>) -> Arc<Faulty> {
        Arc::new(Faulty::new(Memory::new(self.stored.clone()), faults))
    }

    fn all(&self) -> Range<Decoded> {
        Decoded(0)..Decoded(self.file.len() as u64)
    }

    /// The decoded bytes of some chunks.
    fn chunks(&self, range: Range<usize>) -> Range<Decoded> {
        self.blob.chunks[range.start].decoded..self.blob.chunks[range.end - 1].decoded_end()
    }

    /// Returns whether the cache file has the right bytes in `range`.
    fn is_right(&self, cached: &CachedBlob, range: &Range<Decoded>) -> bool {
        let range = range.start.0 as usize..range.end.0 as usize;
        let mut bytes = vec![0; range.len()];
        cached.file().read_exact_at(&mut bytes, range.start as u64).unwrap();
        bytes == self.file[range]
    }
}

fn settings(amplify: u64) -> Settings {
    // Flushes happen only where a test asks for them.
    let flush_after = Duration::from_secs(3600);
    let (grace, after_boot) = (Duration::from_millis(200), Duration::ZERO);
    Settings { amplify, flush_after, grace, after_boot, ..Settings::default() }
}

/// A cache in a directory of its own with one blob in it.
struct Node {
    sample: Sample,
    source: Arc<Faulty>,
    blob: Arc<CachedBlob>,
    cache: Arc<Cache>,
    /// Removed with the node, if it is its own.
    dir: Option<TempDir>,
}

impl Node {
    fn new(sizes: &[usize], amplify: u64) -> Self {
        let sample = Sample::new(sizes);
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path(), settings(amplify)).unwrap();
        let source = sample.source([]);
        let blob = cache.blob(&sample.blob, source.clone()).unwrap();
        Node { sample, source, blob, cache, dir: Some(dir) }
    }

    async fn ensure(&self, range: Range<usize>) -> Result<(), ReadError> {
        let range = self.sample.chunks(range);
        let result = self.blob.ensure(range.clone()).await;
        if result.is_ok() {
            assert!(self.sample.is_right(&self.blob, &range), "{range:?}");
        }
        result
    }
}

/// Runs `life` in a runtime of its own on a node with the cache in `dir`. At the end everything
/// that is in progress stops wherever it is, as when the process is killed.
fn live<R>(dir: &Path, boot: &str, sample: &Sample, life: impl AsyncFnOnce(&Node) -> R) -> R {
    live_with(settings(0), dir, boot, sample, life)
}

fn live_with<R>(
    settings: Settings,
    dir: &Path,
    boot: &str,
    sample: &Sample,
    life: impl AsyncFnOnce(&Node) -> R,
) -> R {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let open = || Cache::open_in_boot(dir, settings.clone(), boot.to_owned());
        let mut cache = open();
        // Another test's child holds the lock for a moment, between fork and exec.
        for _ in 0..100 {
            if !matches!(cache, Err(CacheError::InUse { .. })) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
            cache = open();
        }
        let cache = cache.unwrap();
        let source = sample.source([]);
        let blob = cache.blob(&sample.blob, source.clone()).unwrap();
        life(&Node { sample: sample.clone(), source, blob, cache, dir: None }).await
    })
}

#[tokio::test]
async fn misses_become_few_requests() {
    let chunk = 16 << 10;
    let sizes = vec![chunk; 96];
    let sample = Sample::new(&sizes);
    // Requested ranges, one after the other, and the resulting number of requests.
    type Case = (&'static str, u64, &'static [(usize, usize)], usize);
    let cases: [Case; 8] = [
        ("one chunk", 0, &[(0, 1)], 1),
        ("many in one", 0, &[(0, 96)], 1),
        ("again", 0, &[(0, 1), (0, 1), (0, 1)], 1),
        ("side by side", 0, &[(0, 1), (1, 2), (2, 3)], 3),
        ("around what is there", 0, &[(4, 5), (0, 10)], 2),
        ("brought along", 1 << 20, &[(0, 1), (1, 2), (50, 60)], 1),
        ("what lies before is not", 1 << 20, &[(95, 96), (40, 41)], 2),
        ("far apart", 64 << 10, &[(0, 1), (48, 49), (2, 3), (50, 51)], 2),
    ];
    for (what, amplify, asked, requests) in cases {
        let node = Node::new(&sizes, amplify);
        for (first, end) in asked {
            node.ensure(*first..*end).await.unwrap();
        }
        assert_eq!(node.source.reads(), requests, "{what}");
        let stats = node.blob.stats();
        assert_eq!(stats.requests, requests as u64, "{what}");
        let sum = |ranges: Vec<Range<Stored>>| ranges.iter().map(|r| r.end.0 - r.start.0).sum();
        let fetched: u64 = sum(node.source.ranges());
        assert_eq!(stats.bytes_fetched, fetched, "{what}");
        assert!(fetched <= sample.blob.stored_size, "{what}: nothing comes twice");
    }
}

#[tokio::test]
async fn sequential_readers_find_readahead() {
    let node = Node::new(&[16 << 10; 96], 64 << 10);
    for first in [0, 4, 8] {
        node.ensure(first..first + 1).await.unwrap();
    }
    // Twelve chunks were requested, so twelve more follow.
    let is_here = |at: usize| node.blob.is_filled(&node.sample.chunks(at..at + 1));
    while !is_here(23) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(!is_here(24));
}

#[tokio::test]
async fn large_needs_are_split() {
    let node = Node::new(&[1 << 20; 12], 0);
    node.ensure(0..12).await.unwrap();
    let ranges = node.source.ranges();
    assert!(ranges.len() >= 3, "{ranges:?}");
    assert!(ranges.iter().all(|range| range.end.0 - range.start.0 <= 4 << 20), "{ranges:?}");
}

#[tokio::test]
async fn a_thousand_readers_need_one_request() {
    let node = Node::new(&[100_000], 0);
    node.source.plan([Fault::Slow(Duration::from_millis(50))]);
    let reads = (0..1000_u64).map(|n| {
        let blob = node.blob.clone();
        tokio::spawn(async move { blob.ensure(Decoded(n)..Decoded(n + 1)).await })
    });
    for read in join_all(reads).await {
        read.unwrap().unwrap();
    }
    assert_eq!(node.source.reads(), 1);
}

#[tokio::test]
async fn abandoned_reads_still_fill_the_cache() {
    let node = Node::new(&[10_000; 4], 0);
    node.source.plan([Fault::Slow(Duration::from_millis(50))]);
    let brief = Duration::from_millis(5);
    tokio::time::timeout(brief, node.ensure(0..4)).await.unwrap_err();
    node.ensure(0..4).await.unwrap();
    assert_eq!(node.source.reads(), 1);
}

#[tokio::test]
async fn wrong_bytes_are_fetched_again_and_never_kept() {
    use Fault::{Final, Flip, None, Short};
    // Faults of two sources, the first asked first; whether the reader gets its bytes.
    let cases: [(&str, &[Fault], &[Fault], bool); 6] = [
        ("flipped once", &[Flip], &[Final; 9], true),
        ("flipped always, the other is good", &[Flip; 9], &[], true),
        ("both flipped always", &[Flip; 9], &[Flip; 9], false),
        ("cut short, the other is good", &[Short; 9], &[None], true),
        ("down, the other is good", &[Final; 9], &[None], true),
        ("both down", &[Final; 9], &[Final; 9], false),
    ];
    for compressed in [false, true] {
        for (what, first, second, good) in cases {
            let node = Node::new(&[50_000; 3], 0);
            let chunk = if compressed { 2 } else { 0 };
            node.source.plan(second.iter().copied());
            let source = node.sample.source(first.iter().copied());
            node.cache.blob(&node.sample.blob, source.clone()).unwrap();
            match node.ensure(chunk..chunk + 1).await {
                Ok(()) => assert!(good, "{what}"),
                Err(error) => {
                    assert!(!good, "{what}: {error}");
                    assert!(error.to_string().contains(&node.sample.blob.id.hex()), "{error}");
                    assert_eq!(node.blob.stats().chunks_ready, 0, "{what}");
                    assert_eq!(node.blob.file().metadata().unwrap().blocks(), 0, "{what}");
                    source.plan([]);
                    node.ensure(0..3).await.unwrap();
                }
            }
        }
    }
}

#[tokio::test]
async fn one_corrupt_chunk_does_not_spoil_its_neighbours() {
    let node = Node::new(&[10_000; 5], 0);
    let mut sample = Sample::new(&[10_000; 5]);
    sample.blob.chunks[3].digest.hash[0] ^= 1;
    let blob = node.cache.blob(&sample.blob, sample.source([])).unwrap();
    match blob.ensure(sample.all()).await.unwrap_err() {
        ReadError::Corrupt { chunk: 3, blob, range, .. } => {
            assert_eq!(blob, sample.blob.id);
            assert_eq!(range, sample.blob.chunks[3].stored..sample.blob.chunks[3].stored_end());
        }
        other => panic!("{other}"),
    }
    // The others may still be in flight when the first error is known.
    for at in [0, 1, 2, 4] {
        blob.ensure(sample.chunks(at..at + 1)).await.unwrap();
        assert!(sample.is_right(&blob, &sample.chunks(at..at + 1)));
    }
    let hole = Sample { file: vec![0; sample.file.len()], ..sample };
    assert!(hole.is_right(&blob, &hole.chunks(3..4)));
}

#[tokio::test]
async fn ranges_outside_are_refused() {
    let node = Node::new(&[10_000; 2], 0);
    let end = node.blob.file_size();
    for (range, good) in
        [(0..0, true), (end..end, true), (0..end, true), (0..end + 1, false), (end..end + 1, false)]
    {
        let result = node.blob.ensure(Decoded(range.start)..Decoded(range.end)).await;
        assert_eq!(result.is_ok(), good, "{range:?}");
    }
    let backwards = node.blob.ensure(Decoded(5)..Decoded(3)).await;
    assert!(matches!(backwards, Err(ReadError::OutOfRange { .. })));
}

#[tokio::test]
async fn images_share_a_blob_only_when_they_agree_about_it() {
    let node = Node::new(&[10_000; 3], 0);
    let same = node.cache.blob(&node.sample.blob, node.sample.source([])).unwrap();
    assert!(Arc::ptr_eq(&node.blob, &same));
    let mut lie = node.sample.blob.clone();
    lie.chunks[0].digest = Algorithm::Blake3.digest(b"lie");
    let other = node.cache.blob(&lie, node.sample.source([])).unwrap();
    assert_ne!(other.path(), node.blob.path());
    other.ensure(node.sample.chunks(0..1)).await.unwrap_err();
    node.ensure(0..1).await.unwrap();
}

#[tokio::test]
async fn the_directory_belongs_to_one_process() {
    let node = Node::new(&[1], 0);
    let second = Cache::open(node.dir.as_ref().unwrap().path(), settings(0));
    assert!(matches!(second, Err(CacheError::InUse { .. })), "{second:?}");
}

#[test]
fn the_next_process_finds_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::new(&[10_000; 200]);
    live(dir.path(), "a", &sample, async |node| node.ensure(50..60).await.unwrap());
    for flush in [true, false] {
        live(dir.path(), "a", &sample, async |node| {
            node.ensure(50..60).await.unwrap();
            assert_eq!(node.source.reads(), 0);
            if flush {
                node.blob.flush().unwrap();
            }
        });
    }
    live(dir.path(), "a", &sample, async |node| {
        node.ensure(0..200).await.unwrap();
        node.blob.completed().await;
    });
    live(dir.path(), "a", &sample, async |node| assert!(node.blob.is_complete()));
    live(dir.path(), "b", &sample, async |node| {
        assert!(!node.blob.is_complete(), "the disk may have been anywhere");
        node.blob.completed().await;
        assert_eq!(node.source.reads(), 0);
    });
}

#[tokio::test]
async fn a_complete_blob_is_flushed_at_once() {
    let node = Node::new(&[10_000; 3], 0);
    node.ensure(0..3).await.unwrap();
    // Long before `flush_after`.
    tokio::time::timeout(Duration::from_secs(60), node.blob.completed()).await.unwrap();
}

#[tokio::test]
async fn a_pulled_blob_is_flushed_once_nobody_waits_for_a_fetch() {
    let (dir, sample) = (tempfile::tempdir().unwrap(), Sample::new(&[10_000; 3]));
    let flush_after = Duration::from_millis(1);
    let cache = Cache::open(dir.path(), Settings { flush_after, ..settings(0) }).unwrap();
    let incoming = cache.incoming().unwrap();
    for chunk in &sample.blob.chunks {
        let content = &sample.file[chunk.decoded.0 as usize..][..chunk.decoded_size as usize];
        incoming.write(chunk.decoded, content).unwrap();
    }
    let (urgent, mut arrived) = (cache.urgent_fetch(), Instant::now());
    let blob = cache.import(incoming, &sample.blob).unwrap();
    for _ in 0..30 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        // On a busy machine: nobody waits for data that has stopped arriving.
        if arrived.elapsed() > Duration::from_secs(1) {
            break;
        }
        assert!(!blob.is_complete());
        urgent.data_arrived();
        arrived = Instant::now();
    }
    drop(urgent);
    tokio::time::timeout(Duration::from_secs(60), blob.completed()).await.unwrap();
    assert!(sample.is_right(&blob, &(Decoded(0)..Decoded(sample.file.len() as u64))));
}

#[test]
fn maps_that_do_not_belong_to_the_data_are_not_believed() {
    type Spoil = fn(&Path);
    let spoil: [(&str, Spoil); 9] = [
        ("data gone", |dir| fs::remove_file(dir.join("data")).unwrap()),
        ("data cut", |dir| {
            fs::File::options().write(true).open(dir.join("data")).unwrap().set_len(5).unwrap()
        }),
        ("data replaced", |dir| {
            let size = fs::metadata(dir.join("data")).unwrap().len();
            fs::rename(dir.join("data"), dir.join("old")).unwrap();
            fs::File::create(dir.join("data")).unwrap().set_len(size).unwrap();
        }),
        ("maps empty", |dir| both(dir, |_| Vec::new())),
        ("maps cut", |dir| both(dir, |bytes| bytes[..bytes.len() - 1].to_vec())),
        ("maps longer", |dir| both(dir, |bytes| [bytes, &[0]].concat())),
        ("other binding", |dir| both(dir, |bytes| flip(bytes, 3))),
        ("maps are zeros", |dir| both(dir, |bytes| vec![0; bytes.len()])),
        ("maps gone", |dir| {
            ["live", "durable"].map(|n| fs::remove_file(dir.join(n)).unwrap()).into_iter().collect()
        }),
    ];
    for (what, spoil) in spoil {
        let dir = tempfile::tempdir().unwrap();
        let sample = Sample::new(&[10_000; 100]);
        let path = live(dir.path(), "a", &sample, async |node| {
            node.ensure(0..90).await.unwrap();
            node.blob.flush().unwrap();
            node.blob.path()
        });
        spoil(path.parent().unwrap());
        live(dir.path(), "a", &sample, async |node| {
            let stats = node.blob.stats();
            assert_eq!((stats.chunks_ready, stats.chunks_suspect), (0, 0), "{what}");
            node.ensure(0..100).await.unwrap();
        });
    }
}

/// Changes both maps in `dir`.
fn both(dir: &Path, change: fn(&[u8]) -> Vec<u8>) {
    for name in ["live", "durable"] {
        let path = dir.join(name);
        fs::write(&path, change(&fs::read(&path).unwrap())).unwrap();
    }
}

fn flip(bytes: &[u8], at: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at] ^= 1;
    bytes
}

#[tokio::test]
async fn full_disk_is_reported_and_marks_no_chunk_ready() {
    if !require(Feature::Root) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let small = SmallDisk::mount(dir.path());
    let sample = Sample::new(&[1 << 20; 4]);
    let settings = Settings { deadline: Duration::from_millis(300), ..settings(0) };
    let cache = Cache::open(dir.path(), settings).unwrap();
    let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
    let mut full = 0;
    for at in 0..4 {
        match blob.ensure(sample.chunks(at..at + 1)).await {
            Ok(()) => assert!(sample.is_right(&blob, &sample.chunks(at..at + 1))),
            Err(ReadError::NoSpace { .. }) => full += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(full > 0);
    assert_eq!(blob.stats().chunks_ready, 4 - full);
    small.grow();
    blob.ensure(sample.all()).await.unwrap();
    assert!(sample.is_right(&blob, &sample.all()));
    drop((blob, cache));
}

/// A tmpfs of 3 MiB.
struct SmallDisk<'a>(&'a Path);

impl<'a> SmallDisk<'a> {
    fn mount(path: &'a Path) -> Self {
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", path, "tmpfs", flags, c"size=3m").unwrap();
        SmallDisk(path)
    }

    fn grow(&self) {
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount_remount(self.0, flags, c"size=30m").unwrap();
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        crate::kernel::mount::detach(self.0).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// For any requests in any order from a source that fails now and then: promised ranges are
    /// present and right, and chunks that are not ready are holes.
    #[test]
    fn promised_ranges_are_right_whatever_the_faults_of_the_source(
        sizes in prop::collection::vec(1_usize..30_000, 1..60),
        amplify in prop::sample::select(vec![0, 10_000, 100_000, 10_000_000]),
        asked in prop::collection::vec((0_f64..1.0, 0_f64..1.0), 1..12),
        faults in prop::collection::vec(0..4_u8, 0..12),
    ) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let node = Node::new(&sizes, amplify);
            let fault = |n| match n {
                0 => Fault::Flip,
                1 => Fault::Final,
                _ => Fault::None,
            };
            node.source.plan(faults.into_iter().map(fault));
            let size = node.blob.file_size();
            for (from, to) in asked {
                let (from, to) = ((from * size as f64) as u64, (to * size as f64) as u64);
                let range = Decoded(from.min(to))..Decoded(from.max(to));
                if node.blob.ensure(range.clone()).await.is_ok() {
                    assert!(node.sample.is_right(&node.blob, &range));
                    assert!(node.blob.is_ready(&range));
                }
            }
            node.source.plan([]);
            while !node.blob.is_idle() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let hole = Sample {
                file: vec![0; node.sample.file.len()],
                blob: node.sample.blob.clone(),
                stored: Vec::new(),
            };
            for chunk in &node.sample.blob.chunks {
                let range = chunk.decoded..chunk.decoded_end();
                let ready = node.blob.is_ready(&range);
                let expected = if ready { &node.sample } else { &hole };
                assert!(expected.is_right(&node.blob, &range), "chunk {}, ready: {ready}", chunk.number);
            }
            node.blob.ensure(node.sample.all()).await.unwrap();
            assert!(node.sample.is_right(&node.blob, &node.sample.all()), "also between chunks");
        });
    }
}
