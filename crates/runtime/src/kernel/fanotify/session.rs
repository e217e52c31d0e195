//! The loop that answers readers.
//!
//! ```text
//! kernel ── event ──▶ thread: parse, find blob ── ready ──▶ allow
//!                                   └─ missing ──▶ task: ensure ── done ──▶ allow
//!                                                              └─ failed ─▶ deny (EIO)
//! ```
//!
//! One thread reads the groups of all images in turn, one event at a time: several would wake each
//! other up for every event, and a slow event must not hold up another one that was read with it.
//! Tasks answer in any order.
//!
//! What is known of an event that waits is in the [`Journal`], and the keeper holds the group, the
//! journal and every marked file: when this process dies, its successor answers.
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
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use lazuli_image::{Decoded, Digest};
use lazuli_sys::{
    fanotify::{Group, Response},
    limit::raise_descriptors,
};
use tokio::{
    runtime::Handle,
    task::{AbortHandle, JoinSet},
};

use super::{
    abi::{self, Event},
    groups::{self, Groups},
    journal::{FileId, Journal, Unanswered},
    listener::listen,
    pending::{Channel, Miss, Pending, file_id},
    shares::{Admission, Slots},
    watch::Watch,
};
use crate::{
    cache::{Account, CachedBlob},
    keeper::{KeptDescriptor, Link},
};

/// The common group's name with the keeper. Those of images begin like this.
pub const GROUP: &str = "fanotify";

/// How the names of marked files begin.
pub const BLOB: &str = "blob-";

/// One event of this many descriptors may wait at a time, the others stay in the kernel's queue,
/// see [`slots`](super::shares). The kernel denies an event for which there is no descriptor, so
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
/// When a session is dropped the kernel lets everybody through who waits, so every mount has to be
/// gone before. A [`Watch`] keeps its session alive for that reason.
pub struct Session {
    groups: Arc<Groups>,
    /// For events that were read and wait for data.
    pub(super) slots: Arc<Slots>,
    watched: Mutex<HashMap<FileId, Watched>>,
    runtime: Handle,
    link: Arc<Link>,
    /// Whether readers are answered.
    listening: AtomicBool,
    /// Whether an earlier process may have marked files, in whatever groups.
    is_resumed: bool,
}

/// What an earlier process of the same keeper left.
#[derive(Debug)]
pub struct Handover {
    /// The common group, with its marks and its queue.
    pub group: OwnedFd,
    /// Those of images, by their names with the keeper.
    pub groups: Vec<(String, OwnedFd)>,
    /// The journal.
    pub journal: Journal,
    /// What is in it.
    pub unanswered: Vec<Unanswered>,
}

/// What the session knows about a file.
pub(super) struct Watched {
    blob: Arc<CachedBlob>,
    events: Arc<AtomicU64>,
    /// Mounts that live or are being made.
    pub(super) watches: usize,
    /// The images that they are of, with their number.
    pub(super) images: HashMap<Digest, usize>,
    /// Of these, the ones that are being made.
    pub(super) mounting: usize,
    marked: Option<Mark>,
    completion: AbortHandle,
}

/// A mark on a file.
struct Mark {
    channel: Arc<Channel>,
    /// The keeper holds the file as long as it is marked, since a file that is opened under a mark
    /// raises events for its own user.
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
        Self::new(link, group, journal, false)
    }

    /// Goes on for a process that died. Nobody is answered before [`Session::listen`], after every
    /// file was watched again that has a mount. Events of which nothing is known are denied here,
    /// see [`Journal`].
    ///
    /// # Panics
    /// Outside a tokio runtime: events are handled there.
    pub fn resume(
        link: &Arc<Link>,
        handover: Handover,
    ) -> Result<(Arc<Self>, Vec<Unanswered>), SessionError> {
        let Handover { group, groups, journal, unanswered } = handover;
        let session = Self::new(link, group.into(), journal, true)?;
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
        is_resumed: bool,
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
            is_resumed,
        }))
    }

    /// Denies those who wait now, before [`Session::listen`]: what the kernel was to read ahead for
    /// them is given up, and what they need they ask for again.
    pub fn deny_queued(&self) {
        let readers = self.groups.deny_queued(self.slots.limit());
        tracing::warn!(readers, "turned away");
    }

    /// Starts the thread, and answers what an earlier process left. The result ends when that is
    /// done, and must not be dropped before.
    pub fn listen(
        self: &Arc<Self>,
        left: Vec<Unanswered>,
    ) -> Result<impl Future<Output = ()> + Send + use<>, SessionError> {
        let mut answers = JoinSet::new();
        let channels: Arc<[_]> = self.groups.all().into();
        for Unanswered { number, placeholder, file, offset, count } in left {
            let pending = Pending::left(&channels, number, placeholder);
            let Some(miss) = self.look(pending, file, offset, count, 0) else { continue };
            // There are no more of them than slots; without one it is denied.
            if let Admission::Slot(slot) = self.slots.admit_left(miss.account, Instant::now()) {
                let holder = slot.holder();
                holder.is(answers.spawn_on(miss.fetch(slot), &self.runtime));
            }
        }
        self.listening.store(true, Ordering::Release);
        let (groups, weak) = (self.groups.clone(), Arc::downgrade(self));
        thread::Builder::new()
            .name("fanotify".into())
            .spawn(move || listen(&groups, &weak))
            .map_err(SessionError::Listen)?;
        Ok(async { drop(answers.join_all().await) })
    }

    /// Cuts a file to nothing that no mount uses which can be served: who reads from it gets EIO
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
    /// nobody has opened, `open` may be marked as well.
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
            // To release what is not held changes nothing.
            if let Ok(id) = file_id(file) {
                self.link.release(&name(id));
            }
        }
        let all = self.lock();
        let used: HashSet<_> =
            all.values().flat_map(|watched| watched.images.keys()).map(groups::name).collect();
        self.groups.close_others(|name| used.contains(name));
    }

    /// Fails silently where there is no mark.
    fn unmark_everywhere(&self, file: BorrowedFd<'_>) {
        for channel in self.groups.all() {
            let unmarked = channel.group.unmark(file);
            tracing::debug!(?file, group = channel.number, ?unmarked, "not needed any more");
        }
    }

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

    /// Marks a file in the group that its events belong to, and in no other one.
    fn mark(&self, id: FileId, watched: &mut Watched) -> io::Result<()> {
        let mut images = watched.images.keys();
        let channel = match (images.next(), images.next()) {
            (Some(image), None) => self.groups.of(image),
            _ => self.groups.common().clone(),
        };
        let file = watched.blob.file().as_fd();
        let Some(before) = &mut watched.marked else {
            let held = self.link.hold(name(id), watched.blob.clone());
            channel.group.mark(file)?;
            if self.is_resumed {
                let others = self.groups.all();
                let others = others.iter().filter(|other| !Arc::ptr_eq(other, &channel));
                // Fails where there is none.
                others.for_each(|other| drop(other.group.unmark(file)));
            }
            watched.marked = Some(Mark { channel, _held: held });
            return Ok(());
        };
        if !Arc::ptr_eq(&before.channel, &channel) {
            channel.group.mark(file)?;
            let before = std::mem::replace(&mut before.channel, channel);
            // Costs time only: the same is asked in both, and answered.
            if let Err(error) = before.group.unmark(file) {
                tracing::warn!(blob = ?watched.blob, %error, "a file stays marked in two groups");
            }
        }
        Ok(())
    }

    /// Has the files that are marked in a group, which has many readers, marked in another one of
    /// the same image.
    pub(super) fn spread(&self, channel: &Arc<Channel>) -> io::Result<()> {
        let mut all = self.lock();
        let is_here = |watched: &Watched| {
            watched.marked.as_ref().is_some_and(|mark| Arc::ptr_eq(&mark.channel, channel))
        };
        let ids: Vec<_> = all.iter().filter(|(_, w)| is_here(w)).map(|(id, _)| *id).collect();
        let first = ids.first().and_then(|id| all.get(id));
        // In the common group are files of other images.
        let Some(image) = first.filter(|_| channel.number != self.groups.common().number) else {
            return Ok(());
        };
        if let Some(image) = image.images.keys().next() {
            self.groups.add(image)?;
        }
        for id in ids {
            if let Some(watched) = all.get_mut(&id) {
                self.mark(id, watched)?;
            }
        }
        Ok(())
    }

    /// Marks the file of a blob that is not complete any more, if a mount uses it.
    fn mark_again(self: &Arc<Self>, id: FileId) -> io::Result<()> {
        let mut all = self.lock();
        let Some(watched) = all.get_mut(&id) else { return Ok(()) };
        self.mark(id, watched)?;
        watched.completion.abort();
        watched.completion = self.unmark_when_complete(id, &watched.blob);
        Ok(())
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

    /// Removes a mark that is not needed any more: from then on the kernel reads the file without
    /// us.
    pub(super) fn settle(&self, id: FileId, all: &mut MutexGuard<'_, HashMap<FileId, Watched>>) {
        let Some(watched) = all.get_mut(&id) else { return };
        // Before anybody is answered no mark goes: who gave up here may not have cut the file yet.
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
            all.remove(&id);
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
    fn find(&self, id: FileId) -> Option<Arc<CachedBlob>> {
        let all = self.lock();
        let watched = all.get(&id)?;
        watched.events.fetch_add(1, Ordering::Relaxed);
        Some(watched.blob.clone())
    }

    /// Whether anybody can ask whose events this account does not pay.
    fn has_others(&self, account: Account) -> bool {
        let marked = |watched: &Watched| watched.marked.is_some();
        self.lock().values().any(|watched| marked(watched) && watched.blob.account() != account)
    }

    /// Asks for a slot for an event.
    fn admit(&self, miss: &Miss) -> Admission {
        // In the group of an image nobody else waits behind it.
        let others = || miss.is_in_common && self.has_others(miss.account);
        self.slots.admit(miss.account, Instant::now(), others)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<FileId, Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes an event, and answers it unless data is missing. Whatever goes wrong on the way drops
    /// `pending`, which denies.
    pub(super) fn receive(
        &self,
        channel: &Channel,
        bytes: &[u8],
        pending: Pending,
    ) -> Option<Miss> {
        let (offset, count, thread) = match abi::parse(bytes) {
            Ok(Event::PreAccess { offset, count, thread }) => (offset, count, thread),
            Ok(Event::Overflow) => {
                tracing::error!("the kernel lost events: readers may have seen zeros");
                return None;
            }
            Err(error) => {
                tracing::error!(%error, "cannot read an event");
                return None;
            }
        };
        let file = pending.file_id().ok()?;
        channel.journal.note(pending.number, file, offset, count);
        let thread = if channel.reports_threads { thread } else { 0 };
        let miss = self.look(pending, file, offset, count, thread)?;
        Some(Miss { is_in_common: channel.number == self.groups.common().number, ..miss })
    }

    /// Answers an event at once, or says what is missing for an answer.
    fn look(
        &self,
        pending: Pending,
        file: FileId,
        offset: u64,
        count: u64,
        thread: i32,
    ) -> Option<Miss> {
        // About no byte: the file is being cut.
        if count == 0 {
            pending.allow();
            return None;
        }
        let Some(blob) = self.find(file) else {
            tracing::warn!(thread, ?file, "event for a file that is not a known blob");
            return None;
        };
        // The kernel may ask behind the end, for example to find it.
        let end = offset.saturating_add(count).min(blob.file_size());
        let range = Decoded(offset.min(end))..Decoded(end);
        let account = blob.account();
        Miss { pending, blob, range, thread, account, is_in_common: false }.unless_ready()
    }

    /// Lets an event wait in a task, if there is a slot for it. If it is to be asked again, it is
    /// returned.
    pub(super) fn slot(&self, miss: Miss) -> Option<Miss> {
        match self.admit(&miss) {
            Admission::Slot(slot) => {
                let holder = slot.holder();
                holder.is(self.runtime.spawn(miss.fetch(slot)).abort_handle());
            }
            Admission::Later => return Some(miss),
            Admission::Denied => {
                let Miss { pending, blob, account, .. } = miss.unless_ready()?;
                tracing::warn!(?account, blob = %blob.id(), "too many readers wait for data that does not come");
                pending.deny();
            }
        }
        None
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
