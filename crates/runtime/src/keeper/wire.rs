//! The protocol between keeper, worker and successor.
//!
//! One datagram per message on a Unix socket of type SOCK_SEQPACKET: one byte for its kind, text in
//! UTF-8, and at most one descriptor. Two versions of the program speak this protocol during a
//! takeover, so kinds are added and never changed.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
        sendmsg, socketpair,
        sockopt::{Timeout, set_socket_timeout},
    },
};

/// Bytes of the longest message. Names and reports are far shorter.
const LIMIT: usize = 1024;

/// See [`Kind::Go`].
pub(super) const TRIAL: &str = "trial";

/// How long a peer may leave messages unread. It reads whenever it lives; a stopped one must not
/// stop us.
const SEND_LIMIT: Duration = Duration::from_secs(5);

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Keeper: its state, as [`super::KeeperInfo`] in JSON.
    Keeper = 1,
    /// The descriptor of this name.
    Descriptor = 2,
    /// Keeper: all descriptors were sent, start. With the text [`TRIAL`]: on trial until
    /// [`Kind::Confirmed`].
    Go = 3,
    /// Keeper: the worker's trial is over.
    Confirmed = 4,
    /// Keeper: end, and leave nothing mounted.
    Stop = 5,
    /// Keeper: exit at once, a successor takes over.
    Leave = 6,
    /// Worker: close the descriptor of this name.
    Release = 7,
    /// Worker: readers are served.
    Serving = 8,
    /// Worker: all requests of its predecessor are answered.
    Settled = 9,
    /// Worker: nothing is mounted any more, so the keeper can end as well.
    Stopped = 10,
    /// Successor: hand over everything. The text is the socket of its service manager, or empty.
    /// Comes with a descriptor, no matter which, from versions that know groups of images.
    Takeover = 11,
    /// Old keeper: all descriptors were sent, and no worker of its own is left.
    End = 12,
    /// Successor: its worker serves, the old keeper can exit.
    Done = 13,
    /// From a client: asks for the state. From a worker: asks whether all earlier messages were
    /// handled. The answer has the same kind; to a client, with [`super::KeeperInfo`] in JSON.
    Report = 14,
    /// Old keeper: refused, with the reason.
    Refused = 15,
}

impl Kind {
    const ALL: [Kind; 15] = [
        Kind::Keeper,
        Kind::Descriptor,
        Kind::Go,
        Kind::Confirmed,
        Kind::Stop,
        Kind::Leave,
        Kind::Release,
        Kind::Serving,
        Kind::Settled,
        Kind::Stopped,
        Kind::Takeover,
        Kind::End,
        Kind::Done,
        Kind::Report,
        Kind::Refused,
    ];
}

/// One message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) text: String,
    pub(super) descriptor: Option<OwnedFd>,
}

/// The error for a message of a kind that is unexpected here.
pub(super) fn unexpected(message: &Message) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{:?} is unexpected here", message.kind))
}

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Channel<F = OwnedFd>(F);

impl Channel {
    /// Two ends.
    pub(super) fn pair() -> io::Result<(Channel, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC;
        let (one, two) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Channel::new(one)?, two))
    }
}

impl<F: AsFd> Channel<F> {
    /// The connection behind a socket.
    pub(super) fn new(socket: F) -> io::Result<Self> {
        set_socket_timeout(&socket, Timeout::Send, Some(SEND_LIMIT))?;
        Ok(Channel(socket))
    }

    /// Sends one message. When this returns the descriptor is safe: it is open until the other side
    /// has read it.
    pub(super) fn send(
        &self,
        kind: Kind,
        text: &str,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let head = [kind as u8];
        let parts = [IoSlice::new(&head), IoSlice::new(text.as_bytes())];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = descriptor.as_slice();
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        rustix::io::retry_on_intr(|| sendmsg(&self.0, &parts, &mut control, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// Waits for a message; `None` when the other side is gone.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] when it is none of ours, and when its descriptor got lost for
    /// want of a free number.
    pub(super) fn receive(&self) -> io::Result<Option<Message>> {
        let mut buffer = [0; LIMIT];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut buffer)];
        let received = rustix::io::retry_on_intr(|| {
            recvmsg(&self.0, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
        });
        let received = match received {
            Ok(received) => received,
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let descriptor = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        if received.bytes == 0 {
            return Ok(None);
        }
        let cut = ReturnFlags::TRUNC | ReturnFlags::CTRUNC;
        if received.flags.intersects(cut) {
            let problem = "a message was cut short: too many descriptors are open";
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        }
        let kind = Kind::ALL.into_iter().find(|kind| *kind as u8 == buffer[0]);
        let text = String::from_utf8(buffer[1..received.bytes].to_vec());
        match (kind, text) {
            (Some(kind), Ok(text)) => Ok(Some(Message { kind, text, descriptor })),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not a message of this protocol")),
        }
    }

    /// [`Channel::receive`], which fails with [`io::ErrorKind::TimedOut`] when no message comes.
    pub(super) fn receive_within(&self, time: Duration) -> io::Result<Option<Message>> {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        let time = Timespec::try_from(time).map_err(io::Error::other)?;
        match rustix::io::retry_on_intr(|| poll(&mut fds, Some(&time)))? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => self.receive(),
        }
    }
}

impl<F: AsFd> AsFd for Channel<F> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(fuzzing)]
pub(crate) mod fuzz {
    use super::Channel;

    /// A message of another process.
    pub fn message(bytes: &[u8]) {
        let Ok((channel, peer)) = Channel::pair() else { return };
        let sent = rustix::net::send(&peer, bytes, rustix::net::SendFlags::DONTWAIT);
        if sent.is_ok_and(|sent| sent > 0) {
            let _ = channel.receive();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _, Write as _};

    use super::*;

    #[test]
    fn messages_arrive_whole_with_their_descriptors() {
        let (one, two) = Channel::pair().unwrap();
        let two = Channel::new(two).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"content").unwrap();
        one.send(Kind::Descriptor, "a name", Some(file.as_fd())).unwrap();
        one.send(Kind::Go, "", None).unwrap();
        drop((one, file));
        let message = two.receive().unwrap().unwrap();
        assert_eq!((message.kind, &*message.text), (Kind::Descriptor, "a name"));
        let mut file = std::fs::File::from(message.descriptor.unwrap());
        file.rewind().unwrap();
        let mut content = String::new();
        file.read_to_string(&mut content).unwrap();
        assert_eq!(content, "content");
        let message = two.receive().unwrap().unwrap();
        assert!(message.kind == Kind::Go && message.descriptor.is_none());
        assert!(two.receive().unwrap().is_none());
    }

    #[test]
    fn malformed_messages_are_refused() {
        let (one, two) = Channel::pair().unwrap();
        for bytes in [&[0][..], &[200, b'x'], &[1, 0xff], &[1; LIMIT + 1]] {
            rustix::io::write(&two, bytes).unwrap();
            assert_eq!(one.receive().unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
        let time = Duration::from_millis(1);
        assert_eq!(one.receive_within(time).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn every_kind_can_be_told_from_its_byte() {
        for (at, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, at + 1);
        }
    }
}
