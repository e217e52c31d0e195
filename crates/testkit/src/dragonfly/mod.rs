//! A Dragonfly in this process: daemons that exchange pieces of blobs, with faults on demand.
//!
//! Clients see the behaviour of dfdaemon 1.5: its proxy takes the registry from
//! `X-Dragonfly-Registry`, or from `ns`, and identifies a blob by its digest alone. With
//! `X-Dragonfly-Scheduling-Policy: always`, one daemon of the swarm fetches a piece from the
//! registry and the others fetch it from that daemon. Without, each daemon fetches all pieces from
//! the registry and announces none. It serves blobs only, no manifests.
//!
//! ```no_run
//! use lazuli_testkit::dragonfly::{Fault, Swarm};
//! let swarm = Swarm::new();
//! let daemon = swarm.daemon().unwrap();
//! let config = format!("proxy = {:?}\nhealth = {:?}", daemon.proxy(), daemon.health());
//! daemon.set(Fault::Hung);
//! ```

mod origin;
mod pool;
mod proxy;
mod socket;
#[cfg(test)]
mod tests;

use std::{
    io,
    net::{IpAddr, Ipv4Addr},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use crate::{http::Headers, serving::Ports};

use self::{pool::Pool, socket::Socket};

/// Bytes of a piece of a blob of up to 2 GiB.
const PIECE: u64 = 4 << 20;

/// A fault of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing listens, and requests in progress have ended.
    Gone,
    /// The proxy's port is closed. Health probe and socket still answer.
    ProxyGone,
    /// Nothing answers, but the kernel still accepts connections.
    Hung,
    /// The health probe answers, but no bytes arrive, as if it waited for a peer's piece.
    Stuck,
    /// It serves what it has, and cannot store anything else.
    DiskFull,
    /// The scheduler doesn't answer, so this daemon and the others don't know of each other.
    Alone,
    /// Each byte that it hands out is inverted, to other daemons as well.
    WrongBytes,
}

/// One request to a proxy or at a socket, as it came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Logged {
    /// `GET`; at the socket `DownloadTask` or `StatTask`.
    pub method: String,
    /// `/v2/app/blobs/sha256:…`, with the query; at the socket all of the URL, or the digits of the
    /// digest.
    pub target: String,
    /// By names in lower case; at the socket those for the registry.
    pub headers: Headers,
}

/// Counters of a daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests to the proxy.
    pub requests: u64,
    /// Bytes of blobs that clients were sent, or could read through links.
    pub served: u64,
    /// Requests that registries got.
    pub asked_origin: u64,
    /// Bytes of blobs that registries sent.
    pub from_origin: u64,
    /// Bytes of blobs that other daemons sent.
    pub from_peers: u64,
}

/// The daemons of one scheduler. Clones share them.
#[derive(Clone, Debug)]
pub struct Swarm(Arc<Pool>);

impl Default for Swarm {
    fn default() -> Self {
        Self::new()
    }
}

impl Swarm {
    /// A swarm without daemons, and with pieces of the usual size.
    pub fn new() -> Self {
        Self::with_pieces_of(PIECE)
    }

    /// A swarm with pieces of this many bytes.
    pub fn with_pieces_of(bytes: u64) -> Self {
        Swarm(Arc::new(Pool::new(bytes)))
    }

    /// Starts a daemon on free ports of the loopback interface.
    pub fn daemon(&self) -> io::Result<Daemon> {
        self.daemon_at(Ipv4Addr::LOCALHOST.into())
    }

    /// The same at another address of this machine, or of the [`crate::network::Network`] that this
    /// thread is in. It has to be dropped there.
    pub fn daemon_at(&self, address: IpAddr) -> io::Result<Daemon> {
        let (ports, listeners) = Ports::two(address)?;
        let shared = Arc::new(Shared {
            ports,
            pool: self.0.clone(),
            number: self.0.join(),
            socket: Mutex::default(),
        });
        for (listener, serve) in
            listeners.into_iter().zip([proxy::serve, proxy::serve_health] as [proxy::Serve; 2])
        {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.ports.serve(listener, |stream| {
                    let shared = shared.clone();
                    thread::spawn(move || serve(&shared, stream));
                });
            });
        }
        Ok(Daemon { _stop: Arc::new(Stop(shared.clone())), shared })
    }
}

/// A handle to a running daemon; clones are the same daemon. It stops with the last handle.
#[derive(Clone, Debug)]
pub struct Daemon {
    shared: Arc<Shared>,
    _stop: Arc<Stop>,
}

#[derive(Debug)]
struct Shared {
    /// Ports of the proxy and of the health probe.
    ports: Ports,
    pool: Arc<Pool>,
    /// The daemon's number in the swarm.
    number: usize,
    /// If one was requested.
    socket: Mutex<Option<Socket>>,
}

impl Shared {
    fn socket(&self) -> MutexGuard<'_, Option<Socket>> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct Stop(Arc<Shared>);

impl Drop for Stop {
    fn drop(&mut self) {
        // Requests that wait within it go on, and find it gone.
        self.0.pool.change(self.0.number, |peer| peer.fault = Some(Fault::Gone));
        self.0.ports.stop();
        // The socket holds the daemon too.
        *self.0.socket() = None;
    }
}

impl Daemon {
    /// URL of the proxy.
    pub fn proxy(&self) -> String {
        format!("http://{}", self.shared.ports.address(0))
    }

    /// URL of the health probe.
    pub fn health(&self) -> String {
        format!("http://{}", self.shared.ports.address(1))
    }

    /// Listens at the Unix socket `path`, too, which must not exist. Its files are beside it, where
    /// links can be made.
    pub fn listen_at(&self, path: &Path) -> io::Result<()> {
        *self.shared.socket() = Some(Socket::new(path, &self.shared)?);
        Ok(())
    }

    /// Sets the fault, also for requests in progress, in place of any other.
    pub fn set(&self, fault: Fault) {
        self.apply_fault(Some(fault));
    }

    /// Clears the fault. The daemon keeps its data.
    pub fn heal(&self) {
        self.apply_fault(None);
    }

    fn apply_fault(&self, fault: Option<Fault>) {
        self.shared.pool.change(self.shared.number, |peer| peer.fault = fault);
        self.shared.ports.only(match fault {
            Some(Fault::Gone) => &[],
            Some(Fault::ProxyGone) => &[1],
            _ => &[0, 1],
        });
        if let Some(socket) = &mut *self.shared.socket() {
            match fault {
                Some(Fault::Gone) => socket.go_away(),
                _ => socket.come_back(&self.shared).expect("its socket was there before"),
            }
        }
    }

    /// Counters since the start or the last [`Daemon::reset_stats`].
    pub fn stats(&self) -> Stats {
        self.shared.pool.change(self.shared.number, |peer| peer.stats.clone())
    }

    /// All requests to the proxy since then, in order.
    pub fn log(&self) -> Vec<Logged> {
        self.shared.pool.change(self.shared.number, |peer| peer.log.clone())
    }

    /// The same at the socket.
    pub fn log_at_socket(&self) -> Vec<Logged> {
        self.shared.pool.change(self.shared.number, |peer| peer.at_socket.clone())
    }

    /// Starts counting anew.
    pub fn reset_stats(&self) {
        self.shared.pool.change(self.shared.number, |peer| {
            (peer.stats, peer.log, peer.at_socket) = Default::default();
        });
    }
}

impl Logged {
    /// Returns whether the request had credentials.
    pub fn is_authorized(&self) -> bool {
        self.headers.contains_key("authorization")
    }
}
