//! Messages between worker and helper: one datagram each on Unix sockets of type SOCK_SEQPACKET,
//! JSON with descriptors. Both are the same program.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Bytes of a logical block of a disk: all reads of the kernel are multiples, and so are the blocks
/// of every disk below.
pub(in super::super) const BLOCK: u32 = 4096;

/// Bytes of the longest message.
const LIMIT: usize = 4096;

/// Descriptors of the longest message.
const DESCRIPTORS: usize = 3;

/// An order to the helper.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Order {
    /// Answer.
    Wait,
    /// Open a file or directory. With a directory; answered with the file.
    Open { name: String },
    /// Show a file as a disk. With its directory; answered with the disk.
    Attach { name: String, label: String },
    /// Put another file behind a disk. With the disk, and the file, or the directory where it has
    /// the name.
    Change { name: Option<String> },
    /// Read a small file. With its directory.
    Read { name: String },
    /// Keep a descriptor open.
    Hold { id: u64 },
    /// Close it.
    Release { id: u64 },
}

/// The result of an [`Order`].
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer {
    /// Done.
    Done,
    /// The number of a disk.
    Disk(u32),
    /// The content of a file.
    Content(Vec<u8>),
    /// The number of an error of the operating system.
    Failed(i32),
}

/// Two ends of a connection.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Sends one message with at most [`DESCRIPTORS`] descriptors.
pub(super) fn send(
    to: BorrowedFd<'_>,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let parts = [IoSlice::new(&text)];
    rustix::io::retry_on_intr(|| sendmsg(to, &parts, &mut control, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Waits for a message; `None` when the other side is gone.
pub(super) fn receive<T: DeserializeOwned>(
    from: impl AsFd,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut buffer = [0; LIMIT];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut buffer)];
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(&from, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
    });
    let received = match received {
        Ok(received) if received.bytes > 0 => received,
        Ok(_) | Err(rustix::io::Errno::CONNRESET) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = message {
            descriptors.extend(sent);
        }
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        let problem = "a message was cut short: too many descriptors are open";
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    Ok(Some((serde_json::from_slice(&buffer[..received.bytes])?, descriptors)))
}
