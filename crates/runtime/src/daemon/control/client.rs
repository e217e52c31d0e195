//! A client of the control socket.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use super::socket;
use crate::{
    daemon::{
        api::{Request, Response},
        shutdown::Stop,
    },
    keeper::{self, KeeperInfo},
};

/// Silence of the worker after which the client asks the keeper for its state. A new worker after a
/// death needs a tenth of that.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);

/// How long the keeper may need to end after its worker.
const END: Duration = Duration::from_secs(10);

/// How often a request is repeated that met the end of a worker: 10 s, twice as long as one may
/// take to leave.
const REPEATS: usize = 200;

/// Pause before a request is repeated.
const PAUSE: Duration = Duration::from_millis(50);

/// A connection to the daemon of one root directory.
#[derive(Debug)]
pub struct Client {
    root: PathBuf,
    stream: BufReader<UnixStream>,
}

/// Why the daemon was not asked or did not answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process listens.
    #[error("no daemon runs on {root}")]
    NotRunning {
        /// The root directory.
        root: PathBuf,
    },
    /// The connection broke.
    #[error("the daemon did not answer: {0}; its log says why")]
    Connection(#[from] io::Error),
    /// The worker doesn't start.
    #[error("the daemon's worker does not answer{}; its log says why", describe(.0))]
    NoWorker(KeeperInfo),
    /// The worker ended while it worked on the request.
    #[error(
        "the worker exited during this request and was restarted: check `lazuli status` and retry"
    )]
    Interrupted,
    /// The answer is not a [`Response`].
    #[error("the daemon answered something else than expected: {0}; is it another version?")]
    Protocol(#[from] serde_json::Error),
    /// The daemon refused the request.
    #[error("{0}")]
    Refused(String),
    /// The image has no index, which [`Request::Prefetch`] makes if it can.
    #[error("{0}")]
    NoIndex(String),
}

impl Client {
    /// Connects to the daemon of `root`. A daemon that is just ending counts as not running.
    pub fn connect(root: &Path) -> Result<Self, ClientError> {
        let connected = dial(root).and_then(|stream| {
            let mut client = Client { root: root.to_owned(), stream };
            client.call(&Request::Ping)?;
            client.stream.get_ref().set_read_timeout(None)?;
            Ok(client)
        });
        connected.map_err(|error| match error {
            ClientError::Connection(error) if is_gone(&error) => {
                ClientError::NotRunning { root: root.to_owned() }
            }
            ClientError::Connection(error) if error.kind() == io::ErrorKind::WouldBlock => {
                keeper::report(root).map_or(ClientError::Connection(error), ClientError::NoWorker)
            }
            error => error,
        })
    }

    /// Asks the daemon to end and waits until it has ended.
    pub fn stop(mut self, how: Stop) -> Result<(), ClientError> {
        self.call(&Request::Stop { force: how == Stop::Forced })?;
        // The kernel closes the connection when the worker has ended; the keeper holds the lock.
        let mut rest = [0];
        match self.stream.read(&mut rest) {
            Err(error) if !is_gone(&error) => return Err(error.into()),
            _ => {}
        }
        let lock = File::open(self.root.join("lock"))?;
        let started = Instant::now();
        while lock.try_lock().is_err() && started.elapsed() < END {
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Asks and waits for the answer. [`Response::Error`] becomes [`ClientError::Refused`] or
    /// [`ClientError::NoIndex`].
    pub fn call(&mut self, request: &Request) -> Result<Response, ClientError> {
        let harmless = matches!(request, Request::Ping | Request::Status);
        let repeatable = matches!(
            request,
            Request::Prefetch(_)
                | Request::MountBootstrap { .. }
                | Request::Umount { lazy: true, .. }
                | Request::ScrubPlan
                | Request::Scrub { .. }
        );
        for _ in 0..REPEATS {
            match self.exchange(request) {
                Ok(Response::Error { message, no_index }) => {
                    let error = if no_index { ClientError::NoIndex } else { ClientError::Refused };
                    return Err(error(message));
                }
                Ok(Response::Again) => {}
                Err(ClientError::Connection(error)) if is_gone(&error) => {
                    if !harmless && !repeatable {
                        return Err(ClientError::Interrupted);
                    }
                }
                answer => return answer,
            }
            // The keeper holds the socket: the next worker answers.
            thread::sleep(PAUSE);
            self.stream = dial(&self.root)?;
            if !harmless {
                self.stream.get_ref().set_read_timeout(None)?;
            }
        }
        Err(ClientError::Interrupted)
    }

    fn exchange(&mut self, request: &Request) -> Result<Response, ClientError> {
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes())?;
        line.clear();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        Ok(serde_json::from_str(&line)?)
    }
}

fn dial(root: &Path) -> Result<BufReader<UnixStream>, ClientError> {
    let stream = socket::connect(root)?;
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    Ok(BufReader::new(stream))
}

fn describe(info: &KeeperInfo) -> String {
    let last = info.last_exit.as_ref().map(|last| format!(": the last one: {last}"));
    let next = info.next_start_seconds.map(|next| format!(", the next one starts in {next:.1} s"));
    format!("{}{}", last.unwrap_or_default(), next.unwrap_or_default())
}

/// Returns whether no process listens, or the process that did has ended.
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
