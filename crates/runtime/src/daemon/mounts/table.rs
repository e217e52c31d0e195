//! The mount table, in memory and on disk.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use lazuli_sys::mountinfo;
use tokio::sync::{Mutex, MutexGuard, watch};

use crate::{
    daemon::{
        DaemonError,
        api::{MountRequest, MountStatus, SnapshotStatus},
        filesystems::attachment::Attachment,
        record::{MountRecord, Records, mount_key},
        served::image::{Counters, ServedImage},
    },
    image::Fetched,
    metrics::Driver,
};

/// All mounts of a node, with their records.
#[derive(Debug)]
pub(in crate::daemon) struct MountTable {
    mounts: Mutex<BTreeMap<PathBuf, Slot>>,
    records: Records<MountRecord>,
    stopping: watch::Sender<bool>,
}

/// The state of a mount point. A slot is taken before work on it starts, so that slow work on one
/// mount point never blocks another.
#[derive(Debug)]
enum Slot {
    /// A request mounts or unmounts here.
    Busy,
    /// An image is mounted here.
    Mounted(Box<Mount>),
}

/// One mount.
#[derive(Debug)]
pub(in crate::daemon) struct Mount {
    pub(in crate::daemon) record: MountRecord,
    pub(in crate::daemon) image: Arc<ServedImage>,
    pub(in crate::daemon) attachment: Attachment,
    /// The kernel's number of the mount, by which it is known from others at the same place.
    pub(in crate::daemon) id: u64,
    /// Counters of the image when this mount was made.
    before: Counters,
    /// Metadata that was fetched for this mount.
    metadata: Fetched,
}

/// Every mount point, locked for good: nothing new is mounted.
pub(in crate::daemon) struct LastMounts<'a> {
    table: &'a MountTable,
    mounts: MutexGuard<'a, BTreeMap<PathBuf, Slot>>,
}

impl MountTable {
    pub(in crate::daemon) fn new(records: Records<MountRecord>) -> Self {
        MountTable { mounts: Mutex::default(), records, stopping: watch::Sender::new(false) }
    }

    /// Takes a mount point for a mount that is about to be made.
    pub(super) async fn reserve(&self, mountpoint: &Path) -> Result<(), DaemonError> {
        let mut mounts = self.mounts.lock().await;
        if *self.stopping.borrow() {
            return Err(DaemonError::Stopping);
        }
        self.prune(&mut mounts);
        if mounts.contains_key(mountpoint) {
            return Err(DaemonError::Taken { mountpoint: mountpoint.to_owned() });
        }
        mounts.insert(mountpoint.to_owned(), Slot::Busy);
        Ok(())
    }

    /// Gives a mount point back.
    pub(in crate::daemon) async fn free(&self, mountpoint: &Path) {
        self.mounts.lock().await.remove(mountpoint);
    }

    /// Returns when nothing new is to be mounted any more.
    pub(in crate::daemon) async fn stopping(&self) {
        let _ = self.stopping.subscribe().wait_for(|stopping| *stopping).await;
    }

    /// Adds a mount that was made.
    pub(in crate::daemon) async fn insert(&self, mount: Mount) -> MountStatus {
        let status = mount.status();
        let mountpoint = mount.record.request.mountpoint.clone();
        self.mounts.lock().await.insert(mountpoint, Slot::Mounted(Box::new(mount)));
        status
    }

    /// Takes a mount out of the table to unmount it; its place stays taken.
    pub(in crate::daemon) async fn take(
        &self,
        mountpoint: &Path,
    ) -> Result<Box<Mount>, DaemonError> {
        let mut mounts = self.mounts.lock().await;
        self.prune(&mut mounts);
        let mountpoint = mountpoint.to_owned();
        match mounts.insert(mountpoint.clone(), Slot::Busy) {
            Some(Slot::Mounted(mount)) => Ok(mount),
            Some(Slot::Busy) => Err(DaemonError::Taken { mountpoint }),
            None => {
                mounts.remove(&mountpoint);
                Err(DaemonError::NotMounted { mountpoint })
            }
        }
    }

    /// Puts a mount back that could not be unmounted.
    pub(super) async fn put_back(&self, mountpoint: &Path, mount: Box<Mount>) {
        self.mounts.lock().await.insert(mountpoint.to_owned(), Slot::Mounted(mount));
    }

    /// Returns whether this daemon has a mount at a place.
    pub(in crate::daemon) async fn serves_at(&self, mountpoint: &Path) -> bool {
        let mut mounts = self.mounts.lock().await;
        let Some(Slot::Mounted(mount)) = mounts.get(mountpoint) else { return false };
        // Each container asks: the list of all mounts is read only if something is amiss.
        if !mount.is_covered() {
            return true;
        }
        self.prune(&mut mounts);
        mounts.contains_key(mountpoint)
    }

    /// Returns whether the mount at the request's place is of the image in the request, by the same
    /// bootstrap.
    pub(super) async fn is_of(&self, wanted: &MountRequest) -> bool {
        match self.mounts.lock().await.get(&wanted.mountpoint) {
            Some(Slot::Mounted(mount)) => {
                let MountRequest { image, bootstrap, .. } = &mount.record.request;
                (image, bootstrap) == (&wanted.image, &wanted.bootstrap)
            }
            _ => false,
        }
    }

    /// The mounted images, by mount point.
    pub(in crate::daemon) async fn served(&self) -> Vec<(PathBuf, Arc<ServedImage>)> {
        let mounts = self.mounts.lock().await;
        mounted(&mounts).map(|(at, mount)| (at.clone(), mount.image.clone())).collect()
    }

    /// The names by which clients mounted these images.
    pub(in crate::daemon) async fn names_of(
        &self,
        images: &[Arc<ServedImage>],
    ) -> BTreeSet<String> {
        let mounts = self.mounts.lock().await;
        let is_meant = |mount: &Mount| images.iter().any(|image| Arc::ptr_eq(image, &mount.image));
        let meant = mounted(&mounts).filter(|(_, mount)| is_meant(mount));
        meant.map(|(_, mount)| mount.record.request.name().to_owned()).collect()
    }

    /// The number of mounts that each driver serves, by its number.
    pub(in crate::daemon) async fn by_driver(&self) -> [u64; Driver::ALL.len()] {
        let mut count = [0; Driver::ALL.len()];
        for (_, mount) in mounted(&*self.mounts.lock().await) {
            if let Some(driver) = mount.record.driver.of_mounts() {
                count[driver as usize] += 1;
            }
        }
        count
    }

    /// Returns when all FUSE mounts have answered the requests that an earlier worker left.
    pub(in crate::daemon) async fn caught_up(&self) {
        let mut sessions = Vec::new();
        for (_, mount) in mounted(&*self.mounts.lock().await) {
            if let Attachment::Fuse(session) = &mount.attachment {
                sessions.push(session.caught_up());
            }
        }
        futures_util::future::join_all(sessions).await;
    }

    /// Every mount, ordered by mount point, with its purpose.
    pub(in crate::daemon) async fn status(
        &self,
        mut why: HashMap<PathBuf, SnapshotStatus>,
    ) -> Vec<MountStatus> {
        let mut mounts = self.mounts.lock().await;
        self.prune(&mut mounts);
        mounted(&mounts)
            .map(|(at, mount)| MountStatus { snapshot: why.remove(at), ..mount.status() })
            .collect()
    }

    /// Locks the table for good once no request works on a mount point, and `may_stop` agrees to
    /// the present mounts.
    pub(in crate::daemon) async fn stop(
        &self,
        may_stop: impl Fn(&[(&Path, &str)]) -> Result<(), DaemonError>,
    ) -> Result<LastMounts<'_>, DaemonError> {
        loop {
            let mut mounts = self.mounts.lock().await;
            self.prune(&mut mounts);
            may_stop(&mounts.iter().map(named).collect::<Vec<_>>())?;
            // From here on, nothing new is mounted, and requests in progress fail or finish.
            self.stopping.send_replace(true);
            if !mounts.values().any(|slot| matches!(slot, Slot::Busy)) {
                return Ok(LastMounts { table: self, mounts });
            }
            drop(mounts);
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }

    /// Records a mount before it can be seen.
    pub(in crate::daemon) fn record(&self, record: &MountRecord) -> io::Result<()> {
        self.records.write(record)
    }

    /// The recorded mounts.
    pub(in crate::daemon) fn records(&self) -> io::Result<Vec<MountRecord>> {
        self.records.all()
    }

    /// Removes the record of a mount.
    pub(in crate::daemon) fn forget(&self, mountpoint: &Path) {
        if let Err(error) = self.records.remove(&mount_key(mountpoint)) {
            tracing::warn!(mountpoint = %mountpoint.display(), %error, "stale mount record stays");
        }
    }

    /// Drops mounts that were removed with umount(8).
    fn prune(&self, mounts: &mut BTreeMap<PathBuf, Slot>) {
        let present = match mountinfo::list() {
            Ok(present) => present,
            Err(error) => {
                tracing::error!(%error, "cannot see what is mounted");
                return;
            }
        };
        mounts.retain(|mountpoint, slot| {
            let Slot::Mounted(mount) = slot else { return true };
            let stays = present.iter().any(|present| present.id == mount.id);
            if !stays {
                tracing::info!(mountpoint = %mountpoint.display(), "unmounted by another process");
                self.forget(mountpoint);
            }
            stays
        });
    }
}

impl LastMounts<'_> {
    /// Takes all mounts out of the tree, with whatever uses them.
    pub(in crate::daemon) async fn detach(mut self) {
        for (mountpoint, slot) in std::mem::take(&mut *self.mounts) {
            if let Slot::Mounted(mount) = slot {
                if mount.is_covered() {
                    tracing::warn!(mountpoint = %mountpoint.display(), "left: something covers it");
                } else if let Err(error) = mount.attachment.detach(&mountpoint).await {
                    tracing::warn!(mountpoint = %mountpoint.display(), %error, "cannot detach");
                }
            }
            self.table.forget(&mountpoint);
        }
    }
}

impl Mount {
    pub(in crate::daemon) fn new(
        record: MountRecord,
        image: Arc<ServedImage>,
        attachment: Attachment,
        id: u64,
        metadata: Fetched,
    ) -> Self {
        let before = image.counters(&attachment);
        Mount { record, image, attachment, id, before, metadata }
    }

    /// Returns whether another mount covers it, or it is gone.
    pub(super) fn is_covered(&self) -> bool {
        let seen = mountinfo::id_at(&self.record.request.mountpoint);
        !seen.is_ok_and(|seen| seen == Some(self.id))
    }

    fn status(&self) -> MountStatus {
        let now = self.image.counters(&self.attachment);
        let MountRecord { request, manifest_digest, driver, driver_reason, .. } = &self.record;
        MountStatus {
            image: request.image.clone(),
            manifest_digest: *manifest_digest,
            mountpoint: request.mountpoint.clone(),
            driver: *driver,
            driver_reason: driver_reason.clone(),
            bytes_fetched: self.metadata.bytes + now.bytes_fetched - self.before.bytes_fetched,
            requests: self.metadata.requests + now.requests - self.before.requests,
            bytes_total: self.image.bytes_total(),
            bytes_copied: now.bytes_copied - self.before.bytes_copied,
            chunks_ready: now.chunks_ready,
            chunks_total: now.chunks_total,
            bytes_missing: self.image.bytes_missing(),
            complete_in_seconds: None,
            events: now.events - self.before.events,
            stale_pages: self.attachment.stale_pages(),
            snapshot: None,
        }
    }
}

/// The mount points with a mount.
fn mounted(slots: &BTreeMap<PathBuf, Slot>) -> impl Iterator<Item = (&PathBuf, &Mount)> {
    slots.iter().filter_map(|(mountpoint, slot)| match slot {
        Slot::Mounted(mount) => Some((mountpoint, &**mount)),
        Slot::Busy => None,
    })
}

/// A mount point and its image, for messages.
fn named<'a>((mountpoint, slot): (&'a PathBuf, &'a Slot)) -> (&'a Path, &'a str) {
    match slot {
        Slot::Mounted(mount) => (mountpoint, &mount.record.request.image),
        Slot::Busy => (mountpoint, "an image"),
    }
}
