//! Where readers are answered.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use lazuli_sys::fanotify::{Group, Response};
use rustix::io::Errno;

use super::journal::{FileId, Journal};

/// Where answers are given.
pub(super) struct Desk {
    pub(super) group: Group,
    pub(super) journal: Journal,
    /// Events that were read and not answered.
    pub(super) pending: AtomicU32,
    /// Most of them at a time.
    pub(super) limit: u32,
}

/// A reader that sleeps until this is answered. Dropping it denies, so that no fault of ours, a panic included,
/// lets a reader hang or see a hole.
#[must_use]
pub(super) struct Pending {
    pub(super) number: RawFd,
    /// Has the number, if this process can.
    pub(super) file: Option<OwnedFd>,
    pub(super) desk: Arc<Desk>,
    answered: bool,
}

impl Pending {
    pub(super) fn new(desk: &Arc<Desk>, number: RawFd, file: Option<OwnedFd>) -> Self {
        desk.pending.fetch_add(1, Ordering::Relaxed);
        Pending { number, file, desk: desk.clone(), answered: false }
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
        match self.desk.group.respond(self.number, response) {
            Ok(()) => {}
            // The reader was killed meanwhile.
            Err(error) if error.raw_os_error() == Some(Errno::NOENT.raw_os_error()) => {}
            Err(error) => tracing::error!(%error, ?response, "cannot answer a reader"),
        }
        self.desk.journal.strike(self.number);
        self.desk.pending.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.answered {
            self.answer(Response::Deny);
        }
    }
}

/// The desk's group, as a descriptor.
pub(super) struct GroupOf(pub(super) Arc<Desk>);

impl AsFd for GroupOf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.group.as_fd()
    }
}

/// The desk's journal, as a descriptor.
pub(super) struct JournalOf(pub(super) Arc<Desk>);

impl AsFd for JournalOf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.journal.as_fd()
    }
}

pub(super) fn file_id(file: impl AsFd) -> io::Result<FileId> {
    let stat = rustix::fs::fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}
