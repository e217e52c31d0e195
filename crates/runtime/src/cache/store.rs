//! The files of one blob in the cache, and what they promise after a crash.
//!
//! ```text
//! <blob id>-<layout digest>/
//!   data     decoded bytes at the addresses that the kernel uses; sparse
//!   durable  chunks whose bytes are known to be on the disk
//!   live     chunks whose bytes are known to be in `data` as long as this kernel runs
//! ```
//!
//! `durable` is replaced as a whole, after an fdatasync of `data`, and ends with a checksum. `live`
//! gets a word written after each chunk and is never synced: it survives the process. When the
//! kernel goes down, it can reach the disk before the chunks that it lists, so it counts only under
//! the same boot. Both begin with a binding to the layout and to one particular file `data`.
//! `durable` may also have a seal, the times of `data` when its chunks were known to be right: as
//! long as the seal fits, the file was not touched. docs/cache.md has the whole argument.

use std::{
    collections::HashMap,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, SystemTime},
};

use lazuli_image::{Algorithm, Digest};
use lazuli_sys::path_error::At as _;

use super::{Cache, CacheError, layout::Layout, ready::word_count};
use crate::sync::lock;

const DATA: &str = "data";
const DURABLE: &str = "durable";
const DURABLE_NEW: &str = "durable.new";
const LIVE: &str = "live";

/// Bytes of a binding, of a seal, and of the checksum.
const HASH: usize = 32;

/// Data files that are open already, by device and inode, see [`super::Cache::give`].
pub(crate) type Given = Mutex<HashMap<(u64, u64), File>>;
/// A seal that no file fits.
const UNSEALED: [u8; HASH] = [0; HASH];

/// Kernels before 6.13 count file times in ticks of 1 to 10 ms: two changes within one look like
/// one.
pub(crate) const TICK: Duration = Duration::from_millis(20);

/// See the module.
#[derive(Debug)]
pub(crate) struct Store {
    dir: PathBuf,
    data: File,
    /// Absent when the disk had no room for it.
    live: Option<File>,
    boot: String,
    binding: [u8; HASH],
}

/// The identity of a file, and the time when any process last changed it, as the kernel keeps it.
/// Reading leaves it alone; the file's owner cannot set it back (`st_ctime`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Times {
    /// Seconds and nanoseconds since 1970.
    changed: (i64, i64),
    modified: (i64, i64),
    device: u64,
}

impl Times {
    fn of(metadata: &fs::Metadata) -> Self {
        Times {
            changed: (metadata.ctime(), metadata.ctime_nsec()),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            device: metadata.dev(),
        }
    }

    /// Returns whether the next change is certain to get other times, on every kernel.
    pub(crate) fn are_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (seconds, nanoseconds) = self.changed;
        let changed = i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
        (now.as_nanos() as i128 - changed).unsigned_abs() > TICK.as_nanos()
    }
}

/// The bindings at the start of one data file's maps.
struct Bindings {
    durable: [u8; HASH],
    live: [u8; HASH],
}

impl Bindings {
    fn new(layout: &Layout, data: &fs::Metadata, boot: &str) -> Self {
        Bindings {
            durable: bind("durable", layout.digest(), data, ""),
            live: bind("live", layout.digest(), data, boot),
        }
    }
}

/// The chunks found in a blob's directory, as words of [`super::ready::ReadyMap`].
#[derive(Debug)]
pub(crate) struct Found {
    /// Chunks whose bytes are on the disk.
    pub(crate) durable: Vec<u64>,
    /// Chunks whose bytes are in the data file at present; includes `durable`.
    pub(crate) known: Vec<u64>,
    /// Whether the file was not touched since all of `durable` was known to be right.
    pub(crate) sealed: bool,
    /// Times of the data file.
    pub(crate) times: Times,
}

impl Found {
    fn read(
        dir: &Path,
        layout: &Layout,
        data: &fs::Metadata,
        bindings: &Bindings,
        boot: &str,
    ) -> Self {
        let words = word_count(layout.chunks().len());
        let times = Times::of(data);
        let (mut durable, mut sealed) = (vec![0; words], false);
        let found = read_map(&dir.join(DURABLE), HASH + words * 8 + HASH);
        if let Some(found) = found.filter(|bytes| is_durable(bytes, &bindings.durable)) {
            durable = decode(&found[2 * HASH..found.len() - HASH]);
            sealed = found[HASH..2 * HASH] == seal(&bindings.durable, boot, &times);
        }
        let mut known = durable.clone();
        let live =
            read_map(&dir.join(LIVE), words * 8).filter(|bytes| bytes[..HASH] == bindings.live);
        if let Some(bytes) = live {
            for (word, live) in known.iter_mut().zip(decode(&bytes[HASH..])) {
                *word |= live;
            }
        }
        Found { durable, known, sealed, times }
    }
}

impl Store {
    /// Opens the files of `layout` in `dir`, or makes them.
    pub(crate) fn open(
        dir: PathBuf,
        layout: &Layout,
        cache: &Cache,
    ) -> Result<(Self, Found), CacheError> {
        let boot = &cache.boot;
        let data = match open_data(&dir.join(DATA), layout.file_size(), &cache.given) {
            Ok(Some(data)) => data,
            Ok(None) => create_data(&dir, layout.file_size()).at(&dir)?,
            Err(source) => return Err(CacheError::Io { path: dir.join(DATA), source }),
        };
        let metadata = data.metadata().at(dir.join(DATA))?;
        let bindings = Bindings::new(layout, &metadata, boot);
        let found = Found::read(&dir, layout, &metadata, &bindings, boot);
        let live = create_live(&dir.join(LIVE), &bindings.live, &found.known).at(dir.join(LIVE))?;
        let binding = bindings.durable;
        Ok((Store { dir, data, live, boot: boot.clone(), binding }, found))
    }

    /// Reads the maps of `layout` in `dir`, which must not be open. Returns the chunks that they
    /// list.
    pub(crate) fn peek(dir: &Path, layout: &Layout, boot: &str) -> Option<Vec<u64>> {
        let metadata = fs::symlink_metadata(dir.join(DATA)).ok()?;
        let bindings = Bindings::new(layout, &metadata, boot);
        Some(Found::read(dir, layout, &metadata, &bindings, boot).known)
    }

    /// Reads from the data file in `dir`, which is not open and thus not marked.
    pub(crate) fn open_closed(dir: &Path) -> io::Result<File> {
        private().read(true).open(dir.join(DATA))
    }

    /// The name of the blob's directory.
    pub(crate) fn key(&self) -> &str {
        self.dir.file_name().and_then(|name| name.to_str()).unwrap_or_default()
    }

    /// The decoded bytes. Opened for reading and writing, before it could have been marked as a
    /// file.
    pub(crate) fn data(&self) -> &File {
        &self.data
    }

    /// The path of the decoded bytes of a blob with the directory `dir`.
    pub(super) fn data_in(dir: &Path) -> PathBuf {
        dir.join(DATA)
    }

    pub(crate) fn data_path(&self) -> PathBuf {
        self.dir.join(DATA)
    }

    /// Notes one word of the ready map for the case that this process dies. The caller makes sure
    /// that calls do not overtake each other. The file has all its blocks, so this does not fail
    /// for space.
    pub(crate) fn note(&self, word: usize, bits: u64) -> io::Result<()> {
        let Some(live) = &self.live else { return Ok(()) };
        live.write_all_at(&bits.to_le_bytes(), (HASH + word * 8) as u64)
    }

    /// When the data file was changed, by this process or by others.
    pub(crate) fn times(&self) -> io::Result<Times> {
        self.data.metadata().map(|metadata| Times::of(&metadata))
    }

    /// Waits until everything that was written to the data file is on the disk.
    pub(crate) fn sync_data(&self) -> io::Result<()> {
        self.data.sync_data()
    }

    /// Makes `words` the chunks that are believed after a power cut. [`Store::sync_data`] has to
    /// have returned since the last of their bytes was written. With `sealed`, the next process
    /// believes them without reading them back if these are still the file's times.
    pub(crate) fn save_durable(&self, words: &[u64], sealed: Option<&Times>) -> io::Result<()> {
        let mut bytes = self.binding.to_vec();
        let seal = sealed.map_or(UNSEALED, |times| seal(&self.binding, &self.boot, times));
        bytes.extend(seal);
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        let checksum = Algorithm::Blake3.digest(&bytes);
        bytes.extend(checksum.hash);
        let path = self.dir.join(DURABLE_NEW);
        let mut file = private().write(true).create(true).truncate(true).open(&path)?;
        file.write_all(&bytes)?;
        file.sync_data()?;
        fs::rename(&path, self.dir.join(DURABLE))?;
        sync_dir(&self.dir)?;
        // So that the directory itself is found.
        self.dir.parent().map_or(Ok(()), sync_dir)
    }
}

impl Store {
    /// Leaves nothing that is believed after a power cut.
    pub(crate) fn remove_durable(&self) -> io::Result<()> {
        remove(&self.dir.join(DURABLE))?;
        sync_dir(&self.dir)
    }

    /// Notes that the blob is in use until now, for eviction.
    pub(crate) fn note_use(&self) {
        let now = fs::FileTimes::new().set_modified(SystemTime::now());
        if let Some(Err(error)) = self.live.as_ref().map(|live| live.set_times(now)) {
            tracing::debug!(dir = %self.dir.display(), %error, "cannot note when a blob was used");
        }
    }

    /// When a blob was in use last, by its directory.
    pub(crate) fn last_use(dir: &Path) -> io::Result<SystemTime> {
        let metadata = fs::metadata(dir.join(LIVE)).or_else(|_| fs::metadata(dir))?;
        metadata.modified()
    }
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// The data file of an earlier time, when it is one.
fn open_data(path: &Path, size: u64, given: &Given) -> io::Result<Option<File>> {
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        metadata => metadata?,
    };
    if !metadata.is_file() || metadata.len() != size {
        return Ok(None);
    }
    let mut given = lock(given);
    match given.remove(&(metadata.dev(), metadata.ino())) {
        Some(file) => Ok(Some(file)),
        None => private().read(true).write(true).open(path).map(Some),
    }
}

/// Makes an empty data file. Old maps are gone from the disk before it exists, because a file
/// system may give its inode number to the new one.
fn create_data(dir: &Path, size: u64) -> io::Result<File> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let mut removed = false;
    for name in [DURABLE, LIVE, DATA] {
        removed |= remove(&dir.join(name))?;
    }
    // Without old files there is nothing to sync, and a start need not wait.
    if removed {
        sync_dir(dir)?;
    }
    let data = private().read(true).write(true).create_new(true).open(dir.join(DATA))?;
    data.set_len(size)?;
    Ok(data)
}

/// Replaces the map of an earlier process by the current one. `None` when the disk is full: the old
/// map is removed all the same, since it would claim chunks that are evicted later.
fn create_live(path: &Path, binding: &[u8; HASH], words: &[u64]) -> io::Result<Option<File>> {
    let new = path.with_extension("new");
    let mut bytes = binding.to_vec();
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    let create = || {
        let mut file = private().write(true).create(true).truncate(true).open(&new)?;
        file.write_all(&bytes)?;
        fs::rename(&new, path)?;
        Ok(file)
    };
    match create() {
        Err(error) if is_full(&error) => {
            tracing::warn!(path = %path.display(), %error, "a crash will cost fetching chunks again");
            remove(path)?;
            Ok(None)
        }
        result => result.map(Some),
    }
}

/// Returns whether the disk, or this user's quota, is full.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Removes a file that may be gone already; whether it was there.
fn remove(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        removed => Ok(removed.is_ok()),
    }
}

/// The binding at the start of a map. A map with another binding belongs to another file.
fn bind(kind: &str, layout: &Digest, data: &fs::Metadata, boot: &str) -> [u8; HASH] {
    let mut hasher = Algorithm::Blake3.hasher();
    hasher.update(format!("lazuli ready map 3 {kind}\n{boot}\n").as_bytes());
    hasher.update(&layout.hash);
    // Not the device: disks get other numbers when the machine starts again.
    for number in [data.ino(), data.len()] {
        hasher.update(&number.to_le_bytes());
    }
    hasher.finish().hash
}

/// The seal proves that the data file was not touched since it had these times. Under another boot
/// it never fits: the disk may have been elsewhere meanwhile, and clocks can be set.
fn seal(binding: &[u8; HASH], boot: &str, times: &Times) -> [u8; HASH] {
    let mut hasher = Algorithm::Blake3.hasher();
    hasher.update(format!("lazuli seal\n{boot}\n").as_bytes());
    hasher.update(binding);
    hasher.update(&times.device.to_le_bytes());
    for (seconds, nanoseconds) in [times.changed, times.modified] {
        hasher.update(&seconds.to_le_bytes());
        hasher.update(&nanoseconds.to_le_bytes());
    }
    hasher.finish().hash
}

/// Reads a map of exactly `rest` bytes after the binding; anything else is as good as no map.
fn read_map(path: &Path, rest: usize) -> Option<Vec<u8>> {
    let expected = HASH + rest;
    let mut bytes = Vec::with_capacity(expected + 1);
    File::open(path).ok()?.take(expected as u64 + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() == expected).then_some(bytes)
}

fn is_durable(bytes: &[u8], binding: &[u8; HASH]) -> bool {
    let (content, checksum) = bytes.split_at(bytes.len() - HASH);
    content[..HASH] == *binding && Algorithm::Blake3.digest(content).hash == checksum
}

fn decode(bytes: &[u8]) -> Vec<u64> {
    let (words, _) = bytes.as_chunks();
    words.iter().map(|word| u64::from_le_bytes(*word)).collect()
}
