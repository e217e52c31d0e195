//! A blob's file as long as a mount of it lives.

use std::{
    collections::HashMap,
    mem,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::fs::MetadataExt as _,
    },
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use lazuli_image::Digest;

use super::{
    journal::FileId,
    session::{Session, SessionError, Watched},
};
use crate::{cache::CachedBlob, sharing::Owner};

/// Keeps the file of one blob known for one mount. To be dropped when nothing uses that mount any
/// more, and not before: the kernel would let readers see the holes.
#[derive(Debug)]
#[must_use = "without it the blob's readers see holes"]
pub struct Watch {
    pub(super) session: Arc<Session>,
    pub(super) blob: Arc<CachedBlob>,
    pub(super) image: Digest,
    pub(super) id: FileId,
    pub(super) events: Arc<AtomicU64>,
    pub(super) mounting: bool,
    pub(super) _owner: Owner,
}

impl Session {
    /// Asks for events on the blob's file, for the image with this manifest. To be called before
    /// the file is mounted.
    pub fn watch(
        self: &Arc<Self>,
        blob: Arc<CachedBlob>,
        image: Digest,
    ) -> Result<Watch, SessionError> {
        let mark_error = |source| SessionError::Mark { path: blob.path(), source };
        let metadata = blob.file().metadata().map_err(mark_error)?;
        let id = (metadata.dev(), metadata.ino());
        let mut all = self.lock();
        let watched = all.entry(id).or_insert_with(|| Watched {
            blob: blob.clone(),
            events: Arc::default(),
            watches: 0,
            images: HashMap::new(),
            mounting: 0,
            marked: None,
            completion: self.unmark_when_complete(id, &blob),
        });
        watched.watches += 1;
        *watched.images.entry(image).or_default() += 1;
        watched.mounting += 1;
        let watch = Watch {
            session: self.clone(),
            blob: blob.clone(),
            image,
            id,
            events: watched.events.clone(),
            mounting: true,
            _owner: blob.owned_by(image),
        };
        if let Err(error) = self.mark(id, watched) {
            // The watch takes itself back, which needs the lock.
            drop(all);
            return Err(mark_error(error));
        }
        drop(all);
        let weak = Arc::downgrade(self);
        let guard =
            move || weak.upgrade().map_or(Ok(()), |session: Arc<Self>| session.mark_again(id));
        blob.set_guard("fanotify", Arc::new(guard));
        Ok(watch)
    }
}

impl Watch {
    /// To be called when the file is mounted: from then on the mark may go as soon as the blob is
    /// complete.
    pub fn mounted(&mut self) {
        if mem::take(&mut self.mounting) {
            let mut all = self.session.lock();
            if let Some(watched) = all.get_mut(&self.id) {
                watched.mounting -= 1;
            }
            self.session.settle(self.id, &mut all);
        }
    }

    /// The file, to be mounted.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.blob.file().as_fd()
    }

    /// Gives up the blob although it has readers, see [`CachedBlob::cut_off`]. They are answered
    /// until the session ends, so that none slips through before the file is truncated.
    pub fn cut_off(self) {
        self.session.slots.close();
        if let Err(error) = self.blob.cut_off() {
            tracing::error!(blob = ?self.blob, %error, "cannot cut off a blob");
        }
    }

    /// Events about the blob since the first of its mounts was made.
    pub fn events(&self) -> u64 {
        self.events.load(Ordering::Relaxed)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut all = self.session.lock();
        if let Some(watched) = all.get_mut(&self.id) {
            watched.watches -= 1;
            if let Some(count) = watched.images.get_mut(&self.image) {
                *count -= 1;
            }
            watched.images.retain(|_, count| *count > 0);
            watched.mounting -= usize::from(self.mounting);
        }
        self.session.settle(self.id, &mut all);
        self.session.close_unused(&self.image, &all);
    }
}
