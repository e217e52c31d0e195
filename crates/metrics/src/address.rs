//! The address that the server listens at.

use std::{
    fmt, fs, io,
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    str::FromStr,
};

use tokio::net::{TcpListener, UnixListener, UnixStream};

/// Bytes that fit into `sun_path` before the final NUL.
const LONGEST_PATH: usize = 107;

/// `HOST:PORT`, or the path of a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A port of this address of the machine.
    Tcp(SocketAddr),
    /// A socket at an absolute path, for the user of the daemon alone.
    Unix(PathBuf),
}

/// A text that is no [`Address`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not an address to listen at, expected an IP address with a port as in `127.0.0.1:9445`, or an \
     absolute path of at most {LONGEST_PATH} bytes"
)]
pub struct InvalidAddress(String);

impl FromStr for Address {
    type Err = InvalidAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidAddress(text.to_owned());
        if text.starts_with('/') {
            let fits = text.len() <= LONGEST_PATH && !text.ends_with('/');
            return fits.then(|| Address::Unix(text.into())).ok_or_else(invalid);
        }
        let address: SocketAddr = text.parse().map_err(|_| invalid())?;
        if address.port() == 0 { Err(invalid()) } else { Ok(Address::Tcp(address)) }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => address.fmt(f),
            Address::Unix(path) => path.display().fmt(f),
        }
    }
}

/// A socket that clients connect to.
#[derive(Debug)]
pub enum Listener {
    /// At [`Address::Tcp`].
    Tcp(TcpListener),
    /// At [`Address::Unix`].
    Unix(UnixListener),
}

impl Address {
    /// Listens, also while connections of a previous process are still closing, and if it left its
    /// socket behind.
    ///
    /// # Errors
    /// The address is in use, not one of this machine, or not allowed.
    pub async fn listen(&self) -> io::Result<Listener> {
        match self {
            Address::Tcp(address) => Ok(Listener::Tcp(TcpListener::bind(address).await?)),
            Address::Unix(path) => listen_at(path).await.map(Listener::Unix),
        }
    }
}

async fn listen_at(path: &Path) -> io::Result<UnixListener> {
    // A listener whose queue is full gives EAGAIN: only a refused connection says that none is
    // there.
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Ok(_) | Err(_) => {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there"));
        }
    }
    if let Some(parent) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
    }
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => fs::remove_file(path)?,
        Ok(_) => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "the path is a file, not a socket",
            ));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_an_ip_address_with_a_port_or_an_absolute_path() {
        for text in ["127.0.0.1:9445", "[::]:9445", "0.0.0.0:1", "/run/lazuli/metrics.sock"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        let long = format!("/{}", "x".repeat(LONGEST_PATH));
        for text in
            ["", ":9445", "localhost:9445", "127.0.0.1", "127.0.0.1:0", "a.sock", "/", &long]
        {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains("expected"), "{text}");
        }
    }

    #[tokio::test]
    async fn a_socket_that_a_dead_process_left_is_replaced_and_a_file_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new/metrics.sock");
        drop(Address::Unix(path.clone()).listen().await.unwrap());
        let alive = Address::Unix(path.clone()).listen().await.unwrap();
        let error = Address::Unix(path.clone()).listen().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(alive);
        let file = directory.path().join("file");
        fs::write(&file, "content").unwrap();
        let error = Address::Unix(file.clone()).listen().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(file).unwrap(), "content");
    }
}
