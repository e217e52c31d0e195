//! The fanotify groups of a process and the files that are marked in them.
//!
//! The keeper holds the groups, the [`Journal`] and every marked file: when this process dies, its
//! successor answers the waiting readers.
//!
//! A file is marked from before the mount opens it (the kernel looks for marks then, and never
//! again) until its blob is complete. It stays known for as long as a mount of it lives, since
//! events that were queued before a mark was removed still want an answer.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    fs::File,
    io,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd, RawFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use lazuli_image::Digest;
use lazuli_sys::{
    fanotify::{Group, Response},
    limit::raise_descriptors,
};
use tokio::{runtime::Handle, task::AbortHandle};

use super::{
    answer::{Channel, file_id},
    groups::{self, Groups},
    journal::{FileId, Journal, Unanswered},
    slots::Slots,
};
use crate::{
    cache::CachedBlob,
    keeper::{KeptDescriptor, Link, names::BLOB},
    sharing::Account,
    sync::lock,
};

/// One event of this many descriptors may wait at a time, the others stay in the kernel's queue,
/// see [`slots`](super::slots). The kernel denies an event for which there is no descriptor, so
/// there must always be some left for blobs and connections.
const SHARE: u32 = 4;

/// The most events of an earlier process that this one answers.
pub fn most_unanswered() -> usize {
    raise_descriptors().map_or(1, |limit| (limit / SHARE) as usize)
}

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

/// The fanotify groups of a process, and the blobs that are marked in them.
///
/// When a session is dropped the kernel lets all waiting readers through, so every mount has to be
/// gone before. A [`Watch`](super::Watch) keeps its session alive for that reason.
pub struct Session {
    pub(super) groups: Arc<Groups>,
    /// For events that were read and wait for data.
    pub(super) slots: Arc<Slots>,
    watched: Mutex<HashMap<FileId, Watched>>,
    pub(super) runtime: Handle,
    link: Arc<Link>,
    /// Whether readers are answered.
    pub(super) listening: AtomicBool,
    earlier: Earlier,
}

/// Whether files may have marks already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Earlier {
    /// The groups are new.
    None,
    /// A process before this one may have marked files, in any of its groups.
    Process,
}

/// The session of an earlier process of the same keeper.
#[derive(Debug)]
pub struct Handover {
    /// The common group, with its marks and its queue.
    pub group: OwnedFd,
    /// Those of images and shared blobs, by their names with the keeper.
    pub groups: Vec<(String, OwnedFd)>,
    /// The journal.
    pub journal: Journal,
    /// The events in the journal.
    pub unanswered: Vec<Unanswered>,
}

/// A watched file.
pub(super) struct Watched {
    pub(super) blob: Arc<CachedBlob>,
    pub(super) events: Arc<AtomicU64>,
    /// Mounts that live or are being made.
    pub(super) watches: usize,
    /// The images that they are of, with their number.
    pub(super) images: HashMap<Digest, usize>,
    /// The watches whose mounts are being made.
    pub(super) mounting: usize,
    pub(super) marked: Option<Mark>,
    pub(super) completion: AbortHandle,
}

impl Watched {
    /// Whose group the file is marked in: the only image's that has the blob, or the blob's own.
    fn owner(&self) -> Digest {
        let mut images = self.images.keys();
        match (images.next(), images.next()) {
            (Some(image), None) => *image,
            _ => self.blob.id(),
        }
    }
}

/// A mark on a file.
pub(super) struct Mark {
    channel: Arc<Channel>,
    /// The keeper holds the file as long as it is marked: opening a file under a mark raises events
    /// for its own user.
    _held: KeptDescriptor,
}

impl Session {
    /// A session with a group of its own.
    ///
    /// # Panics
    /// Outside a tokio runtime: events are handled there.
    pub fn start(link: &Arc<Link>) -> Result<Arc<Self>, SessionError> {
        let group = Group::new().map_err(SessionError::Listen)?;
        let journal = Journal::create().map_err(SessionError::Listen)?;
        Self::new(link, group, journal, Earlier::None)
    }

    /// Continues the session of a dead process. No reader is answered before [`Session::listen`];
    /// until then, every file of a mount must be watched again. Events that are not in the journal
    /// are denied here, see [`Journal`].
    ///
    /// # Panics
    /// Outside a tokio runtime: events are handled there.
    pub fn resume(
        link: &Arc<Link>,
        handover: Handover,
    ) -> Result<(Arc<Self>, Vec<Unanswered>), SessionError> {
        let Handover { group, groups, journal, unanswered } = handover;
        let session = Self::new(link, group.into(), journal, Earlier::Process)?;
        for (name, group) in groups {
            session.groups.resume(name, group).map_err(SessionError::Listen)?;
        }
        let known: Vec<_> = unanswered.iter().map(|event| event.number).collect();
        let unknown: usize =
            session.groups.all().iter().map(|channel| deny_unknown(channel, &known)).sum();
        tracing::info!(known = known.len(), unknown, "events of the worker before this one");
        Ok((session, unanswered))
    }

    fn new(
        link: &Arc<Link>,
        group: Group,
        journal: Journal,
        earlier: Earlier,
    ) -> Result<Arc<Self>, SessionError> {
        // Each reader that waits holds a descriptor of ours.
        let descriptors = raise_descriptors().map_err(SessionError::Listen)?;
        let groups = Groups::new(link, group, journal).map_err(SessionError::Listen)?;
        Ok(Arc::new(Session {
            groups: Arc::new(groups),
            slots: Slots::new((descriptors / SHARE) as usize),
            watched: Mutex::default(),
            runtime: Handle::current(),
            link: link.clone(),
            listening: AtomicBool::new(false),
            earlier,
        }))
    }

    /// Denies waiting readers, before [`Session::listen`]. The kernel gives up their readahead, and
    /// asks again for the pages that they need.
    pub fn deny_queued(&self) {
        let readers = self.groups.deny_queued(self.slots.limit());
        tracing::warn!(readers, "turned away");
    }

    /// Cuts a file to nothing that no mount uses which can be served: its readers get EIO
    /// then, and no holes. If it is marked, the kernel asks before it does so.
    pub fn cut_off(&self, path: &Path) {
        let cut = || {
            let file = File::options().write(true).open(path)?;
            let metadata = file.metadata()?;
            let watched = self.lock().get(&(metadata.dev(), metadata.ino())).map(|watched| {
                (watched.watches > 0).then_some(()).ok_or_else(|| watched.blob.clone())
            });
            match watched {
                Some(Ok(())) => Ok(()),
                Some(Err(blob)) => blob.cut_off(),
                None => file.set_len(0),
            }
        };
        if let Err(error) = cut() {
            tracing::error!(path = %path.display(), %error, "readers may see holes");
        }
    }

    /// Takes the marks away of an earlier process that no mount needs. `files` are those that
    /// are not open, `open` may be marked as well.
    pub fn forget_others(&self, files: &[File], open: &[Arc<CachedBlob>]) {
        let unused: Vec<_> = {
            let mut all = self.lock();
            let ids: Vec<_> = all.keys().copied().collect();
            ids.into_iter().for_each(|id| self.settle(id, &mut all));
            let files = files.iter().chain(open.iter().map(|blob| blob.file()));
            files.filter(|file| file_id(file).is_ok_and(|id| !all.contains_key(&id))).collect()
        };
        for file in unused {
            self.unmark_everywhere(file.as_fd());
            // Releasing a name that is not held has no effect.
            if let Ok(id) = file_id(file) {
                self.link.release(&name(id));
            }
        }
        let all = self.lock();
        let owners = |it: &Watched| it.images.keys().copied().chain([it.blob.id()]).collect();
        let owners = all.values().flat_map(|watched| -> Vec<Digest> { owners(watched) });
        let used: HashSet<_> = owners.map(|owner| groups::name(&owner)).collect();
        self.groups.close_others(|name| used.contains(name));
    }

    /// Fails silently where there is no mark.
    fn unmark_everywhere(&self, file: BorrowedFd<'_>) {
        for channel in self.groups.all() {
            let unmarked = channel.group.unmark(file);
            tracing::debug!(?file, group = channel.number, ?unmarked, "not needed any more");
        }
    }

    /// Marks a file in the group that its events belong to, and in no other one.
    pub(super) fn mark(&self, id: FileId, watched: &mut Watched) -> io::Result<()> {
        let channel = self.groups.of(&watched.owner());
        let file = watched.blob.file().as_fd();
        let Some(before) = &mut watched.marked else {
            let held = self.link.hold(name(id), watched.blob.clone());
            channel.group.mark(file)?;
            if self.earlier == Earlier::Process {
                let others = self.groups.all();
                let others = others.iter().filter(|other| !Arc::ptr_eq(other, &channel));
                // Fails where there is no mark.
                others.for_each(|other| drop(other.group.unmark(file)));
            }
            watched.marked = Some(Mark { channel, _held: held });
            return Ok(());
        };
        if !Arc::ptr_eq(&before.channel, &channel) {
            channel.group.mark(file)?;
            let before = std::mem::replace(&mut before.channel, channel);
            // Harmless but slow: each read raises an event in both groups, and both are answered.
            if let Err(error) = before.group.unmark(file) {
                tracing::warn!(blob = ?watched.blob, %error, "a file stays marked in two groups");
            }
        }
        Ok(())
    }

    /// Moves the marks of a group with many readers to another group of the same image, or of the
    /// same blob that images share.
    pub(super) fn spread(&self, channel: &Arc<Channel>) -> io::Result<()> {
        let mut all = self.lock();
        let is_here = |watched: &Watched| {
            watched.marked.as_ref().is_some_and(|mark| Arc::ptr_eq(&mark.channel, channel))
        };
        let ids: Vec<_> = all.iter().filter(|(_, w)| is_here(w)).map(|(id, _)| *id).collect();
        // The common group also has the files of other images, so it is not split.
        let is_common = channel.number == self.groups.common().number;
        let first = ids.first().filter(|_| !is_common).and_then(|id| all.get(id));
        let Some(first) = first else { return Ok(()) };
        self.groups.add(&first.owner())?;
        for id in ids {
            if let Some(watched) = all.get_mut(&id) {
                self.mark(id, watched)?;
            }
        }
        Ok(())
    }

    /// Marks the file of a blob that is not complete any more, if a mount uses it.
    pub(super) fn mark_again(self: &Arc<Self>, id: FileId) -> io::Result<()> {
        let mut all = self.lock();
        let Some(watched) = all.get_mut(&id) else { return Ok(()) };
        self.mark(id, watched)?;
        watched.completion.abort();
        watched.completion = self.unmark_when_complete(id, &watched.blob);
        Ok(())
    }

    pub(super) fn unmark_when_complete(
        self: &Arc<Self>,
        id: FileId,
        blob: &Arc<CachedBlob>,
    ) -> AbortHandle {
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

    /// Removes a mark that is not needed any more: from then on the kernel reads the file without
    /// us.
    pub(super) fn settle(&self, id: FileId, all: &mut MutexGuard<'_, HashMap<FileId, Watched>>) {
        let Some(watched) = all.get_mut(&id) else { return };
        // No mark is removed before readers are answered: a lost file may not have been truncated
        // yet.
        let unused = watched.watches == 0 && self.listening.load(Ordering::Acquire);
        let complete = watched.mounting == 0 && watched.blob.is_complete();
        if let Some(mark) = watched.marked.as_ref().filter(|_| unused || complete) {
            match mark.channel.group.unmark(watched.blob.file().as_fd()) {
                Ok(()) => watched.marked = None,
                // Costs time only: events go on and are answered.
                Err(error) => {
                    tracing::warn!(blob = ?watched.blob, %error, "cannot remove the mark")
                }
            }
        }
        if unused {
            watched.completion.abort();
            let blob = watched.blob.id();
            all.remove(&id);
            self.groups.close(&blob);
        }
    }

    /// Closes the group of an image that has no file system any more.
    pub(super) fn close_unused(
        &self,
        image: &Digest,
        all: &MutexGuard<'_, HashMap<FileId, Watched>>,
    ) {
        let is_used = all.values().any(|watched| watched.images.contains_key(image));
        if !is_used && self.listening.load(Ordering::Acquire) {
            self.groups.close(image);
        }
    }

    /// The blob behind a file, counting an event about it.
    pub(super) fn find(&self, id: FileId) -> Option<Arc<CachedBlob>> {
        let all = self.lock();
        let watched = all.get(&id)?;
        watched.events.fetch_add(1, Ordering::Relaxed);
        Some(watched.blob.clone())
    }

    /// Returns whether events of other accounts can come.
    pub(super) fn has_others(&self, account: Account) -> bool {
        let marked = |watched: &Watched| watched.marked.is_some();
        self.lock().values().any(|watched| marked(watched) && watched.blob.account() != account)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<FileId, Watched>> {
        lock(&self.watched)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.groups.stop();
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("watched", &self.lock().len()).finish_non_exhaustive()
    }
}

/// Denies events that the process before has read and did not get to note.
fn deny_unknown(channel: &Channel, known: &[RawFd]) -> usize {
    if channel.number != 0 && !channel.journal.may_have_read(channel.key) {
        return 0;
    }
    // Also numbers that this process cannot have: the one before may have had a higher limit.
    (0..channel.journal.limit())
        .filter(|number| known.binary_search(number).is_err())
        .filter(|number| channel.group.respond(*number, Response::Deny).is_ok())
        .count()
}

/// The keeper's name of a marked file.
fn name(id: FileId) -> String {
    format!("{BLOB}{}-{}", id.0, id.1)
}
