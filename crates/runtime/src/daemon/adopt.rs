//! What a worker does about the mounts of the one before it.
//!
//! Usually nothing happened in between: the keeper held the fanotify group, and readers waited. Only when keeper
//! and worker died together was there a gap, in which the kernel let readers through to the holes of files; whatever
//! it may have cached then is dropped.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use lazuli_registry::ImageName;

use super::{
    DaemonError,
    api::DriverChoice,
    filesystems::{ErofsMount, FilesystemRecord},
    node::{FUSE, Node, mount_error},
    record::{MountRecord, mount_key},
    served::{Attachment, ServedImage},
    way::Way,
};
use crate::{
    image::{self, Fetched, StoredImage},
    keeper::Descriptors,
    kernel::{
        fanotify::{BLOB, Session, Unanswered, Watch},
        fuse,
        mountinfo::{self, Mounted},
        pages,
    },
};

/// What was left, and what became of it.
#[derive(Debug, Default)]
pub(super) struct Adoption {
    filesystems: Vec<(FilesystemRecord, Arc<ErofsMount>)>,
    /// Files of file systems that cannot be served again.
    lost: Vec<PathBuf>,
}

impl Node {
    /// Finds the mounts of an earlier worker, and gets everything ready to serve them again. Nobody is answered yet.
    pub(super) async fn adopt(
        &self,
        mut given: Descriptors,
        gap: bool,
    ) -> Result<Adoption, DaemonError> {
        let io = |source| DaemonError::Io { path: self.root.join("mounts"), source };
        let mut adoption = Adoption::default();
        self.cache.give(given.remove_all(BLOB).into_iter().map(|(_, file)| file).collect());
        let mounts = mountinfo::list().map_err(io)?;
        let (seen, stale): (Vec<_>, Vec<_>) = self
            .records
            .all()
            .map_err(io)?
            .into_iter()
            .partition(|record| self.is_mounted(&mounts, record).is_some());
        // Gone, or the place of something else by now.
        stale.iter().for_each(|record| self.forget(&record.request.mountpoint));
        if let Some(session) = &self.fanotify {
            self.adopt_filesystems(session, &seen, gap, &mut adoption).await?;
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
                    self.forget(&mountpoint);
                }
            }
        }
        for (name, _) in given.remove_all(FUSE) {
            self.link.release(&name);
        }
        Ok(adoption)
    }

    async fn adopt_filesystems(
        &self,
        session: &Arc<Session>,
        seen: &[MountRecord],
        gap: bool,
        adoption: &mut Adoption,
    ) -> Result<(), DaemonError> {
        let records = self.filesystems.recorded(&self.boot);
        let io = |source| DaemonError::Io { path: self.root.join("filesystems"), source };
        let mut invisible = false;
        for record in records.map_err(io)? {
            let places = seen.iter().filter(|m| m.backing.as_ref() == Some(&record.backing));
            let places: Vec<_> = places.map(|m| m.request.mountpoint.as_path()).collect();
            match self.adopt_filesystem(session, &record, &places, gap).await {
                Ok(Some(mount)) => adoption.filesystems.push((record, mount)),
                Ok(None) => invisible = true,
                Err(error) if error.is_passing() => return Err(error),
                Err(error) => {
                    let (error, image) = (error.for_people(), record.manifest_digest);
                    tracing::error!(%image, error, "a file system is lost: its readers get errors");
                    self.filesystems.forget(&record);
                    adoption.lost.extend(record.devices);
                }
            }
        }
        if gap && invisible {
            pages::forget_all().and_then(|()| pages::reclaim_all()).map_err(io)?;
        }
        Ok(())
    }

    /// `None` when no place shows the file system: it is served without having a mount of ours.
    async fn adopt_filesystem(
        &self,
        session: &Arc<Session>,
        record: &FilesystemRecord,
        places: &[&Path],
        gap: bool,
    ) -> Result<Option<Arc<ErofsMount>>, DaemonError> {
        let image = self.stored(record).await?;
        for place in places {
            let io = |source| DaemonError::Io { path: (*place).to_owned(), source };
            let adopted = image.adopt(session, &self.filesystems, record, place, gap).await;
            if let Some(mount) = adopted.map_err(io)? {
                return Ok(Some(mount));
            }
        }
        let io = |source| DaemonError::Io { path: self.root.join("cache"), source };
        let mut watches = image.watch(session).map_err(io)?;
        watches.iter_mut().for_each(Watch::mounted);
        self.filesystems.linger(watches, record.clone());
        Ok(None)
    }

    async fn stored(&self, record: &FilesystemRecord) -> Result<Arc<ServedImage>, DaemonError> {
        let directory = self.root.join("images").join(record.manifest_digest.hex());
        let stored = StoredImage::open(&directory)?;
        let name: ImageName = record.request.image.parse()?;
        self.serve(stored, Way::to(&name, &self.options(&record.request))).await
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
        let image = self.serve(stored, Way::to(&name, &self.options(&record.request))).await?;
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
            None => {
                let name = format!("{FUSE}{}", mount_key(&mountpoint));
                let resumed = given.remove(&name).map(|fd| image.resume_fuse(&mountpoint, fd));
                match resumed {
                    Some(Ok(session)) => Some(self.attachment(session, &mountpoint)),
                    Some(Err(error)) => {
                        tracing::error!(%error, "cannot go on with a connection");
                        self.link.release(&name);
                        None
                    }
                    None => None,
                }
            }
        };
        let (attachment, id) = match adopted {
            Some(attachment) => (attachment, id),
            None => {
                // The connection died with its daemon; a new one takes its place.
                detach(&mountpoint);
                self.attach(&image, &mut record).await?
            }
        };
        self.insert(record, image, attachment, id, Fetched::default()).await;
        Ok(())
    }

    /// The mount that a record speaks of, whatever covers it.
    fn is_mounted<'a>(&self, mounts: &'a [Mounted], record: &MountRecord) -> Option<&'a Mounted> {
        let place = &record.request.mountpoint;
        mounts.iter().rfind(|mount| mount.target == *place && self.is_ours(mount, record))
    }

    /// Whether a mount is the one that a record speaks of.
    fn is_ours(&self, mount: &Mounted, record: &MountRecord) -> bool {
        match record.driver {
            DriverChoice::Fuse => mount.kind == fuse::KIND,
            _ => {
                let image = self.root.join("images").join(record.manifest_digest.hex());
                mount.kind == "erofs" && mount.source == image::bootstrap_path(&image)
            }
        }
    }

    /// Starts to answer readers, those first who wait since before. Files whose file systems are lost are cut to nothing,
    /// which makes errors of their holes; marks that nobody needs any more go.
    pub(super) async fn answer(
        &self,
        adoption: Adoption,
        left: Vec<Unanswered>,
    ) -> Result<(), DaemonError> {
        let io = |source| DaemonError::Io { path: self.root.join("cache"), source };
        let Some(session) = self.fanotify.clone() else { return Ok(()) };
        session.listen(left).map_err(|error| io(error.into()))?;
        let lost = adoption.lost;
        let cache = self.cache.clone();
        let clean = tokio::task::spawn_blocking(move || {
            lost.iter().for_each(|path| session.cut_off(path));
            session.forget_others(&cache.take_back(), &cache.in_use());
        });
        clean.await.map_err(|error| io(std::io::Error::other(error)))
    }
}

/// Takes a mount of an earlier worker away.
fn detach(mountpoint: &Path) {
    if let Err(error) = fuse::detach(mountpoint) {
        tracing::warn!(mountpoint = %mountpoint.display(), %error, "cannot detach");
    }
}
