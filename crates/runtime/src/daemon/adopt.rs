//! What a worker does about the mounts of the one before it.
//!
//! Usually nothing happened in between: the keeper held the fanotify group, and readers waited. Only when keeper
//! and worker died together was there a gap, in which the kernel let readers through to the holes of files; whatever
//! it may have cached then is dropped.

use std::{os::fd::OwnedFd, path::PathBuf, sync::Arc};

use lazuli_registry::ImageName;

use super::{
    DaemonError,
    api::DriverChoice,
    filesystems::{ErofsMount, FilesystemRecord},
    node::{FUSE, Node, detach, mount_error, seen_at},
    record::MountRecord,
    served::{Attachment, ServedImage},
};
use crate::{
    image::{self, Fetched, StoredImage},
    keeper::Descriptors,
    kernel::{
        fanotify::{BLOB, Session, Unanswered},
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
    /// Marked files of the worker before.
    marked: Vec<(String, OwnedFd)>,
}

impl Node {
    /// Finds the mounts of an earlier worker, and gets everything ready to serve them again. Nobody is answered yet.
    pub(super) async fn adopt(
        &self,
        mut given: Descriptors,
        gap: bool,
    ) -> Result<Adoption, DaemonError> {
        let io = |source| DaemonError::Io { path: self.root.join("mounts"), source };
        let mut adoption = Adoption { marked: given.remove_all(BLOB), ..Adoption::default() };
        let silent: Result<_, _> = adoption.marked.iter().map(|(_, fd)| fd.try_clone()).collect();
        self.cache.give(silent.map_err(io)?);
        let mounts = mountinfo::list().map_err(io)?;
        let (seen, stale): (Vec<_>, Vec<_>) =
            self.records.all().map_err(io)?.into_iter().partition(|record| {
                seen_at(&mounts, &record.request.mountpoint)
                    .is_some_and(|m| self.is_ours(m, record))
            });
        // Gone, or the place of something else by now.
        stale.iter().for_each(|record| self.forget(&record.request.mountpoint));
        if let Some(session) = &self.fanotify {
            self.adopt_filesystems(session, &seen, gap, &mut adoption).await?;
        }
        for record in seen {
            let mountpoint = record.request.mountpoint.clone();
            let Some(id) = seen_at(&mounts, &mountpoint).map(|mount| mount.id) else { continue };
            match self.adopt_mount(record, id, &mut given, &adoption).await {
                Ok(()) => tracing::info!(mountpoint = %mountpoint.display(), "served again"),
                Err(error) => {
                    let error = error.for_people();
                    tracing::error!(mountpoint = %mountpoint.display(), error, "mount is lost");
                    detach(&mountpoint);
                    self.forget(&mountpoint);
                }
            }
        }
        for (name, _) in given.remove_all(FUSE) {
            self.link.release(&format!("{FUSE}{name}"));
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
            let place = seen.iter().find(|m| m.backing.as_ref() == Some(&record.backing));
            let place = place.map(|mount| mount.request.mountpoint.clone());
            invisible |= place.is_none();
            match self.adopt_filesystem(session, record.clone(), place, gap).await {
                Ok(Some(mount)) => adoption.filesystems.push((record, mount)),
                Ok(None) => {}
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

    async fn adopt_filesystem(
        &self,
        session: &Arc<Session>,
        record: FilesystemRecord,
        place: Option<PathBuf>,
        gap: bool,
    ) -> Result<Option<Arc<ErofsMount>>, DaemonError> {
        let image = self.stored(&record).await?;
        let io = |source| DaemonError::Io { path: self.root.join("cache"), source };
        let Some(place) = place else {
            let mut watches = image.watch(session).map_err(io)?;
            watches.iter_mut().for_each(crate::kernel::fanotify::Watch::mounted);
            self.filesystems.linger(watches, record);
            return Ok(None);
        };
        let adopted = image.adopt(session, &self.filesystems, record, &place, gap).await;
        let path = place;
        adopted.map(Some).map_err(|source| DaemonError::Io { path, source })
    }

    async fn stored(&self, record: &FilesystemRecord) -> Result<Arc<ServedImage>, DaemonError> {
        let directory = self.root.join("images").join(record.manifest_digest.hex());
        let stored = StoredImage::open(&directory)?;
        let name: ImageName = record.request.image.parse()?;
        self.serve(stored, &name, &record.request).await
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
        let image = self.serve(stored, &name, &record.request).await?;
        let mountpoint = record.request.mountpoint.clone();
        let adopted = match &record.backing {
            Some(backing) => {
                let found = adoption.filesystems.iter().find(|(fs, _)| fs.backing == *backing);
                let missing = || std::io::Error::other("its file system is lost");
                let (_, mount) = found.ok_or_else(|| mount_error(&record, missing()))?;
                Some(Attachment::Bind(mount.clone()))
            }
            None => given
                .remove(&format!("{FUSE}{}", super::record::mount_key(&mountpoint)))
                .and_then(|connection| {
                    let resumed = image.resume_fuse(&mountpoint, connection);
                    let failed = |error: &std::io::Error| tracing::error!(%error, "cannot go on");
                    resumed.inspect_err(failed).ok()
                })
                .map(|session| self.attachment(session, &mountpoint)),
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
        let Adoption { lost, marked, .. } = adoption;
        let cache = self.cache.clone();
        let clean = tokio::task::spawn_blocking(move || {
            lost.iter().for_each(|path| session.cut_off(path));
            session.forget_others(marked);
            cache.give_back();
        });
        clean.await.map_err(|error| io(std::io::Error::other(error)))
    }
}
