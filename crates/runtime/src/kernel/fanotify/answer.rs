//! Answers to readers.

use std::{
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use lazuli_image::Decoded;
use lazuli_sys::fanotify::{Group, Response};
use rustix::io::Errno;

use super::{
    journal::{FileId, Journal},
    slots::Slot,
};
use crate::{cache::CachedBlob, sharing::Account, sync::lock};

/// Readers of a group above which a thread of its own answers them: for each answer the kernel
/// wakes all of them, which takes milliseconds for thousands, and the thread for other images must
/// not wait for that.
const CROWD: usize = 64;

/// Readers of a group above which the image gets another one: each answer wakes all of the readers
/// of one group.
const FULL: usize = 1024;

/// A group, and where its events are noted.
pub(super) struct Channel {
    pub(super) group: Group,
    pub(super) journal: Arc<Journal>,
    /// Distinguishes the group from others of this process.
    pub(super) number: u64,
    /// Distinguishes the group for other processes.
    pub(super) key: u64,
    /// Whether events name the thread that reads.
    pub(super) reports_threads: bool,
    /// Number of events read and not answered.
    waiting: AtomicUsize,
    /// Whether the group was reported to be full.
    is_full: AtomicBool,
    /// Sends to the thread for crowds, once there was one.
    crowd: Mutex<Option<mpsc::Sender<Answer>>>,
}

impl Channel {
    pub(super) fn new(
        group: Group,
        journal: Arc<Journal>,
        number: u64,
        key: u64,
    ) -> io::Result<Self> {
        let reports_threads = group.reports_threads()?;
        let (waiting, is_full, crowd) = Default::default();
        Ok(Channel { group, journal, number, key, reports_threads, waiting, is_full, crowd })
    }

    /// Returns true once, when the group gets too many readers.
    pub(super) fn fills_up(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > FULL && !self.is_full.swap(true, Ordering::Relaxed)
    }

    /// Answers an event, here or in the thread for crowds.
    fn answer(self: &Arc<Self>, answer: Answer) {
        let answer = match self.waiting.fetch_sub(1, Ordering::Relaxed) > CROWD {
            true => self.in_crowd(answer),
            false => Some(answer),
        };
        if let Some(answer) = answer {
            self.give(answer);
        }
    }

    /// Passes an answer to the thread for crowds. Returns it if the thread cannot be started.
    fn in_crowd(self: &Arc<Self>, answer: Answer) -> Option<Answer> {
        let mut crowd = lock(&self.crowd);
        if crowd.is_none() {
            let (sender, answers) = mpsc::channel::<Answer>();
            // The sender is the channel's, so the thread ends with it.
            let channel = Arc::downgrade(self);
            let answer_all = move || {
                for answer in answers {
                    let Some(channel) = channel.upgrade() else { return };
                    channel.give(answer);
                }
            };
            let thread = thread::Builder::new().name("fanotify-crowd".into()).spawn(answer_all);
            match thread {
                Ok(_) => *crowd = Some(sender),
                Err(error) => tracing::warn!(%error, "no thread for the answers of a crowd"),
            }
        }
        match &*crowd {
            Some(crowd) => crowd.send(answer).err().map(|unsent| unsent.0),
            None => Some(answer),
        }
    }

    fn give(&self, answer: Answer) {
        self.respond(answer.number, answer.response);
        self.journal.strike(answer.number);
        // Only now another event may get its number.
        drop(answer.file);
    }

    /// Answers the event with a number, if the group has one.
    fn respond(&self, number: RawFd, response: Response) -> bool {
        match self.group.respond(number, response) {
            Ok(()) => true,
            // The reader was killed meanwhile, or waits for another group.
            Err(error) if error.raw_os_error() == Some(Errno::NOENT.raw_os_error()) => false,
            Err(error) => {
                tracing::error!(%error, ?response, "cannot answer a reader");
                false
            }
        }
    }
}

struct Answer {
    number: RawFd,
    file: OwnedFd,
    response: Response,
}

/// A reader that sleeps until this is answered. Dropping it denies, so that no fault of ours, a
/// panic included, lets a reader hang or see a hole.
#[must_use]
pub(super) struct Pending {
    pub(super) number: RawFd,
    /// Its descriptor number identifies the event. `None` when this process cannot have it, or
    /// after the answer.
    pub(super) file: Option<OwnedFd>,
    from: Origin,
}

/// The group of an event.
enum Origin {
    Group(Arc<Channel>),
    /// One of these: an earlier process read the event. All events of a process have different
    /// numbers.
    Any(Arc<[Arc<Channel>]>),
    Answered,
}

impl Pending {
    pub(super) fn new(channel: &Arc<Channel>, number: RawFd, file: OwnedFd) -> Self {
        channel.waiting.fetch_add(1, Ordering::Relaxed);
        Pending { number, file: Some(file), from: Origin::Group(channel.clone()) }
    }

    /// An event that an earlier process has read.
    pub(super) fn left(
        channels: &Arc<[Arc<Channel>]>,
        number: RawFd,
        placeholder: Option<OwnedFd>,
    ) -> Self {
        Pending { number, file: placeholder, from: Origin::Any(channels.clone()) }
    }

    pub(super) fn file_id(&self) -> io::Result<FileId> {
        self.file.as_ref().map_or_else(|| Err(Errno::BADF.into()), file_id)
    }

    pub(super) fn allow(mut self) {
        self.answer(Response::Allow);
    }

    pub(super) fn deny(self) {
        drop(self);
    }

    fn answer(&mut self, response: Response) {
        let number = self.number;
        match (std::mem::replace(&mut self.from, Origin::Answered), self.file.take()) {
            (Origin::Group(channel), Some(file)) => {
                channel.answer(Answer { number, file, response })
            }
            (Origin::Any(channels), file) => {
                channels.iter().find(|channel| channel.respond(number, response));
                if let Some(channel) = channels.first() {
                    channel.journal.strike(number);
                }
                drop(file);
            }
            _ => {}
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.answer(Response::Deny);
    }
}

/// An event for missing bytes.
pub(super) struct Miss {
    pub(super) pending: Pending,
    pub(super) blob: Arc<CachedBlob>,
    pub(super) range: Range<Decoded>,
    /// The reader's thread.
    pub(super) thread: i32,
    pub(super) account: Account,
    /// Whether events of other images queue behind it.
    pub(super) is_in_common: bool,
}

impl Miss {
    /// Allows the read if its bytes are ready.
    pub(super) fn unless_ready(self) -> Option<Self> {
        if !self.blob.is_ready(&self.range) {
            return Some(self);
        }
        self.allow();
        None
    }

    fn allow(self) {
        self.blob.let_through(self.thread, &self.range);
        self.pending.allow();
    }

    /// Brings its bytes and answers it. Dropped on the way, which denies it, if its slot is taken
    /// away.
    pub(super) async fn fetch(self, slot: Slot) {
        match self.blob.ensure(self.range.clone()).await {
            Ok(()) => self.allow(),
            Err(error) => {
                self.blob.report_failed_read(&self.range, &error, Some(self.thread));
                self.pending.deny();
            }
        }
        drop(slot);
    }
}

/// The channel's group, as a descriptor.
pub(super) struct GroupOf(pub(super) Arc<Channel>);

impl AsFd for GroupOf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.group.as_fd()
    }
}

/// The journal, as a descriptor.
pub(super) struct JournalOf(pub(super) Arc<Journal>);

impl AsFd for JournalOf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

pub(super) fn file_id(file: impl AsFd) -> io::Result<FileId> {
    let stat = rustix::fs::fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}
