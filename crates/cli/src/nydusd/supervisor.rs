//! The supervisor of nydus-snapshotter: it keeps bytes and a descriptor while a process is
//! replaced.

use std::{
    fs::File,
    io::{self, IoSlice, Read as _, Write as _},
    mem::MaybeUninit,
    os::{fd::AsFd as _, unix::net::UnixStream},
    path::Path,
    time::Duration,
};

use anyhow::{Result, bail};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::path_context::PathContext as _;

/// More than the list of any node's mounts has, in bytes.
const LIMIT: u64 = 64 << 20;

const NOTHING: &str = "/dev/null";

/// Time limit for the supervisor, which does nothing else meanwhile.
const TIME: Duration = Duration::from_secs(10);

/// Sends a document. The supervisor demands a descriptor with it: upstream's is that of the mount,
/// which the node's daemon holds here. So it gets one of nothing.
pub(super) fn send(socket: &Path, document: &[u8]) -> Result<()> {
    let mut stream = connect(socket).cannot("connect to", socket)?;
    let nothing = File::open(NOTHING).cannot("open", NOTHING)?;
    let descriptors = [nothing.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let parts = [IoSlice::new(document)];
    let sent = sendmsg(&stream, &parts, &mut control, SendFlags::NOSIGNAL);
    let sent = sent.cannot("send the list of mounts to", socket)?;
    stream.write_all(&document[sent..]).cannot("write to", socket)?;
    Ok(())
}

/// Receives the document that was sent last. The kernel closes the descriptor that comes with it.
pub(super) fn receive(socket: &Path) -> Result<Vec<u8>> {
    let stream = connect(socket).cannot("connect to", socket)?;
    let mut document = Vec::new();
    let read = (&stream).take(LIMIT + 1).read_to_end(&mut document);
    let read = read.cannot("read from", socket)?;
    if read as u64 > LIMIT {
        bail!("{}: more than {LIMIT} bytes", socket.display());
    }
    Ok(document)
}

fn connect(socket: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(TIME))?;
    stream.set_write_timeout(Some(TIME))?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_long_list_arrives_whole() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let document: Vec<u8> = (0..3 << 20).map(|at: u32| at.to_le_bytes()[1]).collect();
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| send(&socket, &document).unwrap());
            let (mut supervisor, _) = listener.accept().unwrap();
            let mut received = Vec::new();
            supervisor.read_to_end(&mut received).unwrap();
            sender.join().unwrap();
            assert!(received == document);
            let receiver = scope.spawn(|| receive(&socket).unwrap());
            let (mut supervisor, _) = listener.accept().unwrap();
            supervisor.write_all(&received).unwrap();
            drop(supervisor);
            assert!(receiver.join().unwrap() == document);
        });
        drop(listener);
        let error = format!("{:#}", send(&socket, &document).unwrap_err());
        assert!(error.contains("refused"), "{error}");
    }
}
