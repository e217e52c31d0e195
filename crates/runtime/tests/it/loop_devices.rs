//! The driver `loop` on the kernel of this machine, in one process.

use std::{
    fs::{self, File},
    io::Read as _,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use lazuli_runtime::{
    Cache, CachedBlob, Settings,
    keeper::Link,
    kernel::{
        loop_devices::{self, Disk, Session},
        mount::{self, ImageMount, Suid},
    },
};
use lazuli_testkit::kernel::{Feature, require};
use rustix::fs::Advice;
use tempfile::TempDir;
use tokio::{sync::Semaphore, task::spawn_blocking, time::timeout};

use crate::{
    fanotify::{file, is_eio},
    sample::{CHUNK, Mood, Moody, Sample},
};

/// No test waits longer for a reader. Generous, since test machines are busy.
const TIMEOUT: Duration = Duration::from_secs(60);

fn able() -> bool {
    [Feature::Root, Feature::Loop].into_iter().all(require)
}

/// The part of a daemon that serves one image. The mount is dropped first.
struct Node {
    mounted: Option<(Unmount, ImageMount)>,
    disks: Vec<Arc<Disk>>,
    session: Arc<Session>,
    blobs: Vec<Arc<CachedBlob>>,
    sources: Vec<Arc<Moody>>,
    cache: Arc<Cache>,
    sample: Arc<Sample>,
    dir: TempDir,
}

struct Unmount(PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        let _ = mount::detach(&self.0);
    }
}

impl Node {
    /// Everything but the mount.
    async fn unmounted(sample: Sample, settings: Settings) -> Self {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let settings = Settings { amplify: 0, flush_after: Duration::from_millis(100), ..settings };
        let cache = Cache::open(&dir.path().join("cache"), settings).unwrap();
        let source = |bytes: &bytes::Bytes| Moody::new(bytes.clone(), Mood::Good);
        let sources: Vec<_> = sample.stored.iter().map(source).collect();
        let blobs: Vec<_> = sample
            .blobs
            .iter()
            .zip(&sources)
            .map(|(record, source)| cache.blob(&record.blob, source.clone()).unwrap())
            .collect();
        let runtime = tokio::runtime::Handle::current();
        let all = blobs.clone();
        let (session, disks) = spawn_blocking(move || {
            let _runtime = runtime.enter();
            let session = Session::start(&Link::alone()).unwrap();
            let attach = |blob: Arc<CachedBlob>| {
                let disk = session.disk(blob).unwrap();
                disk.attach().unwrap();
                disk
            };
            let disks: Vec<_> = all.into_iter().map(attach).collect();
            (session, disks)
        })
        .await
        .unwrap();
        let sample = Arc::new(sample);
        Node { mounted: None, disks, session, blobs, sources, cache, sample, dir }
    }

    async fn with(sample: Sample, settings: Settings) -> Self {
        let mut node = Self::unmounted(sample, settings).await;
        let bootstrap = node.sample.write_bootstrap(node.dir.path());
        let at = node.at();
        fs::create_dir(&at).unwrap();
        let (session, disks) = (node.session.clone(), node.disks.clone());
        let erofs = spawn_blocking(move || {
            let erofs = loop_devices::mount(&session, &bootstrap, &disks).unwrap();
            erofs.bind(&at, Suid::Keep).unwrap();
            erofs
        });
        node.mounted = Some((Unmount(node.at()), erofs.await.unwrap()));
        node
    }

    fn at(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    /// Runs something that reads, where it may block.
    async fn read<R: Send + 'static>(&self, read: impl FnOnce(&Path) -> R + Send + 'static) -> R {
        let path = self.at();
        timeout(TIMEOUT, spawn_blocking(move || read(&path))).await.expect("in time").unwrap()
    }

    async fn compare(&self) {
        let sample = self.sample.clone();
        self.read(move |path| sample.compare(path)).await;
    }

    /// Makes the kernel read everything again.
    async fn drop_pages(&self) {
        self.read(|path| {
            for entry in fs::read_dir(path).unwrap() {
                let file = File::open(entry.unwrap().path()).unwrap();
                rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
            }
        })
        .await;
    }

    fn requests(&self) -> u64 {
        self.disks.iter().map(|disk| disk.requests()).sum()
    }
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let all = async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(TIMEOUT, all).await.unwrap_or_else(|_| panic!("{what}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_complete_blob_is_handed_over_and_taken_back_before_chunks_of_it_go() {
    if !able() {
        return;
    }
    let settings = Settings {
        max_bytes: Some(1 << 20),
        grace: Duration::from_millis(300),
        ..Settings::default()
    };
    let files = vec![file("a", 0, 3 << 20), file("b", 1, 300_000)];
    let node = Node::with(Sample::new(files), settings).await;
    node.compare().await;
    until("it is handed over", || node.disks.iter().all(|disk| disk.is_handed_over())).await;
    let before = node.requests();
    node.drop_pages().await;
    node.compare().await;
    assert_eq!(node.requests(), before, "the kernel reads the files in the cache");
    node.cache.start_evicting();
    until("chunks go", || node.cache.evictions().chunks > 0).await;
    let is_asked = |disk: &Arc<Disk>| !disk.is_handed_over() && is_direct(disk);
    until("it is taken back", || node.disks.iter().any(is_asked)).await;
    for _ in 0..5 {
        node.drop_pages().await;
        node.compare().await;
        tokio::time::sleep(Duration::from_millis(400)).await;
    }
    assert!(node.requests() > before);
}

/// Returns whether the disk is read past the page cache of its file.
fn is_direct(disk: &Disk) -> bool {
    let path = format!("/sys/block/loop{}/loop/dio", disk.number().unwrap());
    fs::read_to_string(path).unwrap().trim() == "1"
}

#[tokio::test(flavor = "multi_thread")]
async fn a_complete_blob_is_read_through_the_page_cache_until_its_start_is_over() {
    if !able() {
        return;
    }
    let files = vec![file("a", 0, 3 << 20)];
    let node = Node::with(Sample::new(files), Settings::default()).await;
    let is_direct = || is_direct(&node.disks[0]);
    assert!(is_direct());
    node.compare().await;
    until("it is handed over", || node.disks[0].is_handed_over()).await;
    until("it is read through the page cache", || !is_direct()).await;
    until("its start is over", is_direct).await;
    node.drop_pages().await;
    node.compare().await;
}

/// More of them than a loop device has reads under way.
#[tokio::test(flavor = "multi_thread")]
async fn readers_of_a_blob_that_hangs_keep_no_others_waiting() {
    const READERS: usize = 300;
    if !able() {
        return;
    }
    let files = vec![file("slow", 0, READERS * CHUNK), file("fast", 1, 3_000_000)];
    let node = Node::with(Sample::new(files), Settings::default()).await;
    let gate = Arc::new(Semaphore::new(0));
    node.sources[0].set(Mood::Blocked(gate.clone()));
    let readers = (0..READERS).map(|reader| {
        let path = node.at().join("slow");
        spawn_blocking(move || {
            let file = File::open(path).unwrap();
            rustix::fs::fadvise(&file, 0, None, Advice::Random).unwrap();
            let mut bytes = vec![0; 5000];
            file.read_exact_at(&mut bytes, (reader * CHUNK) as u64).unwrap();
            bytes
        })
    });
    let readers: Vec<_> = readers.collect();
    until("they wait", || node.disks[0].requests() >= 100).await;
    let fast = node.read(|path| fs::read(path.join("fast")).unwrap()).await;
    assert!(fast == node.sample.files["fast"]);
    assert!(readers.iter().all(|reader| !reader.is_finished()));
    gate.add_permits(100_000);
    for (reader, task) in readers.into_iter().enumerate() {
        let bytes = timeout(TIMEOUT, task).await.unwrap().unwrap();
        assert!(bytes == node.sample.files["slow"][reader * CHUNK..][..5000], "{reader}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_gets_an_error_and_the_next_one_the_bytes() {
    if !able() {
        return;
    }
    let files = vec![file("a", 0, 300_000), file("b", 1, 300_000)];
    let node = Node::with(Sample::new(files), Settings::default()).await;
    for mood in [Mood::Wrong, Mood::Panic] {
        node.sources[0].set(mood);
        is_eio(node.read(|path| fs::read(path.join("a"))).await);
    }
    let b = node.read(|path| fs::read(path.join("b")).unwrap()).await;
    assert!(b == node.sample.files["b"], "the other blob is not affected");
    node.sources[0].set(Mood::Good);
    node.compare().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_is_not_mounted_fetches_nothing() {
    if !able() {
        return;
    }
    let node = Node::unmounted(Sample::new(vec![file("a", 0, 300_000)]), Settings::default()).await;
    let device = node.disks[0].path().unwrap();
    let read = spawn_blocking(move || {
        let mut byte = [0; 4096];
        File::open(device)?.read_exact(&mut byte)
    });
    is_eio(timeout(TIMEOUT, read).await.unwrap().unwrap());
    assert_eq!(node.blobs[0].stats().requests, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_probe_leaves_nothing_behind() {
    if !able() {
        return;
    }
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let at = dir.path().to_owned();
    let runtime = tokio::runtime::Handle::current();
    let probe = spawn_blocking(move || {
        let _runtime = runtime.enter();
        let session = Session::start(&Link::alone()).unwrap();
        loop_devices::probe::run(&session, &at)
    });
    assert_eq!(timeout(TIMEOUT, probe).await.unwrap().unwrap(), Ok(()));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
