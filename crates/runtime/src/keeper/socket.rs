//! The keeper's socket, where successors and reports are asked for.

use std::{
    fs::{self, File, Permissions},
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::PermissionsExt as _,
    },
    path::Path,
};

use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

/// Its name in the root directory.
pub(super) const NAME: &str = "keeper.sock";

/// The address of the keeper's socket. `sun_path` holds 108 bytes and a root directory may be
/// deeper than that, so it is reached through the directory's descriptor.
fn address(directory: &File) -> io::Result<SocketAddrUnix> {
    let path = format!("/proc/self/fd/{}/{NAME}", directory.as_raw_fd());
    Ok(SocketAddrUnix::new(path)?)
}

pub(super) fn open(root: &Path) -> io::Result<OwnedFd> {
    // We hold the lock: an old socket is a dead keeper's. The directory keeps others out.
    match fs::remove_file(root.join(NAME)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = unix()?;
    bind(&socket, &address(&File::open(root)?)?)?;
    // A process that can talk to the keeper can take everything over: only its owner's may.
    fs::set_permissions(root.join(NAME), Permissions::from_mode(0o600))?;
    listen(&socket, 16)?;
    // Nonblocking: two keepers listen during a takeover, and one could block on a client that the
    // other accepted.
    rustix::io::ioctl_fionbio(&socket, true)?;
    Ok(socket)
}

fn unix() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Connects to the keeper of `root`.
pub(super) fn dial(root: &Path) -> io::Result<OwnedFd> {
    let socket = unix()?;
    connect(&socket, &address(&File::open(root)?)?)?;
    Ok(socket)
}
