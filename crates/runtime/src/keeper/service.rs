//! Notifies systemd, where it started the daemon: sd_notify(3). systemd also keeps copies of the
//! descriptors in its store for the case that keeper and worker die at the same time.

use std::{
    env, io,
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, BorrowedFd},
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// The service manager of this process, if there is one.
#[derive(Debug)]
pub(super) struct Service(Option<UnixDatagram>);

/// Its socket's address in words; empty without one.
pub(super) fn address() -> String {
    env::var_os("NOTIFY_SOCKET").unwrap_or_default().to_string_lossy().into_owned()
}

impl Service {
    /// The service manager whose socket is in the environment.
    pub(super) fn find() -> Self {
        let Some(path) = env::var_os("NOTIFY_SOCKET") else { return Service(None) };
        let address = match path.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name),
            None => SocketAddr::from_pathname(&path),
        };
        let connect = || {
            let socket = UnixDatagram::unbound()?;
            socket.connect_addr(&address?)?;
            Ok(socket)
        };
        let socket = connect().inspect_err(|error: &io::Error| {
            tracing::warn!(%error, socket = %path.display(), "cannot reach the service manager");
        });
        Service(socket.ok())
    }

    /// Returns whether there is a service manager.
    pub(super) fn is_there(&self) -> bool {
        self.0.is_some()
    }

    /// Puts a copy of a descriptor into the store.
    pub(super) fn store(&self, name: &str, descriptor: BorrowedFd<'_>) {
        // Without FDPOLL=0 systemd drops a descriptor when it sees an error on it, as on a FUSE
        // connection between two mounts.
        self.send(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"), Some(descriptor));
    }

    /// Takes it out again.
    pub(super) fn forget(&self, name: &str) {
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), None);
    }

    /// Readers are served, and this process is the service.
    pub(super) fn ready(&self) {
        let pid = std::process::id();
        self.send(&format!("READY=1\nMAINPID={pid}\nSTATUS=serving"), None);
    }

    /// Sets the one-line status text.
    pub(super) fn status(&self, text: &str) {
        self.send(&format!("STATUS={text}"), None);
    }

    /// The service ends.
    pub(super) fn stopping(&self) {
        self.send("STOPPING=1", None);
    }

    fn send(&self, text: &str, descriptor: Option<BorrowedFd<'_>>) {
        let Some(socket) = &self.0 else { return };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = descriptor.as_slice();
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let parts = [io::IoSlice::new(text.as_bytes())];
        if let Err(error) = sendmsg(socket.as_fd(), &parts, &mut control, SendFlags::NOSIGNAL) {
            tracing::warn!(%error, text, "the service manager was not told");
        }
    }
}
