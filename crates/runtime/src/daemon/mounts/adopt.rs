//! Takes over the mounts of the worker before.
//!
//! Usually the keeper has held the fanotify groups meanwhile, and readers waited. If keeper and
//! worker died together, the kernel let readers through to the holes of files until now, and the
//! pages that it may have cached in this gap are dropped.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use lazuli_policy::Verified;
use lazuli_registry::ImageName;
use lazuli_sys::{
    mountinfo::{self, MountEntry},
    path_error::{At as _, PathError},
};

use super::{mount::mount_error, table::Mount};
use crate::{
    cache::CachedBlob,
    daemon::{
        DaemonError,
        api::DriverChoice,
        filesystems::{
            attachment::Attachment,
            mounted::{BlobBackends, FilesystemMount, FilesystemRecord},
            stale_pages::Gap,
        },
        node::Node,
        record::{MountRecord, mount_key},
        served::{image::ServedImage, route::ImageRoute},
    },
    image::{self, Fetched, StoredImage},
    keeper::{Descriptors, names::BLOB},
    kernel::{
        fanotify::{Session, Unanswered, Watch},
        fuse::{self, MountPoint},
        loop_devices,
        mount::Backing,
        pages,
    },
};

/// The state that an earlier worker left, as far as it was taken over.
#[derive(Debug, Default)]
pub(in crate::daemon) struct Adoption {
    filesystems: Vec<(FilesystemRecord, Arc<FilesystemMount>)>,
    /// Their images, kept so that the mounts do not read the same chunk tables again.
    images: Vec<Arc<ServedImage>>,
    /// Files of file systems that cannot be served again.
    lost: Vec<PathBuf>,
}

impl Node {
    /// Finds the mounts of an earlier worker, and gets everything ready to serve them again. No
    /// reader is answered yet.
    pub(in crate::daemon) async fn adopt(
        &self,
        mut given: Descriptors,
        gap: Gap,
    ) -> Result<Adoption, DaemonError> {
        let path = self.root.join("mounts");
        let mut adoption = Adoption::default();
        self.cache.give(given.remove_all(BLOB).into_iter().map(|(_, file)| file).collect());
        let mounts = mountinfo::list().at(&path)?;
        let (seen, stale): (Vec<_>, Vec<_>) = self
            .mounts
            .records()
            .at(&path)?
            .into_iter()
            .partition(|record| self.is_mounted(&mounts, record).is_some());
        // Gone, or the place of something else by now.
        stale.iter().for_each(|record| self.mounts.forget(&record.request.mountpoint));
        let records = self.filesystems.recorded(&self.boot).at(self.root.join("filesystems"))?;
        let (on_disks, on_files): (Vec<_>, Vec<_>) =
            records.into_iter().partition(|record| record.loops.is_some());
        self.adopt_disks(on_disks, &seen, &mut given, &mut adoption).await?;
        if let Some(session) = &self.drivers.fanotify {
            self.adopt_filesystems(session, on_files, &seen, gap, &mut adoption).await?;
        }
        for record in seen {
            let mountpoint = record.request.mountpoint.clone();
            let Some(id) = self.is_mounted(&mounts, &record).map(|mount| mount.id) else {
                continue;
            };
            match self.adopt_mount(record, id, &mut given, &adoption).await {
                Ok(()) => tracing::info!(mountpoint = %mountpoint.display(), "served again"),
                Err(error) if error.is_passing() => return Err(error),
                Err(error) => {
                    let error = error.for_people();
                    tracing::error!(mountpoint = %mountpoint.display(), error, "mount is lost");
                    detach(&mountpoint);
                    self.mounts.forget(&mountpoint);
                }
            }
        }
        for (name, _) in given.remove_all(fuse::HELD) {
            self.drivers.link.release(&name);
        }
        Ok(adoption)
    }

    async fn adopt_filesystems(
        &self,
        session: &Arc<Session>,
        records: Vec<FilesystemRecord>,
        seen: &[MountRecord],
        gap: Gap,
        adoption: &mut Adoption,
    ) -> Result<(), DaemonError> {
        let mut invisible = false;
        for record in records {
            let places = places(seen, &record);
            match self.adopt_filesystem(session, &record, &places, gap).await {
                Ok((image, mount)) => {
                    adoption.images.push(image);
                    match mount {
                        Some(mount) => adoption.filesystems.push((record, mount)),
                        None => invisible = true,
                    }
                }
                Err(error) if error.is_passing() => return Err(error),
                Err(error) => {
                    self.give_up(&record, &error);
                    adoption.lost.extend(record.devices);
                }
            }
        }
        if gap == Gap::Unheard && invisible {
            pages::forget_all()
                .and_then(|()| pages::reclaim_all())
                .at(self.root.join("filesystems"))?;
        }
        Ok(())
    }

    /// Takes over file systems on loop devices. Reads are answered from here on, so nothing may be
    /// missing that the kernel has: every read of missing data waits.
    async fn adopt_disks(
        &self,
        records: Vec<FilesystemRecord>,
        seen: &[MountRecord],
        given: &mut Descriptors,
        adoption: &mut Adoption,
    ) -> Result<(), DaemonError> {
        let left = loop_devices::Left::find(given, &self.drivers.link);
        if left.is_none() && records.is_empty() {
            return Ok(());
        }
        let mut images = Vec::new();
        for record in records {
            match self.stored(&record).await {
                Ok(image) => {
                    adoption.images.push(image.clone());
                    images.push((record, image));
                }
                Err(error) if error.is_passing() => return Err(error),
                Err(error) => self.give_up(&record, &error),
            }
        }
        let blobs = images.iter().flat_map(|(_, image)| image.blobs().iter().cloned()).collect();
        let (session, _serving) = self.resume_disks(left, blobs).await?;
        // The session that every mount uses from now on.
        let session = self.drivers.disks.get_or_init(|| async { Ok(session) }).await.clone();
        let session = session.map_err(|reason| DaemonError::Driver { driver: "loop", reason })?;
        for (record, image) in images {
            self.drivers.proven(&record.backing);
            let places = places(seen, &record);
            match image.adopt_disks(&session, &self.filesystems, &record, &places).await {
                Ok(Some(mount)) => adoption.filesystems.push((record, mount)),
                Ok(None) => {}
                Err(error) => {
                    let path = self.root.join("filesystems");
                    let error = DaemonError::from(PathError { path, source: error });
                    if error.is_passing() {
                        return Err(error);
                    }
                    self.give_up(&record, &error);
                }
            }
        }
        Ok(())
    }

    /// The session of the worker before, or a new one, and the disks of `blobs`.
    async fn resume_disks(
        &self,
        left: Option<loop_devices::Left>,
        blobs: Vec<Arc<CachedBlob>>,
    ) -> Result<(Arc<loop_devices::Session>, Vec<Arc<loop_devices::Disk>>), DaemonError> {
        let (link, runtime) = (self.drivers.link.clone(), tokio::runtime::Handle::current());
        let resume = move || {
            let _runtime = runtime.enter();
            match left {
                Some(left) => loop_devices::Session::resume(&link, left, blobs),
                None => Ok((loop_devices::Session::start(&link)?, Vec::new())),
            }
        };
        let resumed = tokio::task::spawn_blocking(resume).await;
        let resumed = resumed.map_err(std::io::Error::other).and_then(|resumed| resumed);
        Ok(resumed.at("/dev/fuse")?)
    }

    fn give_up(&self, record: &FilesystemRecord, error: &DaemonError) {
        let (error, image) = (error.for_people(), record.manifest_digest);
        tracing::error!(%image, error, "a file system is lost: its readers get errors");
        self.filesystems.forget(record);
    }

    /// No mount if the file system is mounted nowhere: it is served without one of ours.
    async fn adopt_filesystem(
        &self,
        session: &Arc<Session>,
        record: &FilesystemRecord,
        places: &[&Path],
        gap: Gap,
    ) -> Result<(Arc<ServedImage>, Option<Arc<FilesystemMount>>), DaemonError> {
        let image = self.stored(record).await?;
        for place in places {
            let adopted = image.adopt(session, &self.filesystems, record, place, gap).await;
            if let Some(mount) = adopted.at(place)? {
                return Ok((image, Some(mount)));
            }
        }
        let mut watches = image.watch(session).at(self.root.join("cache"))?;
        watches.iter_mut().for_each(Watch::mounted);
        self.filesystems.linger(BlobBackends::Watches(watches), record.clone());
        Ok((image, None))
    }

    async fn stored(&self, record: &FilesystemRecord) -> Result<Arc<ServedImage>, DaemonError> {
        let directory = self.root.join("images").join(record.manifest_digest.hex());
        let stored = StoredImage::open(&directory)?;
        let name: ImageName = record.request.image.parse()?;
        let verified = Verified::taken_over(record.manifest_digest);
        self.serve(
            stored,
            &verified,
            ImageRoute::to(&name, &self.admission.options(&record.request)),
        )
        .await
    }

    async fn adopt_mount(
        &self,
        mut record: MountRecord,
        id: u64,
        given: &mut Descriptors,
        adoption: &Adoption,
    ) -> Result<(), DaemonError> {
        let directory = self.root.join("images").join(record.manifest_digest.hex());
        let stored = StoredImage::open(&directory)?;
        let name: ImageName = record.request.image.parse()?;
        let verified = Verified::taken_over(record.manifest_digest);
        let route = ImageRoute::to(&name, &self.admission.options(&record.request));
        let image = self.serve(stored, &verified, route).await?;
        let mountpoint = record.request.mountpoint.clone();
        let adopted = match &record.backing {
            Some(backing) => {
                let found = adoption.filesystems.iter().find(|(fs, _)| fs.backing == *backing);
                if found.is_none() && self.filesystems.lingers(backing) {
                    tracing::warn!(mountpoint = %mountpoint.display(), "left: something covers it");
                    return Ok(());
                }
                let missing = || std::io::Error::other("its file system is lost");
                let (_, mount) = found.ok_or_else(|| mount_error(&record, missing()))?;
                Some(Attachment::Bind(mount.clone()))
            }
            None => self.resume_fuse(&record, &image, given)?,
        };
        let (attachment, id) = match adopted {
            Some(attachment) => (attachment, id),
            // The connection died with its daemon; a new one takes its place.
            None => self.attach(&image, &mut record, MountPoint::Dead).await?,
        };
        let mount = Mount::new(record, image, attachment, id, Fetched::default());
        self.mounts.insert(mount).await;
        Ok(())
    }

    /// Takes over the connection of a FUSE mount. `None` when that is impossible for good.
    fn resume_fuse(
        &self,
        record: &MountRecord,
        served: &ServedImage,
        given: &mut Descriptors,
    ) -> Result<Option<Attachment>, DaemonError> {
        let mountpoint = record.request.mountpoint.clone();
        let key = mount_key(&mountpoint);
        if let Some(left) = fuse::Left::find(given, &key) {
            let image = record.manifest_digest;
            let place = fuse::MountTarget {
                mountpoint: &mountpoint,
                key: &key,
                image,
                place: MountPoint::Free,
            };
            match served.resume_fuse(place, left, record, &self.drivers.link) {
                Ok(attachment) => return Ok(Some(attachment)),
                Err(error) => {
                    let error = mount_error(record, error);
                    if error.is_passing() {
                        return Err(error);
                    }
                    tracing::error!(error = error.for_people(), "cannot continue a connection");
                }
            }
        }
        fuse::Left::release(&self.drivers.link, &key);
        Ok(None)
    }

    /// The mount that a record speaks of, whatever covers it.
    fn is_mounted<'a>(
        &self,
        mounts: &'a [MountEntry],
        record: &MountRecord,
    ) -> Option<&'a MountEntry> {
        let place = &record.request.mountpoint;
        mounts.iter().rfind(|mount| mount.target == *place && self.is_ours(mount, record))
    }

    /// Returns whether a mount is the one in a record.
    fn is_ours(&self, mount: &MountEntry, record: &MountRecord) -> bool {
        match record.driver {
            DriverChoice::Fuse | DriverChoice::Disks => mount.kind == fuse::KIND,
            DriverChoice::Loop | DriverChoice::Ext4 => {
                let disk = record.backing.as_ref().and_then(Backing::disk);
                disk.as_ref() == Some(&mount.source)
            }
            DriverChoice::Auto | DriverChoice::Fanotify => {
                let image = self.root.join("images").join(record.manifest_digest.hex());
                mount.kind == "erofs" && mount.source == image::bootstrap_path(&image)
            }
        }
    }

    /// Starts to answer readers, those first that have waited since before; the keeper is told when
    /// all of these have their answer. Files of lost file systems are truncated, which turns reads
    /// of their holes into errors; marks that are no longer needed are removed.
    pub(in crate::daemon) async fn answer(
        self: &Arc<Self>,
        adoption: Adoption,
        left: Vec<Unanswered>,
    ) -> Result<(), DaemonError> {
        let path = self.root.join("cache");
        let listen = |session: &Arc<Session>| session.listen(left);
        let answers = self.drivers.fanotify.as_ref().map(listen).transpose();
        let answers = answers.at(&path)?;
        let node = self.clone();
        tokio::spawn(async move {
            if let Some(answers) = answers {
                answers.await;
            }
            node.caught_up().await;
            node.drivers.link.settled();
        });
        let Some(session) = self.drivers.fanotify.clone() else { return Ok(()) };
        let lost = adoption.lost;
        let cache = self.cache.clone();
        let clean = tokio::task::spawn_blocking(move || {
            lost.iter().for_each(|path| session.cut_off(path));
            session.forget_others(&cache.take_back(), &cache.in_use());
        });
        Ok(clean.await.map_err(std::io::Error::other).at(&path)?)
    }
}

/// The mount points that show a file system.
fn places<'a>(seen: &'a [MountRecord], record: &FilesystemRecord) -> Vec<&'a Path> {
    let places = seen.iter().filter(|mount| mount.backing.as_ref() == Some(&record.backing));
    places.map(|mount| mount.request.mountpoint.as_path()).collect()
}

/// FUSE mounts of versions that kept no journal. Those that are not mounted any more do not count.
pub(in crate::daemon) fn without_journal(
    records: &[MountRecord],
    mounts: &[MountEntry],
) -> Vec<PathBuf> {
    let without = records.iter().filter(|record| !record.journal);
    let places = without.map(|record| &record.request.mountpoint);
    let is_fuse = |place: &&PathBuf| {
        mounts.iter().any(|mount| mount.target == **place && mount.kind == fuse::KIND)
    };
    places.filter(is_fuse).cloned().collect()
}

/// Takes a mount of an earlier worker away.
fn detach(mountpoint: &Path) {
    if let Err(error) = fuse::detach(mountpoint) {
        tracing::warn!(mountpoint = %mountpoint.display(), %error, "cannot detach");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_versions_without_a_journal_are_told_from_others() {
        let record = |place: &str, journal: bool| {
            let mut record = serde_json::json!({
                "request": {"image": "oci:a:b", "mountpoint": place, "driver": "auto"},
                "manifest_digest": format!("sha256:{:064}", 0),
                "driver": "fuse",
                "driver_reason": "",
                "backing": null,
            });
            if journal {
                record["journal"] = true.into();
            }
            serde_json::from_value::<MountRecord>(record).unwrap()
        };
        let mount = |place: &str, kind: &str| MountEntry {
            id: 1,
            target: place.into(),
            kind: kind.to_owned(),
            source: PathBuf::new(),
        };
        let records =
            ["/old", "/new", "/gone", "/other"].map(|place| record(place, place == "/new"));
        let mounts =
            [mount("/old", fuse::KIND), mount("/new", fuse::KIND), mount("/other", "erofs")];
        assert_eq!(without_journal(&records, &mounts), [PathBuf::from("/old")]);
    }
}
