//! The daemon's sockets. The control socket's address:
//!
//! `sun_path` holds 108 bytes and a root directory may be deeper than that, so both ends reach the
//! socket through the directory's descriptor in `/proc`.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io,
    net::{SocketAddr, TcpListener},
    os::{
        fd::AsRawFd,
        unix::{
            fs::{DirBuilderExt, PermissionsExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

const NAME: &str = "daemon.sock";

/// Connects to the daemon of `root`.
pub(super) fn connect(root: &Path) -> io::Result<UnixStream> {
    let directory = File::open(root)?;
    UnixStream::connect(address(&directory))
}

/// Binds the socket in `root`, whose lock the caller holds: an old socket belongs to a dead daemon.
pub(in crate::daemon) fn listen(root: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(root.join(NAME)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let directory = File::open(root)?;
    let listener = UnixListener::bind(address(&directory))?;
    // A process that can talk to the daemon can mount: only its owner's may.
    fs::set_permissions(root.join(NAME), Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Binds a socket at a path outside of the state directory.
///
/// # Errors
/// Also if a process listens there, which may be the daemon of another state directory.
pub(in crate::daemon) fn listen_at(path: &Path) -> io::Result<UnixListener> {
    if UnixStream::connect(path).is_ok() {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there"));
    }
    if let Some(parent) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Length of the queue for connections that wait for a worker: those of a node's pulls during a
/// replacement.
const WAITING: i32 = 1024;

/// Listens on a port of the loopback interface.
pub(in crate::daemon) fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let listener = net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // Connections of the process before may still be ending.
    net::sockopt::set_socket_reuseaddr(&listener, true)?;
    net::bind(&listener, &address)?;
    net::listen(&listener, WAITING)?;
    Ok(listener.into())
}

/// Returns whether clients that connect to `path` reach this listener.
pub(in crate::daemon) fn is_at(listener: &UnixListener, path: &Path) -> bool {
    let address = listener.local_addr();
    address.is_ok_and(|address| address.as_pathname() == Some(path)) && path.exists()
}

fn address(directory: &File) -> PathBuf {
    format!("/proc/self/fd/{}/{NAME}", directory.as_raw_fd()).into()
}
