//! The other end of the control socket.

use std::{
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
};

use super::{
    api::{Request, Response},
    socket,
};

/// A connection to the daemon of one root directory.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
}

/// Why the daemon was not asked or did not answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error("no daemon runs on {root}")]
    NotRunning {
        /// The root directory.
        root: PathBuf,
    },
    /// The connection broke.
    #[error("the daemon did not answer: {0}; its log says why")]
    Connection(#[from] io::Error),
    /// The answer is not one of [`Response`].
    #[error("the daemon answered something else than expected: {0}; is it another version?")]
    Protocol(#[from] serde_json::Error),
    /// The daemon said no.
    #[error("{0}")]
    Refused(String),
}

impl Client {
    /// Connects to the daemon of `root`.
    pub fn connect(root: &Path) -> Result<Self, ClientError> {
        match socket::connect(root) {
            Ok(stream) => Ok(Client { stream: BufReader::new(stream) }),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                Err(ClientError::NotRunning { root: root.to_owned() })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Asks and waits for the answer. [`Response::Error`] becomes [`ClientError::Refused`].
    pub fn call(&mut self, request: &Request) -> Result<Response, ClientError> {
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes())?;
        line.clear();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        match serde_json::from_str(&line)? {
            Response::Error { message } => Err(ClientError::Refused(message)),
            response => Ok(response),
        }
    }
}
