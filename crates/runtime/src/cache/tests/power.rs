//! The cache on a disk that loses power: ext4 on a block device that keeps flushed data, and an
//! arbitrary part of the rest.

use std::{collections::BTreeSet, io::Write as _, path::PathBuf};

use lazuli_testkit::{
    ext4::{self, Ext4},
    powercut::{Disk, History},
};

use super::*;

const DISK: usize = 24 << 20;
const CHUNKS: usize = 300;

/// Random numbers (splitmix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) % sides as u64) as usize
    }
}

/// The state that a node leaves on the disk.
struct Life {
    sample: Sample,
    history: History,
    /// Moments at which a flush had returned, and the chunks that were ready before it began.
    promises: Vec<(usize, BTreeSet<usize>)>,
}

#[derive(Debug, Default)]
struct Figures {
    cuts: usize,
    flushes: usize,
    believed: usize,
    wrong: usize,
    forgotten: usize,
}

fn directory(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    fs::create_dir(&path).unwrap();
    path
}

/// Chunks that a blob's maps speak of.
fn known(blob: &CachedBlob) -> BTreeSet<usize> {
    let is_known = |at: &usize| blob.has(*at);
    (0..CHUNKS).filter(is_known).collect()
}

/// Lets several processes in a row fill a cache, while pages are written back at odd times.
fn live_on(disk: &Disk, at: &Path, dice: &mut Dice) -> Life {
    let sizes: Vec<_> = (0..CHUNKS).map(|_| 1 + dice.roll(20_000)).collect();
    let sample = Sample::new(&sizes);
    Ext4::format(&disk.path(), DISK as u64).unwrap();
    let mounted = Ext4::mount(&disk.path(), at).unwrap();
    disk.forget();
    let mut promises = Vec::new();
    for _ in 0..3 {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let flush_after = Duration::from_millis(20);
            let settings = Settings { flush_after, grace: Duration::ZERO, ..settings(0) };
            let cache = Cache::open_in_boot(&at.join("cache"), settings, "a".into()).unwrap();
            let blob = cache.blob(&sample.blob, sample.source([])).unwrap();
            for _ in 0..40 {
                let first = dice.roll(CHUNKS);
                let end = CHUNKS.min(first + 1 + dice.roll(8));
                match dice.roll(10) {
                    0 => {
                        let ready = known(&blob);
                        blob.flush().unwrap();
                        promises.push((disk.now(), ready));
                    }
                    1 | 2 => blob.forget_pages(),
                    3 => write_back(&at.join("cache/blobs")),
                    4 => {
                        let gone: Vec<_> = (first..end).collect();
                        let mut promise = promises.last().map_or(BTreeSet::new(), last_promise);
                        promise.retain(|chunk| !gone.contains(chunk));
                        promises.push((disk.now(), promise));
                        blob.rearm(Hold::UntilReleased).unwrap();
                        blob.evict(&gone).unwrap();
                    }
                    _ => blob.ensure(sample.chunks(first..end)).await.unwrap(),
                }
            }
        });
    }
    let end = disk.now();
    drop(mounted);
    promises.retain(|(moment, _)| *moment <= end);
    Life { sample, history: disk.history(), promises }
}

fn last_promise(promise: &(usize, BTreeSet<usize>)) -> BTreeSet<usize> {
    promise.1.clone()
}

/// Starts writing the maps back, without waiting and without a flush.
fn write_back(blobs: &Path) {
    for blob in fs::read_dir(blobs).unwrap() {
        for file in fs::read_dir(blob.unwrap().path()).unwrap() {
            let file = fs::File::open(file.unwrap().path()).unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        }
    }
}

/// Opens the cache after a cut: no chunk may be trusted that is not there.
fn look(life: &Life, at: &Path, moment: usize, figures: &mut Figures) {
    live(&at.join("cache"), "b", &life.sample, async |node| {
        let known = known(&node.blob);
        figures.believed += known.len();
        let is_wrong = |chunk: &&usize| {
            !life.sample.is_right(&node.blob, &life.sample.chunks(**chunk..**chunk + 1))
        };
        figures.wrong += known.iter().filter(is_wrong).count();
        let promised = life.promises.iter().rfind(|(promised, _)| *promised <= moment);
        figures.forgotten += promised.map_or(0, |(_, chunks)| chunks.difference(&known).count());
        // And readers get right bytes in any case.
        node.ensure(0..CHUNKS).await.unwrap();
    });
}

#[test]
fn nothing_is_believed_after_a_power_cut_that_is_not_on_the_disk() {
    if !ext4::able() || !require(Feature::Fuse) {
        return;
    }
    let soak = std::env::var_os("LAZULI_SOAK").is_some_and(|value| value == "1");
    let (lives, cuts) = if soak { (60, 60) } else { (2, 20) };
    let dir = tempfile::tempdir().unwrap();
    let [disk_at, at, after] = ["disk", "at", "after"].map(|name| directory(dir.path(), name));
    let mut figures = Figures::default();
    for seed in 1..=lives {
        let mut dice = Dice(seed);
        let life = live_on(&Disk::new(DISK, &disk_at).unwrap(), &at, &mut dice);
        figures.flushes += life.history.flushes();
        for _ in 0..cuts {
            let moment = dice.roll(life.history.len() + 1);
            let share = dice.roll(11);
            let survives = || dice.roll(10) < share;
            // A new file for each cut: a container started meanwhile holds a copy of the mount for
            // a moment, in its own namespace, and the kernel keeps writing to the previous file.
            let image = dir.path().join(format!("image-{}", figures.cuts));
            life.history.cut(moment, survives, &image).unwrap();
            let mounted = Ext4::mount(&image, &after).unwrap();
            look(&life, &after, moment, &mut figures);
            drop(mounted);
            fs::remove_file(&image).unwrap();
            figures.cuts += 1;
        }
    }
    // Not eprintln: the harness captures the output of passing tests.
    let _ = writeln!(std::io::stderr(), "power cuts: {figures:?}");
    if let Some(results) = std::env::var_os("LAZULI_RESULTS") {
        let Figures { cuts, flushes, believed, wrong, forgotten } = figures;
        let figures = serde_json::json!({
            "cuts": cuts, "flushes": flushes, "believed": believed, "wrong": wrong, "forgotten": forgotten,
        });
        fs::write(Path::new(&results).join("power-cuts.json"), format!("{figures:#}\n")).unwrap();
    }
    assert!(figures.believed > 0, "{figures:?}");
    assert_eq!((figures.wrong, figures.forgotten), (0, 0), "{figures:?}");
}

/// The kernel drops pages that it could not write, and reports the error once.
#[test]
fn chunks_of_a_failed_flush_are_fetched_again() {
    if !ext4::able() || !require(Feature::Fuse) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [disk_at, at] = ["disk", "at"].map(|name| directory(dir.path(), name));
    let disk = Disk::new(DISK, &disk_at).unwrap();
    Ext4::format(&disk.path(), DISK as u64).unwrap();
    let mounted = Ext4::mount(&disk.path(), &at).unwrap();
    let sample = Sample::new(&[5000; 20]);
    let goes_on = live(&at.join("cache"), "a", &sample, async |node| {
        node.ensure(0..10).await.unwrap();
        node.blob.flush().unwrap();
        node.ensure(10..19).await.unwrap();
        disk.set_broken(true);
        let flushed = node.blob.flush();
        disk.set_broken(false);
        assert_eq!(flushed.unwrap_err().raw_os_error(), Some(5));
        assert_eq!(node.blob.stats().chunks_ready, 10);
        // If the journal was written in that moment, the file system takes nothing any more.
        if fs::write(at.join("probe"), "").is_err() {
            return false;
        }
        // Readers get right bytes, and the blob becomes complete.
        node.ensure(0..20).await.unwrap();
        node.blob.completed().await;
        true
    });
    drop(mounted);
    if !goes_on {
        return;
    }
    let mounted = Ext4::mount(&disk.path(), &at).unwrap();
    live(&at.join("cache"), "b", &sample, async |node| {
        node.ensure(0..20).await.unwrap();
        assert_eq!(node.source.reads(), 0);
    });
    drop(mounted);
}
