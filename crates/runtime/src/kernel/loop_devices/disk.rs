//! One blob as a disk: a loop device on its file in this driver's file system or, once it is
//! complete, in the cache.

use std::{
    collections::HashMap,
    fmt, io,
    ops::Range,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use lazuli_image::{Algorithm, Decoded};
use lazuli_sys::loop_device::LoopDevice;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, makedev, open, statx};
use tokio::{runtime::Handle, task::AbortHandle};

use super::helper::{BLOCK, Helper};
use crate::{cache::CachedBlob, keeper::Link, kernel::pages, sync::lock};

/// Node numbers below are the kernel's own.
const FIRST_NODE: u64 = 16;

/// A blob that mounts use. The device is free when the last of them, and this, are gone.
pub struct Disk {
    pub(super) blob: Arc<CachedBlob>,
    pub(super) identity: Identity,
    shared: Arc<Shared>,
    /// Locked while the backing file is changed.
    device: Mutex<Option<LoopDevice>>,
    /// Whether to fetch missing data. False until the blob is mounted: programs that probe each new
    /// disk would cause fetches of its beginning and end.
    pub(super) fetches: AtomicBool,
    pub(super) requests: AtomicU64,
    completion: Mutex<Option<AbortHandle>>,
}

/// The backing file of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BackingFile {
    /// The blob's file in the file system of this driver.
    Session,
    /// The file in the cache.
    Cache,
    /// A file of a session that is gone: every read fails.
    Nothing,
}

/// How a blob is known to the kernel. Follows from where its file is, so that a later process finds
/// it again.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    /// The number of its node.
    pub(super) node: u64,
    /// The name of its file.
    pub(super) name: String,
    /// The label of its loop device.
    pub(super) label: String,
}

impl Identity {
    fn of(blob: &CachedBlob) -> Self {
        let path = blob.path();
        let directory = path.parent().and_then(|parent| parent.file_name()).unwrap_or_default();
        let hash = Algorithm::Blake3.digest(path.as_os_str().as_encoded_bytes()).hex();
        let node = u64::from_str_radix(&hash[..16], 16).unwrap_or_default().max(FIRST_NODE);
        Identity {
            node,
            // The kernel remembers the node of a name, and blobs of two caches may have one
            // directory name.
            name: format!("{}-{node:x}", directory.to_string_lossy()),
            label: format!("lazuli-blob-{}", &hash[..32]),
        }
    }
}

impl Disk {
    pub(super) fn new(blob: Arc<CachedBlob>, shared: Arc<Shared>) -> Self {
        Disk {
            identity: Identity::of(&blob),
            blob,
            shared,
            device: Mutex::default(),
            fetches: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            completion: Mutex::default(),
        }
    }

    /// Attaches a loop device unless there is one. Blocks.
    pub fn attach(self: &Arc<Self>) -> io::Result<()> {
        let mut attached = self.lock();
        if attached.is_some() {
            return Ok(());
        }
        let Identity { name, label, .. } = &self.identity;
        *attached = Some(match self.blob.is_complete() {
            true => {
                let device = LoopDevice::attach(self.cached()?.as_fd(), label, BLOCK)?;
                self.read_from_memory(&device);
                device
            }
            false => self.shared.helper.attach(self.shared.root()?, name, label)?,
        });
        drop(attached);
        self.watch();
        Ok(())
    }

    /// Takes over the loop device that an earlier process attached. The helper of that process must
    /// be gone. Blocks.
    ///
    /// # Errors
    /// The device of this number is none of this blob.
    pub fn adopt(self: &Arc<Self>, number: u32) -> io::Result<()> {
        let device = LoopDevice::open(number)?;
        let backing = device.backing()?;
        if backing.label != self.identity.label.as_bytes() {
            let label = backing.label.escape_ascii();
            return Err(io::Error::other(format!(
                "/dev/loop{number} is {label}, expected {}",
                self.identity.label
            )));
        }
        self.fetches.store(true, Ordering::Release);
        *self.lock() = Some(device);
        // Chunks of a blob that is not known to be complete may be given up.
        if !self.blob.is_complete() {
            self.ask_again()?;
        }
        self.watch();
        Ok(())
    }

    /// From now on missing data is fetched: the blob is mounted.
    pub fn mounted(&self) {
        self.fetches.store(true, Ordering::Release);
    }

    /// The number of its loop device.
    pub fn number(&self) -> Option<u32> {
        self.lock().as_ref().map(LoopDevice::number)
    }

    /// The path of its loop device.
    pub fn path(&self) -> Option<PathBuf> {
        self.lock().as_ref().map(LoopDevice::path)
    }

    /// Reads that the kernel has asked for.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Returns whether the kernel reads the file in the cache by itself.
    pub fn is_handed_over(&self) -> bool {
        let device = self.lock();
        device
            .as_ref()
            .is_some_and(|device| self.behind(device).is_ok_and(|b| b == BackingFile::Cache))
    }

    /// The blob.
    pub fn blob(&self) -> &Arc<CachedBlob> {
        &self.blob
    }

    /// Takes the daemon out of the way of a complete blob. Blocks.
    pub(super) fn hand_over(&self) -> io::Result<()> {
        let device = self.lock();
        let Some(device) = &*device else { return Ok(()) };
        // Under the lock: whatever makes it incomplete asks for the way back afterwards.
        if !self.blob.is_complete() || self.behind(device)? == BackingFile::Cache {
            return Ok(());
        }
        self.shared.helper.change(device, self.cached()?.as_fd(), None)?;
        self.read_from_memory(device);
        tracing::debug!(blob = %self.blob.id(), device = device.number(), "handed over");
        Ok(())
    }

    /// Makes the device of a complete blob read through the page cache if that has the blob.
    fn read_from_memory(&self, device: &LoopDevice) {
        if self.blob.bytes_in_memory() > self.blob.file_size() / 2 {
            // After an error it reads from the disk.
            let _ = device.read_directly(false);
        }
    }

    /// Makes the device of a complete blob read past the page cache of the file, and drops the
    /// copies in it: the page cache of the mounts has its own. Blocks.
    fn read_from_disk(&self) -> io::Result<()> {
        let device = self.lock();
        let Some(device) = &*device else { return Ok(()) };
        if self.behind(device)? == BackingFile::Cache {
            // Fails where the file system of the cache cannot do it.
            let _ = device.read_directly(true);
            self.blob.forget_pages();
        }
        Ok(())
    }

    /// Makes the kernel ask again, for every read after this returns. Blocks.
    fn ask_again(&self) -> io::Result<()> {
        let device = self.lock();
        let Some(device) = &*device else { return Ok(()) };
        if self.behind(device)? != BackingFile::Session {
            // Or it would read ahead, through the page cache, what may have to be fetched.
            let _ = device.read_directly(true);
            let name = Some(self.identity.name.as_str());
            self.shared.helper.change(device, self.shared.root()?, name)?;
        }
        Ok(())
    }

    /// The backing file of the device at present.
    fn behind(&self, device: &LoopDevice) -> io::Result<BackingFile> {
        let (backing, cached) = (device.backing()?, self.blob.file().metadata()?);
        Ok(if (backing.device, backing.inode) == (cached.dev(), cached.ino()) {
            BackingFile::Cache
        } else if backing.device == self.shared.device()? {
            BackingFile::Session
        } else {
            BackingFile::Nothing
        })
    }

    /// Hands the blob over when it is complete, and takes it back before chunks of it go.
    fn watch(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        self.blob.set_guard(
            "loop",
            Arc::new(move || match weak.upgrade() {
                Some(disk) => {
                    disk.ask_again()?;
                    disk.hand_over_later();
                    Ok(())
                }
                None => Ok(()),
            }),
        );
        self.hand_over_later();
    }

    fn hand_over_later(self: &Arc<Self>) {
        let (weak, blob) = (Arc::downgrade(self), Arc::downgrade(&self.blob));
        let task = self.shared.runtime.spawn(async move {
            let Some(blob) = blob.upgrade() else { return };
            blob.completed().await;
            drop(blob);
            let with_disk = async |what: fn(&Disk) -> io::Result<()>| {
                let weak = weak.clone();
                let done = tokio::task::spawn_blocking(move || {
                    weak.upgrade().map_or(Ok(()), |disk: Arc<Disk>| what(&disk))
                });
                done.await.map_err(io::Error::other).flatten()
            };
            // Errors cost time or memory only: reads go on and are answered.
            if let Err(error) = with_disk(Disk::hand_over).await {
                tracing::warn!(%error, "a complete blob is not handed over");
            }
            tokio::time::sleep(pages::START).await;
            if let Err(error) = with_disk(Disk::read_from_disk).await {
                tracing::warn!(%error, "a complete blob is read through the page cache");
            }
        });
        if let Some(before) = lock(&self.completion).replace(task.abort_handle()) {
            before.abort();
        }
    }

    /// The file in the cache, opened for the kernel to read.
    fn cached(&self) -> io::Result<OwnedFd> {
        Ok(open(self.blob.path(), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    fn lock(&self) -> MutexGuard<'_, Option<LoopDevice>> {
        lock(&self.device)
    }

    /// The range of the blob that a read covers.
    pub(super) fn range(&self, offset: u64, size: u32) -> Range<Decoded> {
        let end = self.blob.file_size();
        Decoded(offset.min(end))..Decoded(offset.saturating_add(size.into()).min(end))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Some(task) = lock(&self.completion).take() {
            task.abort();
        }
        self.shared.disks.forget(self.identity.node);
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk")
            .field("blob", &self.blob.id())
            .field("device", &self.number())
            .finish_non_exhaustive()
    }
}

/// The part of a session that its disks use.
pub(super) struct Shared {
    pub(super) disks: Disks,
    pub(super) helper: Arc<Helper>,
    pub(super) runtime: Handle,
    root: OnceLock<Arc<OwnedFd>>,
}

impl Shared {
    pub(super) fn new(link: &Arc<Link>) -> Arc<Self> {
        Arc::new(Shared {
            disks: Disks::default(),
            helper: Helper::new(link),
            runtime: Handle::current(),
            root: OnceLock::new(),
        })
    }

    /// Once.
    pub(super) fn set_root(&self, root: Arc<OwnedFd>) {
        self.root.get_or_init(|| root);
    }

    /// The root directory.
    pub(super) fn root(&self) -> io::Result<BorrowedFd<'_>> {
        Ok(self.root.get().ok_or(io::ErrorKind::NotConnected)?.as_fd())
    }

    /// The device number of the file system, without asking it.
    pub(super) fn device(&self) -> io::Result<u64> {
        let flags = AtFlags::STATX_DONT_SYNC | AtFlags::EMPTY_PATH;
        let found = statx(self.root()?, c"", flags, StatxFlags::TYPE)?;
        Ok(makedev(found.stx_dev_major, found.stx_dev_minor))
    }
}

/// The disks of a session, by node.
#[derive(Debug, Default)]
pub(super) struct Disks(Mutex<HashMap<u64, Weak<Disk>>>);

impl Disks {
    pub(super) fn get(&self, node: u64) -> Option<Arc<Disk>> {
        lock(&self.0).get(&node).and_then(Weak::upgrade)
    }

    /// The disk with this file name.
    pub(super) fn named(&self, name: &[u8]) -> Option<Arc<Disk>> {
        let all = lock(&self.0).values().filter_map(Weak::upgrade).collect::<Vec<_>>();
        all.into_iter().find(|disk| disk.identity.name.as_bytes() == name)
    }

    /// Returns the disk of a blob; creates it if there is none.
    pub(super) fn of(&self, blob: Arc<CachedBlob>, shared: &Arc<Shared>) -> io::Result<Arc<Disk>> {
        let disk = Arc::new(Disk::new(blob, shared.clone()));
        let mut all = lock(&self.0);
        match all.get(&disk.identity.node).and_then(Weak::upgrade) {
            Some(known) if Arc::ptr_eq(&known.blob, &disk.blob) => {
                // Forgets itself when it is dropped, for which the lock is needed.
                drop(all);
                Ok(known)
            }
            // One chance in 2^64.
            Some(_) => {
                drop(all);
                Err(io::Error::other("two blobs have the same number"))
            }
            None => {
                all.insert(disk.identity.node, Arc::downgrade(&disk));
                Ok(disk)
            }
        }
    }

    /// Removes a dropped disk, unless its blob has another one by now.
    fn forget(&self, node: u64) {
        let mut all = lock(&self.0);
        if all.get(&node).is_some_and(|disk| disk.strong_count() == 0) {
            all.remove(&node);
        }
    }
}
