//! The loop that answers readers.
//!
//! ```text
//! kernel ── event ──▶ thread: parse, find blob ── ready ──▶ allow
//!                                   └─ missing ──▶ task: ensure ── done ──▶ allow
//!                                                              └─ failed ─▶ deny (EIO)
//! ```
//!
//! One thread reads, one event at a time: several would wake each other up for every event, and a slow
//! event must not hold up another one that was read with it. Tasks answer in any order.
//!
//! A file is marked from before the mount opens it (the kernel looks for marks then, and never again) until
//! its blob is complete. It stays known for as long as a mount of it lives, since events that
//! were queued before a mark was removed still want an answer.

use std::{
    collections::HashMap,
    fmt, io,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use lazuli_image::Decoded;
use lazuli_sys::{
    fanotify::{Group, Response},
    limit::raise_descriptors,
};
use rustix::{
    event::{EventfdFlags, eventfd},
    io::Errno,
};
use tokio::{runtime::Handle, task::AbortHandle};

use super::abi::{self, Event};
use crate::cache::CachedBlob;

/// Pause after the queue could not be read, for example for want of descriptors (the kernel has
/// denied that reader already).
const BREATH: Duration = Duration::from_millis(10);

/// Why readers cannot be stopped.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// No group: CAP_SYS_ADMIN is missing, or the kernel lacks fanotify.
    #[error("cannot listen for pre-content events")]
    Listen(#[source] io::Error),
    /// The file system of the cache, or the kernel, has no pre-content events.
    #[error("cannot ask for pre-content events on {}", path.display())]
    Mark {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
}

impl From<SessionError> for io::Error {
    fn from(error: SessionError) -> Self {
        let (SessionError::Listen(source) | SessionError::Mark { source, .. }) = &error;
        io::Error::new(source.kind(), error)
    }
}

/// Device and inode: which file an event is about.
type FileId = (u64, u64);

/// One fanotify group for all blobs of a process.
///
/// When a session is dropped the kernel lets everybody through who waits, so every mount has to be gone before.
/// A [`Watch`] keeps its session alive for that reason.
pub struct Session {
    group: Arc<Group>,
    watched: Mutex<HashMap<FileId, Watched>>,
    runtime: Handle,
    stop: OwnedFd,
}

/// What the session knows about a file.
#[derive(Debug)]
struct Watched {
    blob: Arc<CachedBlob>,
    events: Arc<AtomicU64>,
    /// Mounts that live or are being made.
    watches: usize,
    /// Of these, the ones that are being made.
    mounting: usize,
    marked: bool,
    completion: AbortHandle,
}

impl Session {
    /// Makes the group and starts the thread.
    ///
    /// # Panics
    /// Outside a tokio runtime: events are handled there.
    pub fn start() -> Result<Arc<Self>, SessionError> {
        // Each reader that waits holds a descriptor of ours; a reader for whom there is none gets EIO.
        if let Err(error) = raise_descriptors() {
            tracing::warn!(%error, "cannot raise the number of descriptors to the hard limit");
        }
        let group = Group::new().map_err(SessionError::Listen)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let stop = stop.map_err(|error| SessionError::Listen(error.into()))?;
        let ear = stop.try_clone().map_err(SessionError::Listen)?;
        let session = Arc::new(Session {
            group: Arc::new(group),
            watched: Mutex::default(),
            runtime: Handle::current(),
            stop,
        });
        let (group, weak) = (session.group.clone(), Arc::downgrade(&session));
        thread::Builder::new()
            .name("fanotify".into())
            .spawn(move || listen(&group, &ear, &weak))
            .map_err(SessionError::Listen)?;
        Ok(session)
    }

    /// Asks for events on the blob's file. To be called before the file is mounted.
    pub fn watch(self: &Arc<Self>, blob: Arc<CachedBlob>) -> Result<Watch, SessionError> {
        let mark_error = |source| SessionError::Mark { path: blob.path(), source };
        let metadata = blob.file().metadata().map_err(mark_error)?;
        let id = (metadata.dev(), metadata.ino());
        let mut all = self.lock();
        let watched = all.entry(id).or_insert_with(|| Watched {
            blob: blob.clone(),
            events: Arc::default(),
            watches: 0,
            mounting: 0,
            marked: false,
            completion: self.unmark_when_complete(id, &blob),
        });
        watched.watches += 1;
        watched.mounting += 1;
        let watch = Watch {
            session: self.clone(),
            blob: blob.clone(),
            id,
            events: watched.events.clone(),
            mounting: true,
        };
        if !watched.marked {
            if let Err(error) = self.group.mark(blob.file().as_fd()) {
                // The watch takes itself back, which needs the lock.
                drop(all);
                return Err(mark_error(error));
            }
            watched.marked = true;
        }
        drop(all);
        Ok(watch)
    }

    fn unmark_when_complete(self: &Arc<Self>, id: FileId, blob: &Arc<CachedBlob>) -> AbortHandle {
        let (session, blob) = (Arc::downgrade(self), blob.clone());
        let wait = async move {
            blob.completed().await;
            drop(blob);
            if let Some(session) = session.upgrade() {
                session.settle(id, &mut session.lock());
            }
        };
        self.runtime.spawn(wait).abort_handle()
    }

    /// Removes a mark that is not needed any more: from then on the kernel reads the file without us.
    fn settle(&self, id: FileId, all: &mut MutexGuard<'_, HashMap<FileId, Watched>>) {
        let Some(watched) = all.get_mut(&id) else { return };
        let unused = watched.watches == 0;
        let complete = watched.mounting == 0 && watched.blob.is_complete();
        if watched.marked && (unused || complete) {
            match self.group.unmark(watched.blob.file().as_fd()) {
                Ok(()) => watched.marked = false,
                // Costs time only: events go on and are answered.
                Err(error) => {
                    tracing::warn!(blob = ?watched.blob, %error, "cannot remove the mark")
                }
            }
        }
        if unused {
            watched.completion.abort();
            all.remove(&id);
        }
    }

    /// The blob behind a file, counting the event.
    fn find(&self, id: FileId) -> Option<Arc<CachedBlob>> {
        let all = self.lock();
        let watched = all.get(&id)?;
        watched.events.fetch_add(1, Ordering::Relaxed);
        Some(watched.blob.clone())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<FileId, Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers an event, now or from a task. Whatever goes wrong on the way drops `pending`, which denies.
    fn handle(&self, bytes: &[u8], pending: Pending) {
        let (offset, count, pid) = match abi::parse(bytes) {
            Ok(Event::PreAccess { offset, count, pid }) => (offset, count, pid),
            Ok(Event::Overflow) => {
                tracing::error!("the kernel lost events: readers may have seen zeros");
                return;
            }
            Err(error) => {
                tracing::error!(%error, "cannot read an event");
                return;
            }
        };
        let Some(blob) = pending.file_id().ok().and_then(|id| self.find(id)) else {
            tracing::warn!(pid, file = ?pending.file, "event for a file that is not a known blob");
            return;
        };
        // The kernel may ask behind the end, for example to find it.
        let end = (offset + count).min(blob.file_size());
        let range = Decoded(offset.min(end))..Decoded(end);
        if blob.is_ready(&range) {
            pending.allow();
            return;
        }
        self.runtime.spawn(async move {
            match blob.ensure(range.clone()).await {
                Ok(()) => pending.allow(),
                Err(error) => {
                    let cause = std::error::Error::source(&error).map(ToString::to_string);
                    tracing::error!(pid, ?range, %error, cause, "a read fails");
                    pending.deny();
                }
            }
        });
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Fails only when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("watched", &self.lock().len()).finish_non_exhaustive()
    }
}

/// Reads events until `stop` is readable.
fn listen(group: &Arc<Group>, stop: &OwnedFd, session: &Weak<Session>) {
    loop {
        match group.read() {
            Ok(Some(mut incoming)) => {
                let Some(file) = incoming.file.take() else {
                    tracing::error!(event = ?abi::parse(incoming.bytes()), "event without a file");
                    continue;
                };
                let pending = Pending { file, group: group.clone(), answered: false };
                if let Some(session) = session.upgrade() {
                    session.handle(incoming.bytes(), pending);
                }
            }
            Ok(None) => match group.wait(stop.as_fd()) {
                Ok(false) => {}
                Ok(true) => return,
                Err(error) => pause(&error),
            },
            Err(error) => pause(&error),
        }
    }
}

fn pause(error: &io::Error) {
    tracing::error!(%error, "cannot read pre-content events");
    thread::sleep(BREATH);
}

/// A reader that sleeps until this is answered. Dropping it denies, so that no fault of ours, a panic included,
/// lets a reader hang or see a hole.
#[must_use]
struct Pending {
    file: OwnedFd,
    group: Arc<Group>,
    answered: bool,
}

impl Pending {
    fn file_id(&self) -> io::Result<FileId> {
        let stat = rustix::fs::fstat(&self.file)?;
        Ok((stat.st_dev, stat.st_ino))
    }

    fn allow(mut self) {
        self.answer(Response::Allow);
    }

    fn deny(self) {
        drop(self);
    }

    fn answer(&mut self, response: Response) {
        self.answered = true;
        match self.group.respond(self.file.as_fd(), response) {
            Ok(()) => {}
            // The reader was killed meanwhile.
            Err(error) if error.raw_os_error() == Some(Errno::NOENT.raw_os_error()) => {}
            Err(error) => tracing::error!(%error, ?response, "cannot answer a reader"),
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.answered {
            self.answer(Response::Deny);
        }
    }
}

/// Keeps the file of one blob known for one mount. To be dropped when nothing uses that mount any more, and
/// not before: the kernel would let readers see the holes.
#[derive(Debug)]
#[must_use = "without it the blob's readers see holes"]
pub struct Watch {
    session: Arc<Session>,
    blob: Arc<CachedBlob>,
    id: FileId,
    events: Arc<AtomicU64>,
    mounting: bool,
}

impl Watch {
    /// To be called when the file is mounted: from then on the mark may go as soon as the blob is complete.
    pub fn mounted(&mut self) {
        if std::mem::take(&mut self.mounting) {
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

    /// Gives the blob up with readers left, see [`CachedBlob::cut_off`]. Until the session ends they
    /// still have to be answered, so that none of them slips through before the file is cut.
    pub fn cut_off(self) {
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
            watched.mounting -= usize::from(self.mounting);
        }
        self.session.settle(self.id, &mut all);
    }
}
