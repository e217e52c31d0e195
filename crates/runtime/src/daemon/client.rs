//! The other end of the control socket.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
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
    /// Connects to the daemon of `root`. One that is just ending counts as not running.
    pub fn connect(root: &Path) -> Result<Self, ClientError> {
        let connected = socket::connect(root).map_err(ClientError::from).and_then(|stream| {
            let mut client = Client { stream: BufReader::new(stream) };
            client.call(&Request::Ping)?;
            Ok(client)
        });
        connected.map_err(|error| match error {
            ClientError::Connection(error) if is_gone(&error) => {
                ClientError::NotRunning { root: root.to_owned() }
            }
            error => error,
        })
    }

    /// Asks the daemon to end and waits until it has ended.
    pub fn stop(mut self, force: bool) -> Result<(), ClientError> {
        self.call(&Request::Stop { force })?;
        // The kernel closes the connection when the process is gone, locks and all.
        let mut rest = [0];
        match self.stream.read(&mut rest) {
            Err(error) if !is_gone(&error) => Err(error.into()),
            _ => Ok(()),
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

/// Nobody listens, or whoever did went away.
fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof
    )
}
