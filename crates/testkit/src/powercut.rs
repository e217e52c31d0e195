//! A disk whose power can be cut at any moment.
//!
//! ```text
//! file system under test ─▶ loop device ─▶ file on FUSE ─▶ log of writes and flushes, in memory
//!                                                               └─ cut ─▶ image of what survived
//! ```
//!
//! The file is opened past the page cache, so every request of the block layer arrives, in order,
//! and a flush (`REQ_FLUSH`) as an fsync. What came before the last flush survives a cut; of what
//! came after it, any part may: a real disk writes its cache back as it likes.

use std::{
    ffi::CStr,
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

use fuse_backend_rs::{
    abi::fuse_abi::{Attr, OpenOptions, stat64},
    api::{
        filesystem::{Context, Entry, FileSystem, ROOT_ID, ZeroCopyReader, ZeroCopyWriter},
        server::Server,
    },
    transport::FuseSession,
};
use rustix::io::Errno;

/// The disk's atomic unit: a block of the file system, as on today's disks.
const BLOCK: usize = 4096;

/// The one file.
const DISK: u64 = 2;
const NAME: &str = "disk";

/// Something that reached the disk.
#[derive(Clone, Debug)]
enum DiskRequest {
    Write { offset: u64, bytes: Vec<u8> },
    Flush,
}

#[derive(Debug)]
struct State {
    content: Vec<u8>,
    /// The content of the disk when the log began.
    base: Vec<u8>,
    log: Vec<DiskRequest>,
    /// Whether writes fail.
    is_broken: bool,
}

/// The disk, as a file that a loop device can use. Whatever uses it has to be gone before it is
/// dropped.
pub struct Disk {
    state: Arc<Mutex<State>>,
    session: FuseSession,
    thread: Option<JoinHandle<()>>,
}

/// Everything that happened to a disk since the last [`Disk::forget`].
#[derive(Debug)]
pub struct History {
    base: Vec<u8>,
    log: Vec<DiskRequest>,
}

impl Disk {
    /// A disk of `size` bytes of zeros, seen in the empty directory `at`.
    pub fn new(size: usize, at: &Path) -> io::Result<Self> {
        let state = State {
            content: vec![0; size],
            base: vec![0; size],
            log: Vec::new(),
            is_broken: false,
        };
        let state = Arc::new(Mutex::new(state));
        let broken = |error| io::Error::other(format!("{error}"));
        let mut session = FuseSession::new(at, "disk", "lazuli-test", false).map_err(broken)?;
        session.mount().map_err(broken)?;
        let mut channel = session.new_channel().map_err(broken)?;
        let server = Server::new(OneFile(state.clone()));
        let serve = move || {
            while let Ok(Some((reader, writer))) = channel.get_request() {
                // Fails when the reader is gone.
                let _ = server.handle_message(reader, writer.into(), None, None);
            }
        };
        let thread = thread::Builder::new().name("disk".into()).spawn(serve)?;
        Ok(Disk { state, session, thread: Some(thread) })
    }

    /// The disk, as a file.
    pub fn path(&self) -> PathBuf {
        self.session.mountpoint().join(NAME)
    }

    /// Restarts the log from the present content of the disk.
    pub fn forget(&self) {
        let mut state = lock(&self.state);
        state.base = state.content.clone();
        state.log.clear();
    }

    /// Makes every write fail with EIO from now on, or lets writes succeed again.
    pub fn set_broken(&self, is_broken: bool) {
        lock(&self.state).is_broken = is_broken;
    }

    /// The number of requests so far.
    pub fn now(&self) -> usize {
        lock(&self.state).log.len()
    }

    /// The requests so far, with the content before them.
    pub fn history(&self) -> History {
        let state = lock(&self.state);
        History { base: state.base.clone(), log: state.log.clone() }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let unmounted = self.session.umount();
        let _ = self.session.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        assert!(unmounted.is_ok() || thread::panicking(), "the disk is in use");
    }
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Disk").field("now", &self.now()).finish_non_exhaustive()
    }
}

impl History {
    /// Moments at which the power can be cut: 0 to this number.
    pub fn len(&self) -> usize {
        self.log.len()
    }

    /// Returns whether there were no requests.
    pub fn is_empty(&self) -> bool {
        self.log.is_empty()
    }

    /// The number of flushes.
    pub fn flushes(&self) -> usize {
        self.log.iter().filter(|request| matches!(request, DiskRequest::Flush)).count()
    }

    /// Writes the disk to `image` as after a power cut at `moment`. Of the blocks not flushed by
    /// then, those survive that `survives` selects.
    pub fn cut(
        &self,
        moment: usize,
        mut survives: impl FnMut() -> bool,
        image: &Path,
    ) -> io::Result<()> {
        let log = &self.log[..moment];
        let flushed = log.iter().rposition(|request| matches!(request, DiskRequest::Flush));
        let mut content = self.base.clone();
        for (at, request) in log.iter().enumerate() {
            let DiskRequest::Write { offset, bytes } = request else { continue };
            for (block, bytes) in bytes.chunks(BLOCK).enumerate() {
                if flushed.is_some_and(|flushed| at < flushed) || survives() {
                    let start = *offset as usize + block * BLOCK;
                    content[start..start + bytes.len()].copy_from_slice(bytes);
                }
            }
        }
        File::create(image)?.write_all_at(&content, 0)
    }
}

/// A directory with one file.
struct OneFile(Arc<Mutex<State>>);

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl OneFile {
    fn attributes(&self, inode: u64) -> stat64 {
        let size = lock(&self.0).content.len() as u64;
        let (mode, size) = if inode == DISK { (0o100_600, size) } else { (0o040_700, 0) };
        let blksize = BLOCK as u32;
        Attr { ino: inode, size, blocks: size / 512, mode, nlink: 1, blksize, ..Attr::default() }
            .into()
    }
}

impl FileSystem for OneFile {
    type Inode = u64;
    type Handle = u64;

    fn lookup(&self, _: &Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        if parent != ROOT_ID || name.to_bytes() != NAME.as_bytes() {
            return Err(Errno::NOENT.into());
        }
        Ok(Entry {
            inode: DISK,
            generation: 0,
            attr: self.attributes(DISK),
            attr_flags: 0,
            attr_timeout: Duration::from_secs(3600),
            entry_timeout: Duration::from_secs(3600),
        })
    }

    fn getattr(&self, _: &Context, inode: u64, _: Option<u64>) -> io::Result<(stat64, Duration)> {
        Ok((self.attributes(inode), Duration::from_secs(3600)))
    }

    fn open(
        &self,
        _: &Context,
        _: u64,
        _: u32,
        _: u32,
    ) -> io::Result<(Option<u64>, OpenOptions, Option<u32>)> {
        Ok((None, OpenOptions::DIRECT_IO, None))
    }

    fn read(
        &self,
        _: &Context,
        _: u64,
        _: u64,
        to: &mut dyn ZeroCopyWriter,
        size: u32,
        offset: u64,
        _: Option<u64>,
        _: u32,
    ) -> io::Result<usize> {
        let state = lock(&self.0);
        let end = state.content.len().min((offset + u64::from(size)) as usize);
        let bytes = &state.content[(offset as usize).min(end)..end];
        to.write_all(bytes)?;
        Ok(bytes.len())
    }

    fn write(
        &self,
        _: &Context,
        _: u64,
        _: u64,
        from: &mut dyn ZeroCopyReader,
        size: u32,
        offset: u64,
        _: Option<u64>,
        _: bool,
        _: u32,
        _: u32,
    ) -> io::Result<usize> {
        let mut bytes = vec![0; size as usize];
        from.read_exact(&mut bytes)?;
        let mut state = lock(&self.0);
        if state.is_broken {
            return Err(Errno::IO.into());
        }
        let start = offset as usize;
        let place = state.content.get_mut(start..start + bytes.len()).ok_or(Errno::NOSPC)?;
        place.copy_from_slice(&bytes);
        state.log.push(DiskRequest::Write { offset, bytes });
        Ok(size as usize)
    }

    fn fsync(&self, _: &Context, _: u64, _: bool, _: u64) -> io::Result<()> {
        lock(&self.0).log.push(DiskRequest::Flush);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ext4::{self, Ext4},
        kernel::{Feature, require},
    };

    /// fsync reaches the disk as a flush: synced data survives every later cut, other data is lost
    /// in some.
    #[test]
    fn synced_bytes_survive_every_power_cut() {
        if !ext4::able() || !require(Feature::Fuse) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let [disk_at, at, after] = ["disk", "at", "after"].map(|name| {
            let path = dir.path().join(name);
            std::fs::create_dir(&path).unwrap();
            path
        });
        let disk = Disk::new(16 << 20, &disk_at).unwrap();
        Ext4::format(&disk.path(), 16 << 20).unwrap();
        let mounted = Ext4::mount(&disk.path(), &at).unwrap();
        disk.forget();
        let file = File::create(at.join("synced")).unwrap();
        file.write_all_at(&[7; 100_000], 0).unwrap();
        file.sync_all().unwrap();
        let synced = disk.now();
        std::fs::write(at.join("not synced"), [7; 100_000]).unwrap();
        drop(file);
        let now = disk.now();
        drop(mounted);
        let history = disk.history();
        assert!(history.flushes() > 0, "flushes arrive");
        for (moment, survive) in [(synced, false), (now, false), (history.len(), true)] {
            let image = dir.path().join("image");
            history.cut(moment, || survive, &image).unwrap();
            let mounted = Ext4::mount(&image, &after).unwrap();
            assert_eq!(std::fs::read(after.join("synced")).unwrap(), [7; 100_000], "{moment}");
            let other = std::fs::read(after.join("not synced")).is_ok_and(|b| b == [7; 100_000]);
            assert_eq!(other, survive, "{moment}");
            drop(mounted);
        }
    }
}
