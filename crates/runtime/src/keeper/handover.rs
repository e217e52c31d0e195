//! Passes descriptors from one keeper to the next.

use std::{
    io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use rustix::{
    net::sockopt::socket_peercred,
    process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use super::{
    descriptors::Descriptors,
    wire::{Channel, Kind, Message, unexpected},
};

/// Time limit for the old keeper to end its worker, clients' requests included.
pub(super) const HANDOVER_LIMIT: Duration = Duration::from_secs(20);

/// Silence of the successor after which the old keeper resumes: the time limits of a whole
/// takeover, with some margin.
const TAKEOVER_LIMIT: Duration = Duration::from_secs(60);

/// The successor, as the old keeper sees it.
pub(super) struct Successor {
    pub(super) channel: Channel,
    process: OwnedFd,
    pub(super) deadline: Instant,
}

impl Successor {
    pub(super) fn new(channel: Channel) -> io::Result<Self> {
        let process = pidfd_open(socket_peercred(&channel)?.pid, PidfdFlags::empty())?;
        Ok(Successor { channel, process, deadline: Instant::now() + TAKEOVER_LIMIT })
    }

    /// Sends everything. No worker may be left.
    pub(super) fn hand_over(&mut self, descriptors: &Descriptors) -> io::Result<()> {
        descriptors.send(&self.channel)?;
        self.channel.send(Kind::End, "", None)
    }

    /// Returns whether the successor has reported that it no longer needs this keeper. Call it when
    /// there is a message to read.
    pub(super) fn is_done(&self) -> bool {
        matches!(self.channel.receive(), Ok(Some(Message { kind: Kind::Done, .. })))
    }

    /// Makes sure that it does nothing any more.
    pub(super) fn kill(&self) {
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
    }

    /// Passes on that everything is to end.
    pub(super) fn stop(&self) {
        let _ = pidfd_send_signal(&self.process, Signal::TERM);
    }
}

/// The other side refuses.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Refusal(pub(super) String);

/// Receives descriptors up to a message of kind `last`; false when the other side went away before.
pub(super) fn receive_all(channel: &Channel, last: Kind) -> io::Result<(Descriptors, bool)> {
    let mut descriptors = Descriptors::default();
    loop {
        match channel.receive_within(HANDOVER_LIMIT)? {
            Some(Message { kind: Kind::Descriptor, text, descriptor: Some(descriptor) }) => {
                descriptors.insert(text, descriptor);
            }
            Some(Message { kind: Kind::Refused, text, .. }) => {
                return Err(io::Error::other(Refusal(text)));
            }
            Some(message) if message.kind == last => return Ok((descriptors, true)),
            Some(message) => return Err(unexpected(&message)),
            None => return Ok((descriptors, false)),
        }
    }
}
