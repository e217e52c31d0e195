//! The thread that reads events, and the handling of each.
//!
//! ```text
//! kernel ── event ──▶ thread: parse, find blob ── ready ──▶ allow
//!                                   └─ missing ──▶ task: ensure ── done ──▶ allow
//!                                                              └─ failed ─▶ deny (EIO)
//! ```
//!
//! One thread reads the groups of all images in turn, one event at a time: several would wake each
//! other up for every event, and a slow event must not hold up another one that was read with it.
//! Tasks answer in any order. An event that waits is noted in the journal.

use std::{
    io, mem,
    os::fd::AsRawFd as _,
    sync::{Arc, Weak, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use lazuli_image::Decoded;
use tokio::task::JoinSet;

use super::{
    abi::{self, Event},
    answer::{Channel, Miss, Pending},
    groups::Groups,
    journal::{FileId, Unanswered},
    session::{Session, SessionError},
    slots::Admission,
};

/// Pause after a failed read of a queue, for example for lack of descriptors (the kernel has denied
/// that reader already), and before an event asks for a slot again.
const RETRY_AFTER: Duration = Duration::from_millis(10);

impl Session {
    /// Starts the thread, and answers events that an earlier process left. The returned task ends
    /// when that is done, and must not be dropped before.
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

    /// Asks for a slot for an event.
    fn admit(&self, miss: &Miss) -> Admission {
        // In the group of an image no other image's event waits behind it.
        let others = || miss.is_in_common && self.has_others(miss.account);
        self.slots.admit(miss.account, Instant::now(), others)
    }

    /// Notes an event, and answers it unless data is missing. Any failure on the way drops
    /// `pending`, which denies the read.
    fn receive(&self, channel: &Channel, bytes: &[u8], pending: Pending) -> Option<Miss> {
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

    /// Answers an event at once, or returns the missing range.
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

/// Reads events in turn from every group that has some, until the end.
fn listen(groups: &Groups, session: &Weak<Session>) {
    // The next event of each group that has to wait for a slot; events behind it wait in the queue.
    let mut without_slot: Vec<(Arc<Channel>, Miss)> = Vec::new();
    loop {
        let again: Vec<_> = mem::take(&mut without_slot);
        without_slot.extend(again.into_iter().filter_map(|(channel, miss)| {
            // Without a session all events are denied.
            let miss = session.upgrade().and_then(|session| session.slot(miss));
            if miss.is_none() {
                groups.take_queued(&channel);
            }
            Some((channel, miss?))
        }));
        let timeout = (!without_slot.is_empty()).then_some(RETRY_AFTER);
        let ready = match groups.wait(timeout) {
            Ok(Some(ready)) => ready,
            Ok(None) => return,
            Err(error) => {
                pause(&error);
                continue;
            }
        };
        for channel in ready {
            if let Some(miss) = read(groups, &channel, session) {
                groups.leave_queued(&channel);
                without_slot.push((channel, miss));
            }
        }
    }
}

/// Reads one event and answers it, or has it wait. If it is to be asked again, it is returned.
fn read(groups: &Groups, channel: &Arc<Channel>, session: &Weak<Session>) -> Option<Miss> {
    groups.journal().reads(channel.key);
    let mut incoming = match channel.group.read() {
        Ok(incoming) => incoming?,
        Err(error) => {
            pause(&error);
            return None;
        }
    };
    let Some(file) = incoming.file.take() else {
        tracing::error!(event = ?abi::parse(incoming.bytes()), "event without a file");
        return None;
    };
    let pending = Pending::new(channel, file.as_raw_fd(), file);
    let session = session.upgrade()?;
    if channel.fills_up()
        && let Err(error) = session.spread(channel)
    {
        tracing::warn!(%error, "many readers wait for one fanotify group");
    }
    let miss = session.receive(channel, incoming.bytes(), pending)?;
    session.slot(miss)
}

fn pause(error: &io::Error) {
    tracing::error!(%error, "cannot read pre-content events");
    thread::sleep(RETRY_AFTER);
}
