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
//! What is known of an event that waits is in the [`Journal`], and the keeper holds the group, the journal and every
//! marked file: when this process dies, its successor answers.
//!
//! A file is marked from before the mount opens it (the kernel looks for marks then, and never again) until
//! its blob is complete. It stays known for as long as a mount of it lives, since events that
//! were queued before a mark was removed still want an answer.

use std::{
    collections::HashMap,
    fmt,
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use lazuli_image::{Decoded, Digest};
use lazuli_sys::{
    fanotify::{Group, Response},
    limit::raise_descriptors,
};
use rustix::event::{EventfdFlags, eventfd};
use tokio::{
    runtime::Handle,
    task::{AbortHandle, JoinSet},
};

use super::{
    abi::{self, Event},
    journal::{FileId, Journal, Unanswered},
    pending::{Channel, GroupOf, JournalOf, Miss, Pending, file_id},
    shares::{Account, Admission, Slots},
};
use crate::{
    cache::CachedBlob,
    keeper::{JOURNAL, KeptDescriptor, Link},
};

/// The group's name with the keeper.
pub const GROUP: &str = "fanotify";

/// How the names of marked files begin.
pub const BLOB: &str = "blob-";

/// One event of this many descriptors may wait at a time, the others stay in the kernel's queue, see [`slots`](super::shares). The kernel denies
/// an event for which there is no descriptor, so there must always be some left for blobs and connections.
const SHARE: u32 = 4;

/// The most events of an earlier process that this one answers.
pub fn most_unanswered() -> usize {
    raise_descriptors().map_or(1, |limit| (limit / SHARE) as usize)
}

/// Pause after the queue could not be read, for example for want of descriptors (the kernel has
/// denied that reader already), and before an event is asked again whether it may wait.
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

/// One fanotify group for all blobs of a process.
///
/// When a session is dropped the kernel lets everybody through who waits, so every mount has to be gone before.
/// A [`Watch`] keeps its session alive for that reason.
pub struct Session {
    channel: Arc<Channel>,
    watched: Mutex<HashMap<FileId, Watched>>,
    runtime: Handle,
    stop: OwnedFd,
    link: Arc<Link>,
    /// Whether readers are answered.
    listening: AtomicBool,
    /// Whether events name threads.
    reports_threads: bool,
    _held: [KeptDescriptor; 2],
}

/// What an earlier process of the same keeper left.
#[derive(Debug)]
pub struct Handover {
    /// The group, with its marks and its queue.
    pub group: OwnedFd,
    /// The journal.
    pub journal: Journal,
    /// What is in it.
    pub unanswered: Vec<Unanswered>,
}

/// What the session knows about a file.
#[derive(Debug)]
struct Watched {
    blob: Arc<CachedBlob>,
    events: Arc<AtomicU64>,
    /// Mounts that live or are being made.
    watches: usize,
    /// The images that they are of, with their number.
    images: HashMap<Digest, usize>,
    /// Of these, the ones that are being made.
    mounting: usize,
    /// The mark: the keeper holds the file as long as there is one, since a file that is opened under a mark
    /// raises events for its own user.
    marked: Option<KeptDescriptor>,
    completion: AbortHandle,
}

impl Session {
    /// A session with a group of its own.
    ///
    /// # Panics
    /// Outside a tokio runtime: events are handled there.
    pub fn start(link: &Arc<Link>) -> Result<Arc<Self>, SessionError> {
        let group = Group::new().map_err(SessionError::Listen)?;
        let journal = Journal::create().map_err(SessionError::Listen)?;
        Self::new(link, group, journal)
    }

    /// Goes on for a process that died. Nobody is answered before [`Session::listen`], after every file was watched
    /// again that has a mount. Events of which nothing is known are denied here, see [`Journal`].
    ///
    /// # Panics
    /// Outside a tokio runtime: events are handled there.
    pub fn resume(
        link: &Arc<Link>,
        handover: Handover,
    ) -> Result<(Arc<Self>, Vec<Unanswered>), SessionError> {
        let Handover { group, journal, unanswered } = handover;
        let session = Self::new(link, group.into(), journal)?;
        let known: Vec<_> = unanswered.iter().map(|event| event.number).collect();
        // Also numbers that this process cannot have: the one before may have had a higher limit.
        let unknown = (0..session.channel.journal.limit())
            .filter(|number| known.binary_search(number).is_err())
            .filter(|number| session.channel.group.respond(*number, Response::Deny).is_ok())
            .count();
        tracing::info!(known = known.len(), unknown, "events of the worker before this one");
        Ok((session, unanswered))
    }

    fn new(link: &Arc<Link>, group: Group, journal: Journal) -> Result<Arc<Self>, SessionError> {
        // Each reader that waits holds a descriptor of ours.
        let descriptors = raise_descriptors().map_err(SessionError::Listen)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let stop = stop.map_err(|error| SessionError::Listen(error.into()))?;
        let slots = Slots::new((descriptors / SHARE) as usize);
        let reports_threads = group.reports_threads().map_err(SessionError::Listen)?;
        let channel = Arc::new(Channel { group, journal, slots });
        let journal = link.hold(JOURNAL.to_owned(), Arc::new(JournalOf(channel.clone())));
        let group = link.hold(GROUP.to_owned(), Arc::new(GroupOf(channel.clone())));
        Ok(Arc::new(Session {
            channel,
            watched: Mutex::default(),
            runtime: Handle::current(),
            stop,
            link: link.clone(),
            listening: AtomicBool::new(false),
            reports_threads,
            _held: [journal, group],
        }))
    }

    /// Denies those who wait now, before [`Session::listen`]: what the kernel was to read ahead for them is given up, and what they
    /// need they ask for again.
    pub fn deny_queued(&self) {
        let mut waiting = Vec::new();
        // All of them first: who is denied asks again at once.
        while waiting.len() < self.channel.slots.limit()
            && let Ok(Some(mut incoming)) = self.channel.group.read()
        {
            let pending = |file: OwnedFd| Pending::new(&self.channel, file.as_raw_fd(), Some(file));
            waiting.extend(incoming.file.take().map(pending));
        }
        tracing::warn!(readers = waiting.len(), "turned away");
    }

    /// Starts the thread, and answers what an earlier process left. The result ends when that is done, and must not be
    /// dropped before.
    pub fn listen(
        self: &Arc<Self>,
        left: Vec<Unanswered>,
    ) -> Result<impl Future<Output = ()> + Send + use<>, SessionError> {
        let mut answers = JoinSet::new();
        for Unanswered { number, placeholder, file, offset, count } in left {
            let pending = Pending::new(&self.channel, number, placeholder);
            let Some(miss) = self.look(pending, file, offset, count, 0) else { continue };
            // There are no more of them than slots; without one it is denied.
            if let Admission::Slot(slot) = self.admit(&miss) {
                let holder = slot.holder();
                holder.is(answers.spawn_on(miss.fetch(slot), &self.runtime));
            }
        }
        self.listening.store(true, Ordering::Release);
        let stop = self.stop.try_clone().map_err(SessionError::Listen)?;
        let (channel, weak) = (self.channel.clone(), Arc::downgrade(self));
        thread::Builder::new()
            .name("fanotify".into())
            .spawn(move || listen(&channel, &stop, &weak))
            .map_err(SessionError::Listen)?;
        Ok(async { drop(answers.join_all().await) })
    }

    /// Cuts a file to nothing that no mount uses which can be served: who reads from it gets EIO then, and no holes. If
    /// it is marked, the kernel asks before it does so.
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

    /// Takes the marks away of an earlier process that no mount needs. `files` are those that nobody has opened,
    /// `open` may be marked as well.
    pub fn forget_others(&self, files: &[File], open: &[Arc<CachedBlob>]) {
        let unused: Vec<_> = {
            let mut all = self.lock();
            let ids: Vec<_> = all.keys().copied().collect();
            ids.into_iter().for_each(|id| self.settle(id, &mut all));
            let files = files.iter().chain(open.iter().map(|blob| blob.file()));
            files.filter(|file| file_id(file).is_ok_and(|id| !all.contains_key(&id))).collect()
        };
        for file in unused {
            // Fails when it has none. To release what is not held changes nothing.
            let unmarked = self.channel.group.unmark(file.as_fd());
            tracing::debug!(?file, ?unmarked, "not needed any more");
            if let Ok(id) = file_id(file) {
                self.link.release(&name(id));
            }
        }
    }

    /// Asks for events on the blob's file, for the image with this manifest. To be called before the file is mounted.
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
        };
        if watched.marked.is_none() {
            let held = self.link.hold(name(id), blob.clone());
            if let Err(error) = self.channel.group.mark(blob.file().as_fd()) {
                // The watch takes itself back, which needs the lock.
                drop(all);
                return Err(mark_error(error));
            }
            watched.marked = Some(held);
        }
        drop(all);
        let weak = Arc::downgrade(self);
        let guard =
            move || weak.upgrade().map_or(Ok(()), |session: Arc<Self>| session.mark_again(id));
        blob.set_guard("fanotify", Arc::new(guard));
        Ok(watch)
    }

    /// Marks the file of a blob that is not complete any more, if a mount uses it.
    fn mark_again(self: &Arc<Self>, id: FileId) -> io::Result<()> {
        let mut all = self.lock();
        let Some(watched) = all.get_mut(&id) else { return Ok(()) };
        if watched.marked.is_none() {
            let held = self.link.hold(format!("{BLOB}{}-{}", id.0, id.1), watched.blob.clone());
            self.channel.group.mark(watched.blob.file().as_fd())?;
            watched.marked = Some(held);
        }
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

    /// Removes a mark that is not needed any more: from then on the kernel reads the file without us.
    fn settle(&self, id: FileId, all: &mut MutexGuard<'_, HashMap<FileId, Watched>>) {
        let Some(watched) = all.get_mut(&id) else { return };
        // Before anybody is answered no mark goes: who gave up here may not have cut the file yet.
        let unused = watched.watches == 0 && self.listening.load(Ordering::Acquire);
        let complete = watched.mounting == 0 && watched.blob.is_complete();
        if watched.marked.is_some() && (unused || complete) {
            match self.channel.group.unmark(watched.blob.file().as_fd()) {
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

    /// The blob behind a file and who pays for its events, counting this one.
    fn find(&self, id: FileId) -> Option<(Arc<CachedBlob>, Account)> {
        let all = self.lock();
        let watched = all.get(&id)?;
        watched.events.fetch_add(1, Ordering::Relaxed);
        let mut images = watched.images.keys();
        let account = match (images.next(), images.next()) {
            (Some(image), None) => Account::Image(*image),
            _ => Account::Shared(id),
        };
        Some((watched.blob.clone(), account))
    }

    /// Whether anybody can ask whose events this account does not pay.
    fn has_others(&self, account: Account) -> bool {
        let pays = |id: &FileId, watched: &Watched| match account {
            Account::Image(image) => watched.images.keys().all(|other| *other == image),
            Account::Shared(file) => *id == file,
        };
        self.lock().iter().any(|(id, watched)| watched.marked.is_some() && !pays(id, watched))
    }

    /// Asks for a slot for an event.
    fn admit(&self, miss: &Miss) -> Admission {
        let others = || self.has_others(miss.account);
        self.channel.slots.admit(miss.account, Instant::now(), others)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<FileId, Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes an event, and answers it unless data is missing. Whatever goes wrong on the way drops `pending`, which denies.
    fn receive(&self, bytes: &[u8], pending: Pending) -> Option<Miss> {
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
        pending.channel.journal.note(pending.number, file, offset, count);
        let thread = if self.reports_threads { thread } else { 0 };
        self.look(pending, file, offset, count, thread)
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
        let Some((blob, account)) = self.find(file) else {
            tracing::warn!(thread, ?file, "event for a file that is not a known blob");
            return None;
        };
        // The kernel may ask behind the end, for example to find it.
        let end = offset.saturating_add(count).min(blob.file_size());
        let range = Decoded(offset.min(end))..Decoded(end);
        Miss { pending, blob, range, thread, account }.unless_ready()
    }

    /// Lets an event wait in a task, if there is a slot for it. If it is to be asked again, it is returned.
    fn slot(&self, miss: Miss) -> Option<Miss> {
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
fn listen(channel: &Arc<Channel>, stop: &OwnedFd, session: &Weak<Session>) {
    let mut unseated = None;
    loop {
        // Readers in the queue wait as those do that were read. Without a session everybody is denied.
        unseated = unseated.and_then(|miss| session.upgrade()?.slot(miss));
        if unseated.is_some() {
            thread::sleep(BREATH);
            continue;
        }
        match channel.group.read() {
            Ok(Some(mut incoming)) => {
                let Some(file) = incoming.file.take() else {
                    tracing::error!(event = ?abi::parse(incoming.bytes()), "event without a file");
                    continue;
                };
                let pending = Pending::new(channel, file.as_raw_fd(), Some(file));
                if let Some(session) = session.upgrade() {
                    unseated = session.receive(incoming.bytes(), pending);
                }
            }
            Ok(None) => match channel.group.wait(stop.as_fd()) {
                Ok(false) => {}
                Ok(true) => return,
                Err(error) => pause(&error),
            },
            Err(error) => pause(&error),
        }
    }
}

/// The keeper's name of a marked file.
fn name(id: FileId) -> String {
    format!("{BLOB}{}-{}", id.0, id.1)
}

fn pause(error: &io::Error) {
    tracing::error!(%error, "cannot read pre-content events");
    thread::sleep(BREATH);
}

/// Keeps the file of one blob known for one mount. To be dropped when nothing uses that mount any more, and
/// not before: the kernel would let readers see the holes.
#[derive(Debug)]
#[must_use = "without it the blob's readers see holes"]
pub struct Watch {
    session: Arc<Session>,
    blob: Arc<CachedBlob>,
    image: Digest,
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
        self.session.channel.slots.close();
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
    }
}
