//! The thread that reads events.

use std::{
    io, mem,
    os::fd::AsRawFd as _,
    sync::{Arc, Weak},
    thread,
    time::Duration,
};

use super::{
    abi,
    groups::Groups,
    pending::{Channel, Miss, Pending},
    session::Session,
};

/// Pause after a queue could not be read, for example for want of descriptors (the kernel has
/// denied that reader already), and before an event is asked again whether it may wait.
const BREATH: Duration = Duration::from_millis(10);

/// Reads events in turn from every group that has some, until the end.
pub(super) fn listen(groups: &Groups, session: &Weak<Session>) {
    // The next event of each group whose events are to wait where they are, as do those behind it.
    let mut unseated: Vec<(Arc<Channel>, Miss)> = Vec::new();
    loop {
        let again: Vec<_> = mem::take(&mut unseated);
        unseated.extend(again.into_iter().filter_map(|(channel, miss)| {
            // Without a session everybody is denied.
            let miss = session.upgrade().and_then(|session| session.slot(miss));
            if miss.is_none() {
                groups.set_paused(&channel, false);
            }
            Some((channel, miss?))
        }));
        let timeout = (!unseated.is_empty()).then_some(BREATH);
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
                groups.set_paused(&channel, true);
                unseated.push((channel, miss));
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
    thread::sleep(BREATH);
}
