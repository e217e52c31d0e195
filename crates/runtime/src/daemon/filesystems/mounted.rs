//! The EROFS file systems of images: mounted ones, and those still in use after the last unmount.
//!
//! A file system lives as long as it is used: by an overlay mount on top, another mount namespace,
//! an open file. Without marks on its files, such a user would read holes as zeros, and without a
//! daemon behind its disks, errors. So both stay until the kernel reports that the file system is
//! gone, and so does a record on disk, for the next worker.

use std::{
    io, mem,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, Weak},
    thread,
    time::{Duration, Instant},
};

use lazuli_image::Digest;
use serde::{Deserialize, Serialize};

use super::users;
use crate::{
    daemon::{
        api::MountRequest,
        record::{Record, Records},
    },
    kernel::{
        fanotify::Watch,
        loop_devices::{Disk, Session},
        mount::{Backing, ImageMount},
    },
    sync::lock,
};

/// Time limit for the kernel to remove an unused file system; milliseconds in practice.
const LOOK_FOR_USERS: Duration = Duration::from_millis(300);

/// The same if the helper is known to be removing it: the kernel forgets a million names in a
/// second.
const RELEASE: Duration = Duration::from_secs(30);

/// Interval for checking file systems that outlive their mounts.
const SWEEP: Duration = Duration::from_secs(1);

/// The state from which another worker can serve a file system.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::daemon) struct FilesystemRecord {
    /// The first mount request for it, which names the source of its data.
    pub(in crate::daemon) request: MountRequest,
    /// The image.
    pub(in crate::daemon) manifest_digest: Digest,
    /// The kernel's name for it.
    pub(in crate::daemon) backing: Backing,
    /// Device number of its files.
    pub(in crate::daemon) device: u64,
    /// The files behind it.
    pub(in crate::daemon) devices: Vec<PathBuf>,
    /// Numbers of its loop devices, one for each blob; `None` when it is on files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::daemon) loops: Option<Vec<u32>>,
    /// The boot in which the kernel has used this name.
    pub(in crate::daemon) boot: String,
}

impl Record for FilesystemRecord {
    fn key(&self) -> String {
        self.backing.to_string()
    }
}

/// A driver's objects behind a file system, one for each blob.
#[derive(Debug)]
pub(in crate::daemon) enum BlobBackends {
    /// Marks on files.
    Watches(Vec<Watch>),
    /// Loop devices, and the session that serves them.
    Disks(Arc<Session>, Vec<Arc<Disk>>),
}

impl BlobBackends {
    /// Number of the kernel's requests for the image's blobs.
    fn events(&self) -> u64 {
        match self {
            BlobBackends::Watches(watches) => watches.iter().map(Watch::events).sum(),
            BlobBackends::Disks(_, disks) => disks.iter().map(|disk| disk.requests()).sum(),
        }
    }

    /// Returns whether a mount of ours is still about to go.
    fn is_releasing(&self) -> bool {
        matches!(self, BlobBackends::Disks(session, _) if session.is_releasing())
    }

    /// Makes remaining readers get errors, instead of holes, once this process ends. Disks do that
    /// by themselves.
    fn cut_off(self) {
        if let BlobBackends::Watches(watches) = self {
            watches.into_iter().for_each(Watch::cut_off);
        }
    }
}

/// One EROFS mount of an image, with its devices.
#[derive(Debug)]
pub(in crate::daemon) struct FilesystemMount {
    pub(in crate::daemon) image: ImageMount,
    /// See [`super::stale_pages::close`].
    pub(in crate::daemon) stale_pages: u64,
    backends: BlobBackends,
    record: FilesystemRecord,
    filesystems: Arc<Filesystems>,
}

impl FilesystemMount {
    /// Returns whether to switch it to direct I/O when its start is over. Disks use it from the
    /// beginning.
    pub(in crate::daemon) fn reads_directly(&self) -> bool {
        self.is_on_files() && self.filesystems.reads_directly
    }

    /// Returns whether the kernel reads the files of the cache through their page cache while data
    /// arrives.
    pub(super) fn is_on_files(&self) -> bool {
        matches!(self.backends, BlobBackends::Watches(_))
    }

    /// Events about the image's blobs.
    pub(in crate::daemon) fn events(&self) -> u64 {
        self.backends.events()
    }
}

impl Drop for FilesystemMount {
    fn drop(&mut self) {
        let backends = mem::replace(&mut self.backends, BlobBackends::Watches(Vec::new()));
        self.filesystems.linger(backends, self.record.clone());
    }
}

/// All of them.
#[derive(Debug)]
pub(in crate::daemon) struct Filesystems {
    records: Records<FilesystemRecord>,
    /// Whether the kernel may read blobs with direct I/O.
    reads_directly: bool,
    /// File systems whose mounts are gone.
    lingering: Mutex<Vec<Remains>>,
}

#[derive(Debug)]
struct Remains {
    record: FilesystemRecord,
    backends: BlobBackends,
}

impl Filesystems {
    pub(in crate::daemon) fn new(
        records: Records<FilesystemRecord>,
        reads_directly: bool,
    ) -> Arc<Self> {
        Arc::new(Filesystems { records, reads_directly, lingering: Mutex::default() })
    }

    /// Those that live, as an earlier worker recorded them; records of others are removed.
    pub(in crate::daemon) fn recorded(&self, boot: &str) -> io::Result<Vec<FilesystemRecord>> {
        let (alive, gone): (Vec<_>, Vec<_>) = self
            .records
            .all()?
            .into_iter()
            .partition(|record| record.boot == boot && record.backing.is_alive());
        gone.iter().for_each(|record| self.forget(record));
        Ok(alive)
    }

    /// The images of those that have a record: a worker that takes over needs their metadata.
    pub(in crate::daemon) fn images(&self) -> io::Result<Vec<Digest>> {
        Ok(self.records.all()?.into_iter().map(|record| record.manifest_digest).collect())
    }

    /// Writes the record of a file system, before it can be used, and keeps it.
    pub(in crate::daemon) fn add(
        self: &Arc<Self>,
        image: ImageMount,
        backends: BlobBackends,
        record: FilesystemRecord,
    ) -> io::Result<Arc<FilesystemMount>> {
        self.records.write(&record)?;
        Ok(self.keep(image, backends, record, 0))
    }

    /// Keeps a file system that has a record, with its devices.
    pub(in crate::daemon) fn keep(
        self: &Arc<Self>,
        image: ImageMount,
        backends: BlobBackends,
        record: FilesystemRecord,
        stale_pages: u64,
    ) -> Arc<FilesystemMount> {
        let filesystems = self.clone();
        Arc::new(FilesystemMount { image, stale_pages, backends, record, filesystems })
    }

    /// Keeps the devices of a file system without a mount of ours, until nothing uses it.
    pub(in crate::daemon) fn linger(&self, backends: BlobBackends, record: FilesystemRecord) {
        self.lock().push(Remains { record, backends });
    }

    /// Returns whether the file system lives without a mount of ours.
    pub(in crate::daemon) fn lingers(&self, backing: &Backing) -> bool {
        self.lock().iter().any(|remains| remains.record.backing == *backing)
    }

    /// Removes the record of a file system.
    pub(in crate::daemon) fn forget(&self, record: &FilesystemRecord) {
        if let Err(error) = self.records.remove(&record.key()) {
            tracing::warn!(backing = %record.backing, %error, "stale record stays");
        }
    }

    /// Lets go of those that are not used any more.
    pub(in crate::daemon) fn sweep(&self) {
        let mut all = self.lock();
        let (alive, gone): (_, Vec<Remains>) =
            mem::take(&mut *all).into_iter().partition(|r| r.record.backing.is_alive());
        *all = alive;
        drop(all);
        // Removing marks asks the kernel; no caller has to wait for that.
        for remains in gone {
            self.forget(&remains.record);
            drop(remains.backends);
        }
    }

    /// Images still in use, with their users; waits a moment for those that are just going. Blocks.
    pub(in crate::daemon) fn settle(&self) -> Vec<(Digest, String)> {
        let started = Instant::now();
        loop {
            self.sweep();
            let used: Vec<_> =
                self.lock().iter().map(|r| (r.record.manifest_digest, r.record.device)).collect();
            let limit = match self.is_releasing() {
                true => RELEASE,
                false => LOOK_FOR_USERS,
            };
            if used.is_empty() || started.elapsed() > limit {
                let holders = |(image, device)| (image, users::of_device(device));
                return used.into_iter().map(holders).collect();
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until no file system of an image is left, for as long as the kernel needs to remove
    /// an unused one. Blocks.
    pub(in crate::daemon) fn settle_image(&self, image: &Digest) {
        let started = Instant::now();
        loop {
            self.sweep();
            let is_left = self.images().is_ok_and(|images| images.contains(image));
            if !is_left || started.elapsed() > LOOK_FOR_USERS {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Truncates the files behind them, for the end of the daemon: reads of data that the kernel
    /// has not cached then fail with EIO, instead of showing holes.
    pub(in crate::daemon) fn cut_off(&self) {
        let all = mem::take(&mut *self.lock());
        for remains in all {
            let image = remains.record.manifest_digest;
            tracing::warn!(%image, "still in use: its readers get errors now");
            remains.backends.cut_off();
            self.forget(&remains.record);
        }
    }

    fn is_releasing(&self) -> bool {
        self.lock().iter().any(|remains| remains.backends.is_releasing())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Remains>> {
        lock(&self.lingering)
    }
}

/// Looks after them until they are dropped.
pub(in crate::daemon) async fn sweep_while_used(filesystems: Weak<Filesystems>) {
    loop {
        tokio::time::sleep(SWEEP).await;
        match filesystems.upgrade() {
            Some(filesystems) => filesystems.sweep(),
            None => return,
        }
    }
}
