//! Where readers are answered.

use std::{
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
    sync::Arc,
};

use lazuli_image::Decoded;
use lazuli_sys::fanotify::{Group, Response};
use rustix::io::Errno;

use super::{
    journal::{FileId, Journal},
    shares::{Account, Slot, Slots},
};
use crate::cache::CachedBlob;

/// Where answers are given.
pub(super) struct Channel {
    pub(super) group: Group,
    pub(super) journal: Journal,
    /// For events that were read and wait for data.
    pub(super) slots: Arc<Slots>,
}

/// A reader that sleeps until this is answered. Dropping it denies, so that no fault of ours, a panic included,
/// lets a reader hang or see a hole.
#[must_use]
pub(super) struct Pending {
    pub(super) number: RawFd,
    /// Has the number, if this process can.
    pub(super) file: Option<OwnedFd>,
    pub(super) channel: Arc<Channel>,
    answered: bool,
}

impl Pending {
    pub(super) fn new(channel: &Arc<Channel>, number: RawFd, file: Option<OwnedFd>) -> Self {
        Pending { number, file, channel: channel.clone(), answered: false }
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
        self.answered = true;
        match self.channel.group.respond(self.number, response) {
            Ok(()) => {}
            // The reader was killed meanwhile.
            Err(error) if error.raw_os_error() == Some(Errno::NOENT.raw_os_error()) => {}
            Err(error) => tracing::error!(%error, ?response, "cannot answer a reader"),
        }
        self.channel.journal.strike(self.number);
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.answered {
            self.answer(Response::Deny);
        }
    }
}

/// An event about bytes that are not here.
pub(super) struct Miss {
    pub(super) pending: Pending,
    pub(super) blob: Arc<CachedBlob>,
    pub(super) range: Range<Decoded>,
    /// Of the reader.
    pub(super) thread: i32,
    pub(super) account: Account,
}

impl Miss {
    /// Answers it, if its bytes are here.
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

    /// Brings its bytes and answers it. Dropped on the way, which denies it, if its slot is taken away.
    pub(super) async fn fetch(self, slot: Slot) {
        match self.blob.ensure(self.range.clone()).await {
            Ok(()) => self.allow(),
            Err(error) => {
                let Miss { range, thread, .. } = &self;
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                tracing::error!(thread, ?range, %error, cause, "a read fails");
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

/// The channel's journal, as a descriptor.
pub(super) struct JournalOf(pub(super) Arc<Channel>);

impl AsFd for JournalOf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.journal.as_fd()
    }
}

pub(super) fn file_id(file: impl AsFd) -> io::Result<FileId> {
    let stat = rustix::fs::fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}
