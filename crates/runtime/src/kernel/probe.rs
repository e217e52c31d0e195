//! Which driver works on this machine, found out by trying.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::fs::FileExt as _,
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};

use lazuli_image::{
    Algorithm, BLOCK_SIZE, Blob, BlobIndex, Chunk, ChunkRef, Codec, Decoded, FormatError, Inode,
    Kind, Metadata, Name, Stored, Tree,
    rafs::{BlobRecord, BootstrapOptions, blob_tail, write_bootstrap},
};
use lazuli_sys::fanotify::{Group, Response};
use rustix::{
    fs::{Mode, OFlags, openat},
    io::Errno,
};

use super::{mount, release::Release};

/// How long the trial waits for an event that does not come.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// What the trial file holds when it has been filled.
pub(super) const CONTENT: &[u8] = b"lazuli";

/// Which drivers work here; for those that do not, why, in words.
#[derive(Clone, Debug)]
pub struct Probe {
    /// The fanotify driver, with a cache in the directory that was probed.
    pub fanotify: Result<(), String>,
    /// Direct reads with the fanotify driver, see [`mount::Erofs::read_directly`].
    pub direct_reads: Result<(), String>,
    /// The FUSE driver.
    pub fuse: Result<(), String>,
}

impl Probe {
    /// Tries both, the first one with a small image in `cache`, which is made when it does not
    /// exist. Blocks for some milliseconds.
    pub fn run(cache: &Path) -> Self {
        let release = Release::of_this_machine();
        let fanotify = release.buffered_reads().and_then(|()| fanotify(cache));
        Probe { fanotify, direct_reads: release.direct_reads(), fuse: fuse() }
    }

    /// For a process whose predecessor has left a fanotify group: that driver works.
    pub fn of_successor() -> Self {
        let direct_reads = Release::of_this_machine().direct_reads();
        Probe { fanotify: Ok(()), direct_reads, fuse: fuse() }
    }
}

fn fuse() -> Result<(), String> {
    match File::options().read(true).write(true).open("/dev/fuse") {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("/dev/fuse does not open: {error}")),
    }
}

fn fanotify(cache: &Path) -> Result<(), String> {
    let group = Group::new().map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => "it needs CAP_SYS_ADMIN".to_owned(),
        _ => format!("the kernel refuses a pre-content group: {error}"),
    })?;
    let in_cache = |error: io::Error| format!("{}: {error}", cache.display());
    let dir = cache.join(format!("probe-{}", std::process::id()));
    fs::create_dir_all(&dir).map_err(in_cache)?;
    let result = try_image(&group, &dir, cache);
    fs::remove_dir_all(&dir).map_err(in_cache)?;
    result
}

/// Reads a hole through an EROFS mount, and fills it when the kernel asks.
fn try_image(group: &Group, dir: &Path, cache: &Path) -> Result<(), String> {
    let failed = |error: io::Error| format!("{}: {error}", cache.display());
    let bootstrap = dir.join("image.boot");
    fs::write(&bootstrap, TinyImage::new()?.bootstrap).map_err(failed)?;
    let blob = File::options().read(true).write(true).create_new(true).open(dir.join("data"));
    let blob = blob.map_err(failed)?;
    blob.set_len(BLOCK_SIZE).map_err(failed)?;
    group.mark(blob.as_fd()).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::INVAL) => "the kernel has no pre-content events (Linux 6.14)".to_owned(),
        Some(Errno::OPNOTSUPP) => {
            format!("the file system of {} has no pre-content events", cache.display())
        }
        _ => format!("pre-content events are refused on {}: {error}", cache.display()),
    })?;
    let (mount, _) = mount::create(&bootstrap, &[blob.as_fd()]).map_err(|error| {
        format!("the kernel does not mount EROFS from files (Linux 6.12): {}", error.source)
    })?;
    let reader = thread::spawn(move || read(&mount));
    let answered = answer(group, &blob);
    let content = reader.join().map_err(|_| "the trial read panicked".to_owned())?;
    answered?;
    match content {
        Ok(content) if content == CONTENT => Ok(()),
        Ok(_) => Err("EROFS does not wait for pre-content events (Linux 6.15)".to_owned()),
        Err(error) => Err(format!("reading through EROFS fails: {error}")),
    }
}

fn read(mount: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    let file = openat(mount, c"file", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    File::from(file).read_to_end(&mut content)?;
    Ok(content)
}

/// Waits for the first event, fills the file, and lets all readers go.
fn answer(group: &Group, blob: &File) -> Result<(), String> {
    let failed = |error: io::Error| format!("answering a pre-content event fails: {error}");
    let start = Instant::now();
    let mut answers = 0;
    while answers == 0 && start.elapsed() < PROBE_TIMEOUT {
        while let Some(event) = group.read().map_err(failed)? {
            let Some(file) = event.file else { continue };
            blob.write_all_at(CONTENT, 0).map_err(failed)?;
            group.respond(file.as_raw_fd(), Response::Allow).map_err(failed)?;
            answers += 1;
        }
        thread::sleep(Duration::from_micros(200));
    }
    // What is asked from here on finds the file filled.
    group.unmark(blob.as_fd()).map_err(failed)?;
    while let Some(event) = group.read().map_err(failed)? {
        let Some(file) = event.file else { continue };
        group.respond(file.as_raw_fd(), Response::Allow).map_err(failed)?;
    }
    Ok(())
}

/// An image with one file, `file`, that consists of one chunk. Its blob begins with [`CONTENT`].
pub(super) struct TinyImage {
    pub(super) blob: Blob,
    pub(super) bootstrap: Vec<u8>,
}

impl TinyImage {
    pub(super) fn new() -> Result<Self, String> {
        Self::make().map_err(|error| error.to_string())
    }

    fn make() -> Result<Self, FormatError> {
        let chunk = Chunk {
            number: 0,
            digest: Algorithm::Blake3.digest(CONTENT),
            stored: Stored(0),
            stored_size: CONTENT.len() as u32,
            decoded: Decoded(0),
            decoded_size: CONTENT.len() as u32,
            part: None,
        };
        let mut hasher = Algorithm::Sha256.hasher();
        hasher.update(CONTENT);
        let tail = blob_tail(&[chunk], hasher, Codec::Zstd)?;
        let blob = Blob {
            id: tail.id,
            codec: Codec::Zstd,
            points: lazuli_image::Points::default(),
            stored_size: tail.stored_size,
            decoded_size: tail.decoded_size,
            chunks: vec![chunk].into(),
        };
        let mut tree = Tree::new(Metadata { permissions: 0o755, ..Metadata::default() });
        let chunks = vec![ChunkRef { blob: BlobIndex(0), number: 0 }];
        let kind = Kind::Regular { size: CONTENT.len() as u64, chunks };
        let file = tree.add(Inode { metadata: Metadata::default(), kind });
        if let (Some(root), Ok(name)) = (tree.children_mut(Tree::ROOT), Name::new(b"file")) {
            root.insert(name, file);
        }
        let records = [BlobRecord { blob: blob.clone(), tail: tail.info }];
        let bootstrap = write_bootstrap(&tree, &records, &BootstrapOptions::default())?;
        Ok(TinyImage { blob, bootstrap })
    }
}
