//! The fanotify driver on the kernel of this machine.

use std::{
    fs::{self, File},
    io,
    os::{fd::AsFd as _, unix::fs::FileExt as _},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Duration,
};

use lazuli_image::{Digest, Inode, Kind, Metadata, Name, Tree, tree::Device};
use lazuli_runtime::{
    Account, Cache, CachedBlob, Settings,
    keeper::Link,
    kernel::{
        Probe, fanotify,
        fanotify::{Session, Watch},
        mount::{self, ImageMount, Suid},
    },
};
use lazuli_sys::{
    fanotify::Group,
    mmap::{FinishedFile, Map},
    mountinfo,
};
use lazuli_testkit::{
    kernel::{Feature, require},
    odd::random,
};
use rustix::fs::Advice;
use tempfile::TempDir;
use tokio::{sync::Semaphore, task::spawn_blocking, time::timeout};

use crate::sample::{CHUNK, Mood, Moody, Sample};

/// No test waits longer for a reader. Generous, since test machines are busy.
const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn able() -> bool {
    [Feature::Root, Feature::Fanotify, Feature::ErofsFileBacked].into_iter().all(require)
}

/// The image's digest.
const IMAGE: Digest = Digest::sha256([7; 32]);

/// Held by tests that evict: a frozen reader of one test would block evictions of others.
pub(crate) static EVICTING: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// A daemon's worth of one image.
pub(crate) struct Node {
    pub(crate) sample: Arc<Sample>,
    pub(crate) cache: Arc<Cache>,
    pub(crate) sources: Vec<Arc<Moody>>,
    pub(crate) blobs: Vec<Arc<CachedBlob>>,
    watches: Vec<Watch>,
    session: Arc<Session>,
    erofs: Option<ImageMount>,
    at: PathBuf,
    dir: TempDir,
}

impl Node {
    fn new(sample: Sample) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("cache");
        Self::with_cache(sample, dir, &cache, Settings::default())
    }

    /// The same with the cache elsewhere, and settings of its own; those for time and amplification
    /// are the tests'.
    pub(crate) fn with_cache(
        sample: Sample,
        dir: TempDir,
        cache: &Path,
        settings: Settings,
    ) -> Self {
        let settings = Settings { amplify: 0, flush_after: Duration::from_secs(1), ..settings };
        let cache = Cache::open(cache, settings).unwrap();
        let source = |bytes: &bytes::Bytes| Moody::new(bytes.clone(), Mood::Good);
        let sources: Vec<_> = sample.stored.iter().map(source).collect();
        let blob = |(record, source): (&lazuli_image::rafs::BlobRecord, &Arc<Moody>)| {
            cache.blob(&record.blob, source.clone()).unwrap()
        };
        let blobs: Vec<_> = sample.blobs.iter().zip(&sources).map(blob).collect();
        let session = Session::start(&Link::alone()).unwrap();
        drop(session.listen(Vec::new()).unwrap());
        let watch = |blob: &Arc<CachedBlob>| session.watch(blob.clone(), IMAGE).unwrap();
        let mut watches: Vec<_> = blobs.iter().map(watch).collect();
        let bootstrap = sample.write_bootstrap(dir.path());
        let at = dir.path().join("image");
        fs::create_dir(&at).unwrap();
        let erofs = fanotify::mount(&bootstrap, &mut watches).unwrap();
        erofs.bind(&at, Suid::Keep).unwrap();
        Node {
            sample: Arc::new(sample),
            cache,
            sources,
            blobs,
            watches,
            session,
            erofs: Some(erofs),
            at,
            dir,
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.at.join(name)
    }

    /// Runs something that reads, where it may block.
    pub(crate) async fn read<R: Send + 'static>(
        &self,
        read: impl FnOnce(&Path) -> R + Send + 'static,
    ) -> R {
        let path = self.at.clone();
        timeout(TIMEOUT, spawn_blocking(move || read(&path))).await.expect("in time").unwrap()
    }

    pub(crate) async fn compare(&self) {
        let sample = self.sample.clone();
        self.read(move |path| sample.compare(path)).await;
    }

    pub(crate) async fn drop_pages(&self) {
        self.read(|path| {
            for entry in fs::read_dir(path).unwrap() {
                let file = File::open(entry.unwrap().path()).unwrap();
                rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
            }
        })
        .await;
    }

    pub(crate) fn events(&self) -> u64 {
        self.watches.iter().map(Watch::events).sum()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Fails where a test has unmounted.
        let _ = mount::detach(&self.at);
    }
}

pub(crate) fn file(name: &str, blob: usize, size: usize) -> (String, usize, Vec<u8>) {
    let seed = name.bytes().fold(1, |seed, byte| seed * 31 + u64::from(byte));
    (name.to_owned(), blob, random(seed, size))
}

fn several() -> Sample {
    let sizes = [0, 1, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 10 * CHUNK + 17, 3_000_000];
    let files = sizes.iter().enumerate().map(|(n, size)| file(&format!("file {n}"), n % 3, *size));
    Sample::new(files.collect())
}

pub(crate) fn is_eio<T: std::fmt::Debug>(result: io::Result<T>) {
    assert_eq!(result.unwrap_err().raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_byte_comes_through_and_then_the_kernel_is_alone() {
    if !able() {
        return;
    }
    let node = Node::new(several());
    assert_eq!(node.blobs.iter().map(|blob| blob.stats().chunks_ready).sum::<u64>(), 0);
    node.compare().await;
    assert!(node.events() > 0);
    for blob in &node.blobs {
        timeout(TIMEOUT, blob.completed()).await.unwrap();
    }
    // A task removes the mark, a moment after the blob is complete.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let before = node.events();
    node.drop_pages().await;
    node.compare().await;
    assert_eq!(node.events(), before, "a complete blob raises no events");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_waits_and_others_go_on() {
    if !able() {
        return;
    }
    let node = Node::new(Sample::new(vec![file("slow", 0, 100_000), file("fast", 1, 100_000)]));
    let gate = Arc::new(Semaphore::new(0));
    node.sources[0].set(Mood::Blocked(gate.clone()));
    let path = node.path("slow");
    let slow = spawn_blocking(move || fs::read(path).unwrap());
    let fast = node.path("fast");
    assert!(node.read(move |_| fs::read(fast).unwrap()).await == node.sample.files["fast"]);
    assert!(!slow.is_finished());
    gate.add_permits(1000);
    assert!(timeout(TIMEOUT, slow).await.unwrap().unwrap() == node.sample.files["slow"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_gets_an_error_and_the_next_one_the_bytes() {
    if !able() {
        return;
    }
    let node = Node::new(Sample::new(vec![file("a", 0, 300_000), file("b", 1, 300_000)]));
    for mood in [Mood::Wrong, Mood::Panic] {
        node.sources[0].set(mood);
        is_eio(node.read(|path| fs::read(path.join("a"))).await);
    }
    assert_eq!(node.blobs[0].stats().chunks_ready, 0);
    let b = node.read(|path| fs::read(path.join("b")).unwrap()).await;
    assert!(b == node.sample.files["b"], "the other blob is not affected");
    node.sources[0].set(Mood::Good);
    node.compare().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_of_a_hundred_blobs_reads_as_written() {
    if !able() {
        return;
    }
    let node =
        Node::new(Sample::new((0..100).map(|n| file(&format!("f{n}"), n, 5000 + n)).collect()));
    node.compare().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_readers_get_right_bytes_and_fetch_each_chunk_once() {
    if !able() {
        return;
    }
    let size = 4_000_000;
    let node = Node::new(Sample::new(vec![file("shared", 0, size)]));
    let readers = (0..16_u64).map(|reader| {
        let (path, sample) = (node.path("shared"), node.sample.clone());
        spawn_blocking(move || {
            let file = File::open(path).unwrap();
            let content = &sample.files["shared"];
            for step in 0..100 {
                let at = ((reader * 7919 + step * 104_729) * 4099) as usize % (size - 10_000);
                let mut bytes = vec![0; 10_000];
                file.read_exact_at(&mut bytes, at as u64).unwrap();
                assert!(bytes == content[at..at + 10_000], "at {at}");
            }
        })
    });
    let all = futures_util::future::join_all(readers);
    for result in timeout(TIMEOUT, all).await.unwrap() {
        result.unwrap();
    }
    let stats = node.blobs[0].stats();
    assert!(stats.requests <= stats.chunks_total, "every chunk at most once: {stats:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_are_mapped_and_run() {
    if !able() {
        return;
    }
    let program = fs::read("/bin/echo").unwrap();
    let node = Node::new(Sample::new(vec![("echo".into(), 0, program)]));
    let output =
        node.read(|path| Command::new(path.join("echo")).arg("here").output().unwrap()).await;
    assert_eq!(output.stdout, b"here\n");
    let node = Node::new(several());
    let sample = node.sample.clone();
    let equal = |path: &Path| {
        let map = |name| Map::of(FinishedFile::open(&path.join(name)).unwrap()).unwrap();
        sample.files.iter().all(|(name, content)| *map(name) == **content)
    };
    let (path, equal) = (node.at.clone(), equal);
    assert!(tokio::task::block_in_place(|| equal(&path)));
}

#[tokio::test(flavor = "multi_thread")]
async fn device_nodes_are_dead_here_and_live_in_an_overlay() {
    if !able() {
        return;
    }
    let sample = Sample::with(vec![file("f", 0, 10)], |tree| {
        let kind = Kind::CharDevice(Device { major: 1, minor: 5 });
        let metadata = Metadata { permissions: 0o666, ..Metadata::default() };
        let zero = tree.add(Inode { metadata, kind });
        tree.children_mut(Tree::ROOT).unwrap().insert(Name::new(b"zero").unwrap(), zero);
    });
    let node = Node::new(sample);
    let opened = File::open(node.path("zero"));
    assert_eq!(opened.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    let [upper, work, merged] = ["upper", "work", "merged"].map(|name| {
        let path = node.dir.path().join(name);
        fs::create_dir(&path).unwrap();
        path
    });
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        node.at.display(),
        upper.display(),
        work.display()
    );
    let options = std::ffi::CString::new(options).unwrap();
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("overlay", &merged, "overlay", flags, &*options).unwrap();
    let opened = File::open(merged.join("zero"));
    mount::detach(&merged).unwrap();
    opened.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_file_is_served_after_a_lazy_unmount() {
    if !able() {
        return;
    }
    let mut node = Node::new(Sample::new(vec![file("f", 0, 500_000)]));
    let user = node.dir.path().join("user");
    fs::create_dir(&user).unwrap();
    let erofs = node.erofs.take().unwrap();
    let backing = erofs.backing().clone();
    erofs.bind(&user, Suid::Keep).unwrap();
    let mounts = mountinfo::list().unwrap();
    assert!(mounts.iter().any(|mount| mount.target == user && mount.kind == "erofs"));
    drop(erofs);
    let open = File::open(user.join("f")).unwrap();
    let busy = mount::unmount(&user).unwrap_err();
    assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy);
    mount::detach(&user).unwrap();
    mount::detach(&node.at).unwrap();
    assert!(backing.is_alive());
    let read = move |_: &Path| {
        let mut content = vec![0; 500_000];
        open.read_exact_at(&mut content, 0).map(|()| content)
    };
    assert!(node.read(read).await.unwrap() == node.sample.files["f"]);
    for _ in 0..600 {
        if !backing.is_alive() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("the file system outlives its last file");
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_that_are_left_behind_get_errors_not_zeros() {
    if !able() {
        return;
    }
    let mut node = Node::new(Sample::new(vec![file("f", 0, 500_000)]));
    let path = node.path("f");
    let open = File::open(path).unwrap();
    let mut first = vec![0; 4096];
    let open = node
        .read(move |_| {
            open.read_exact_at(&mut first, 0).unwrap();
            open
        })
        .await;
    for watch in std::mem::take(&mut node.watches) {
        watch.cut_off();
    }
    let mut byte = [0; 4096];
    is_eio(node.read(move |_| open.read_exact_at(&mut byte, 400_000 / 4096 * 4096)).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_daemon_takes_over_and_zeros_are_forgotten() {
    if !able() {
        return;
    }
    let mut node = Node::new(Sample::new(vec![file("f", 0, 500_000)]));
    // The end of a daemon, as the kernel sees it: its group closes.
    node.watches.clear();
    node.session = Session::start(&Link::alone()).unwrap();
    drop(node.session.listen(Vec::new()).unwrap());
    let zeros = node.read(|path| fs::read(path.join("f")).unwrap()).await;
    assert!(zeros != node.sample.files["f"], "or there is nothing to forget");
    let watch = |blob: &Arc<CachedBlob>| node.session.watch(blob.clone(), IMAGE).unwrap();
    node.watches = node.blobs.iter().map(watch).collect();
    let backing = node.erofs.take().unwrap().backing().clone();
    node.drop_pages().await;
    node.erofs = Some(ImageMount::adopt(&node.at, backing).unwrap());
    node.watches.iter_mut().for_each(Watch::mounted);
    node.compare().await;
}

#[test]
fn the_probe_says_what_works_and_why_not() {
    if !able() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(Probe::run(dir.path()).fanotify, Ok(()));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "it leaves nothing behind");
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", dir.path(), "tmpfs", flags, None).unwrap();
    let probe = Probe::run(dir.path());
    mount::detach(dir.path()).unwrap();
    assert!(probe.fanotify.unwrap_err().contains("file system"));
}

/// Inodes that a fanotify group has marks on.
fn marks(group: &impl std::os::fd::AsRawFd) -> usize {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", group.as_raw_fd())).unwrap();
    info.lines().filter(|line| line.starts_with("fanotify ino:")).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_an_earlier_version_marked_in_its_one_group_get_that_of_their_image() {
    if !able() {
        return;
    }
    let mut node = Node::new(Sample::new(vec![file("a", 0, 300_000), file("b", 1, 300_000)]));
    let before = Group::new().unwrap();
    node.blobs.iter().for_each(|blob| before.mark(blob.file().as_fd()).unwrap());
    let group = before.as_fd().try_clone_to_owned().unwrap();
    assert_eq!(marks(&group), 2);
    let journal = fanotify::Journal::create().unwrap();
    let copy = group.try_clone().unwrap();
    let handover =
        fanotify::Handover { group: copy, groups: Vec::new(), journal, unanswered: Vec::new() };
    let (session, left) = Session::resume(&Link::alone(), handover).unwrap();
    node.watches.clear();
    let watch = |blob: &Arc<CachedBlob>| session.watch(blob.clone(), IMAGE).unwrap();
    node.watches = node.blobs.iter().map(watch).collect();
    node.watches.iter_mut().for_each(Watch::mounted);
    drop(session.listen(left).unwrap());
    node.session = session;
    assert_eq!(marks(&group), 0);
    node.compare().await;
    assert!(node.events() > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_a_second_image_has_is_in_the_group_of_neither() {
    if !able() {
        return;
    }
    let node = Node::new(Sample::new(vec![file("a", 0, 300_000), file("b", 1, 300_000)]));
    assert!(matches!(node.blobs[0].account(), Account::Image(_)));
    let gate = Arc::new(Semaphore::new(0));
    node.sources[0].set(Mood::Blocked(gate.clone()));
    let path = node.path("a");
    let waits = spawn_blocking(move || fs::read(path).unwrap());
    while node.events() == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let other = Digest::sha256([8; 32]);
    let second = node.session.watch(node.blobs[0].clone(), other).unwrap();
    assert!(matches!(node.blobs[0].account(), Account::Shared(_)));
    assert!(matches!(node.blobs[1].account(), Account::Image(_)));
    // A reader that waited since before is answered in the group in which it asked, others in the
    // new one.
    gate.add_permits(1000);
    assert!(timeout(TIMEOUT, waits).await.unwrap().unwrap() == node.sample.files["a"]);
    node.compare().await;
    drop(second);
    assert!(matches!(node.blobs[0].account(), Account::Image(_)));
    node.drop_pages().await;
    node.compare().await;
}
