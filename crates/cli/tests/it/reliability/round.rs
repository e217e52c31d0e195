//! A node with a cold image under load, on which something happens again and again until nothing is
//! cold.

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use lazuli_testkit::{
    content::Choices,
    reading::{Mode, Readable, Task, now},
};
use serde_json::{Value, json};

use super::{
    image::{ColdImage, LATENCY},
    percentiles,
    processes::{Pids, pids},
    readers::{Readers, Seen},
};
use crate::lazuli::Lazuli;

/// Part of the image that may have been fetched before a round ends: the rest keeps readers
/// missing.
const WARM: f64 = 0.85;
/// How long after a worker's return a read may end that waited for it.
const AFTERMATH: u64 = 100_000;
/// Silence after which a daemon counts as dead.
const GONE: Duration = Duration::from_secs(60);

/// A fresh node with the shared image mounted.
pub(crate) struct Round {
    pub(crate) lazuli: Lazuli,
    pub(crate) mountpoint: PathBuf,
}

/// Something that happened to the daemon while readers ran.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blow {
    /// When, in the time of [`now`].
    pub(crate) at: u64,
    /// When the daemon answered again.
    pub(crate) back: u64,
}

impl Round {
    pub(crate) fn new(driver: &str) -> Self {
        let lazuli = Lazuli::new();
        // A miss fetches no neighbours, so that the image stays cold for longer.
        lazuli.configure("[fetch]\namplify_bytes = 0\n");
        let mountpoint = lazuli.directory("mnt");
        let image = ColdImage::shared();
        image.registry.reset_stats();
        lazuli.ok(["mount", &image.name, mountpoint.to_str().unwrap(), "--driver", driver]);
        Round { lazuli, mountpoint }
    }

    /// Eight readers: four read, two map, two execute.
    pub(crate) fn readers(&self, seed: u64) -> Readers {
        Readers::start(load(&self.mountpoint, seed))
    }

    /// Reads all of the image once, without latency, and returns the results.
    pub(crate) fn read_everything(&self) -> Seen {
        let image = ColdImage::shared();
        image.registry.set_latency(Duration::ZERO);
        let halves = [0, 1].map(|half| {
            let files = image.files_at(&self.mountpoint).into_iter();
            let files = files.enumerate().filter(|(index, _)| index % 2 == half);
            Task { once: true, ..task(Mode::Read, files.map(|(_, file)| file).collect(), 0) }
        });
        let seen = Readers::start(halves).finish();
        image.registry.set_latency(LATENCY);
        seen
    }

    pub(crate) fn pids(&self) -> Pids {
        pids(&self.lazuli.status())
    }

    /// Runs a command that needs a daemon because mounts are left, and so starts one. It has
    /// nothing else to do.
    pub(crate) fn revive(&self) {
        let nothing = self.lazuli.directory("nothing");
        let error = self.lazuli.fails(["umount", nothing.to_str().unwrap()]);
        assert!(error.contains("not mounted"), "{error}");
    }

    /// Asks for the status until `wanted` likes the processes.
    pub(crate) fn wait_for(&self, wanted: impl Fn(Pids) -> bool) -> Pids {
        let began = Instant::now();
        loop {
            let output = self.lazuli.output(["status", "--json"]);
            let status = serde_json::from_slice::<Value>(&output.stdout);
            if let Ok(status) = status
                && wanted(pids(&status))
            {
                return pids(&status);
            }
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(began.elapsed() < GONE, "the daemon is gone: {error}{}", self.lazuli.log());
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns whether so much of the image was fetched that readers seldom miss. The registry
    /// counts that: the daemon counts only checked chunks, starting from zero after each death.
    pub(crate) fn is_warm(&self) -> bool {
        let image = ColdImage::shared();
        image.registry.stats().bytes as f64 > WARM * image.size as f64
    }
}

/// The work of eight readers.
pub(crate) fn load(mountpoint: &Path, seed: u64) -> Vec<Task> {
    use Mode::{Execve, Mmap, Read};
    let image = ColdImage::shared();
    let modes = [Read, Read, Read, Read, Mmap, Mmap, Execve, Execve];
    let tasks = modes.iter().enumerate().map(|(index, mode)| {
        let files = match mode {
            Execve => image.programs_at(mountpoint),
            _ => image.files_at(mountpoint),
        };
        task(*mode, files, seed + index as u64)
    });
    tasks.collect()
}

pub(crate) fn task(mode: Mode, files: Vec<Readable>, seed: u64) -> Task {
    let code = ColdImage::shared().code.clone();
    Task { mode, files, seed, threads: 1, code, once: false }
}

/// A pause of 20 to 150 ms that is another one each time.
pub(crate) fn pause(number: usize) {
    let ms = Choices::new(number as u64).below(131);
    thread::sleep(Duration::from_millis(20 + ms));
}

/// The figures of a test of `blows`.
pub(crate) fn figures(driver: &str, rounds: usize, blows: &[Blow], seen: &Seen) -> Value {
    let programs = |path: &Path| path.to_string_lossy().contains("/program-");
    let stalls = |program: bool| {
        let longest = blows.iter().map(|blow| {
            let hit = seen.waits.iter().filter(|wait| {
                programs(&wait.path) == program
                    && wait.began < blow.back + AFTERMATH
                    && wait.ended > blow.at
            });
            hit.map(|wait| wait.took()).max().unwrap_or_default()
        });
        percentiles(longest.collect())
    };
    let back = blows.iter().map(|blow| Duration::from_micros(blow.back - blow.at));
    json!({
        "driver": driver,
        "blows": blows.len(),
        "rounds": rounds,
        "bytes_checked": seen.bytes,
        "accesses": seen.accesses,
        "wrong_bytes": seen.wrong_bytes(),
        "errors": seen.errors.len(),
        "back_ms": percentiles(back.collect()),
        "longest_read_ms": stalls(false),
        "longest_execve_ms": stalls(true),
    })
}

/// Does `blow` to fresh nodes under load, `count` times in all, and returns the figures when every
/// byte was right and no read failed.
pub(crate) fn under_load(driver: &str, count: usize, mut blow: impl FnMut(&Round)) -> Value {
    let (mut blows, mut seen, mut rounds) = (Vec::new(), Seen::default(), 0);
    while blows.len() < count {
        let round = Round::new(driver);
        let readers = round.readers(blows.len() as u64 * 100);
        rounds += 1;
        loop {
            pause(blows.len());
            let at = now();
            blow(&round);
            blows.push(Blow { at, back: now() });
            if blows.len() == count || round.is_warm() {
                break;
            }
        }
        pause(blows.len());
        seen.add(readers.stop());
        seen.assert_clean();
        round.read_everything().assert_clean();
    }
    figures(driver, rounds, &blows, &seen)
}
