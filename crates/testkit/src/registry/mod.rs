//! A registry in this process, stricter than real ones, that fails on demand.
//!
//! It keeps everything in memory, serves each connection on a thread, and listens on two ports, of
//! the loopback interface unless told otherwise: the registry itself, and the "storage" that it can
//! redirect blob reads to. Whatever a client does that a strict server may refuse is answered with
//! an error *and* noted, see [`FakeRegistry::violations`].
//!
//! ```no_run
//! use lazuli_testkit::registry::{FakeRegistry, Fault};
//! let registry = FakeRegistry::start().unwrap();
//! registry.put_blob("app", b"content");
//! registry.fault("GET", "/blobs/", 2, Fault::Status(503));
//! let name = format!("{}/app:1", registry.host());
//! ```

mod api;
mod fault;
mod login;
mod referrers;
mod uploads;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::Duration,
};

use lazuli_image::{Algorithm, Digest};

pub use fault::Fault;

use crate::serving::Ports;

/// The login that clients need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Login {
    /// Not at all.
    #[default]
    None,
    /// With a user and a password in every request.
    Basic(String, String),
    /// A token from the token server, which asks for a user and a password. Two empty strings give
    /// any client a token.
    Bearer(String, String),
    /// A token from the token server, which asks for this refresh token.
    Identity(String),
}

/// One request, as it came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Logged {
    /// `GET`.
    pub method: String,
    /// `/v2/app/blobs/sha256:…`, with the query.
    pub target: String,
    /// The Range header.
    pub range: Option<String>,
    /// Whether the request had an Authorization header.
    pub authorized: bool,
    /// Whether the storage port received it.
    pub storage: bool,
    /// Address of the client.
    pub peer: IpAddr,
}

impl Logged {
    /// The bytes that were asked for, if it was not everything.
    pub fn bytes(&self) -> Option<Range<u64>> {
        let (first, last) = self.range.as_deref()?.strip_prefix("bytes=")?.split_once('-')?;
        Some(first.parse().ok()?..last.parse::<u64>().ok()?.checked_add(1)?)
    }
}

/// Joins adjacent ranges that were requested, by their targets.
///
/// # Panics
/// If bytes were asked for twice.
pub fn runs(log: &[Logged]) -> Vec<(String, Range<u64>)> {
    let mut parts: Vec<_> =
        log.iter().filter_map(|it| Some((it.target.clone(), it.bytes()?))).collect();
    parts.sort_by_key(|(target, bytes)| (target.clone(), bytes.start));
    let mut runs: Vec<(String, Range<u64>)> = Vec::new();
    for (target, bytes) in parts {
        match runs.last_mut() {
            Some((known, run)) if *known == target && bytes.start <= run.end => {
                assert!(bytes.start == run.end, "{target}: twice from {}", bytes.start);
                run.end = bytes.end;
            }
            _ => runs.push((target, bytes)),
        }
    }
    runs
}

/// Counters of the registry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests, storage included.
    pub requests: u64,
    /// Bytes of bodies sent.
    pub bytes: u64,
    /// Connections accepted.
    pub connections: u64,
    /// Maximum number of requests that were in the registry at the same time.
    pub max_concurrency: u64,
    /// Requests for the root of the API, which clients send only to open a connection. They are
    /// counted and logged nowhere else, and have no faults.
    pub pings: u64,
    /// Requests by path, without the query.
    pub by_path: BTreeMap<String, u64>,
}

/// A handle to a running registry; clones are the same registry. It stops with the last handle.
#[derive(Clone, Debug)]
pub struct FakeRegistry {
    shared: Arc<Shared>,
    _stop: Arc<Stop>,
}

#[derive(Debug)]
struct Shared {
    /// The ports of the registry itself, and of the storage.
    ports: Ports,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    blobs: HashMap<(String, Digest), Arc<Vec<u8>>>,
    /// By repository and tag or digest.
    manifests: HashMap<(String, String), StoredManifest>,
    /// By upload: the repository, and the data received so far.
    uploads: HashMap<u64, (String, Vec<u8>)>,
    login: Login,
    /// Tokens that are good, with their scopes.
    tokens: HashMap<String, Vec<String>>,
    /// Whether unknown clients get tokens without any rights.
    empty_tokens: bool,
    redirect: bool,
    referrers: referrers::Behaviour,
    /// Signatures of storage URLs that are good.
    signatures: HashSet<u64>,
    faults: Vec<fault::Armed>,
    latency: Duration,
    counter: u64,
    in_flight: u64,
    stats: Stats,
    log: Vec<Logged>,
    violations: Vec<String>,
}

#[derive(Clone, Debug)]
struct StoredManifest {
    media_type: String,
    content: Arc<Vec<u8>>,
}

#[derive(Debug)]
struct Stop(Arc<Shared>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.ports.stop();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panicking connection must fail its own test, not hide behind a poisoned lock.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The address of the registry itself.
    fn address(&self) -> SocketAddr {
        self.ports.address(0)
    }

    /// The address of the storage.
    fn storage(&self) -> SocketAddr {
        self.ports.address(1)
    }
}

impl FakeRegistry {
    /// Starts an empty registry on free ports, with referrers, without login, redirects or faults.
    pub fn start() -> io::Result<Self> {
        Self::start_at(Ipv4Addr::LOCALHOST.into())
    }

    /// The same at another address of this machine, or of the [`crate::network::Network`] that this
    /// thread is in. It has to be dropped there.
    pub fn start_at(address: IpAddr) -> io::Result<Self> {
        let (ports, listeners) = Ports::two(address)?;
        let shared = Arc::new(Shared { ports, state: Mutex::default() });
        for (listener, storage) in listeners.into_iter().zip([false, true]) {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.ports.serve(listener, |stream| {
                    shared.lock().stats.connections += 1;
                    let shared = shared.clone();
                    thread::spawn(move || api::serve(&shared, stream, storage));
                });
            });
        }
        Ok(FakeRegistry { _stop: Arc::new(Stop(shared.clone())), shared })
    }

    /// Host and port, for names of images.
    pub fn host(&self) -> String {
        self.shared.address().to_string()
    }

    /// Stores a blob.
    pub fn put_blob(&self, repository: &str, content: &[u8]) -> Digest {
        let digest = Algorithm::Sha256.digest(content);
        let key = (repository.to_owned(), digest);
        self.shared.lock().blobs.insert(key, Arc::new(content.to_vec()));
        digest
    }

    /// Stores a manifest under its digest and `tag`.
    pub fn put_manifest(
        &self,
        repository: &str,
        tag: &str,
        media_type: &str,
        raw: &[u8],
    ) -> Digest {
        let digest = Algorithm::Sha256.digest(raw);
        let mut state = self.shared.lock();
        for name in [tag.to_owned(), digest.to_string()] {
            let value = StoredManifest {
                media_type: media_type.to_owned(),
                content: Arc::new(raw.to_vec()),
            };
            state.manifests.insert((repository.to_owned(), name), value);
        }
        digest
    }

    /// The content of a blob.
    pub fn blob(&self, repository: &str, digest: &Digest) -> Option<Vec<u8>> {
        let state = self.shared.lock();
        state.blobs.get(&(repository.to_owned(), *digest)).map(|content| content.to_vec())
    }

    /// The content of a manifest.
    pub fn manifest(&self, repository: &str, tag: &str) -> Option<Vec<u8>> {
        let state = self.shared.lock();
        let stored = state.manifests.get(&(repository.to_owned(), tag.to_owned()))?;
        Some(stored.content.to_vec())
    }

    /// Demands this login from now on.
    pub fn require(&self, login: Login) {
        self.shared.lock().login = login;
    }

    /// Invalidates all tokens issued so far.
    pub fn expire_tokens(&self) {
        self.shared.lock().tokens.clear();
    }

    /// Makes the token server give unknown logins tokens without rights, as many token servers do,
    /// instead of refusing them.
    pub fn give_empty_tokens(&self) {
        self.shared.lock().empty_tokens = true;
    }

    /// Answers reads of blobs with a redirect to the storage port.
    pub fn redirect_blobs(&self) {
        self.shared.lock().redirect = true;
    }

    /// Behaves from now on as a registry older than OCI distribution 1.1, which has no referrers
    /// API.
    pub fn without_referrers(&self) {
        self.shared.lock().referrers.absent = true;
    }

    /// Limits lists of referrers to this many entries per page.
    pub fn page_referrers(&self, entries: usize) {
        self.shared.lock().referrers.page = entries;
    }

    /// Lists referrers of all types, whichever was asked for.
    pub fn ignore_artifact_type(&self) {
        self.shared.lock().referrers.unfiltered = true;
    }

    /// Invalidates all storage URLs issued so far.
    pub fn expire_redirects(&self) {
        self.shared.lock().signatures.clear();
    }

    /// Makes the next `times` requests fail whose method is `method` (empty: any) and whose path
    /// contains `path`.
    pub fn fault(&self, method: &str, path: &str, times: usize, fault: Fault) {
        let (method, path) = (method.to_owned(), path.to_owned());
        self.shared.lock().faults.push(fault::Armed { method, path, times, fault });
    }

    /// Forgets all faults.
    pub fn clear_faults(&self) {
        self.shared.lock().faults.clear();
    }

    /// Waits this long before each answer.
    pub fn set_latency(&self, latency: Duration) {
        self.shared.lock().latency = latency;
    }

    /// Closes all connections and refuses new ones for a while, as a registry that restarts.
    pub fn refuse_for(&self, duration: Duration) {
        self.go_away();
        let registry = Arc::downgrade(&self.shared);
        thread::spawn(move || {
            thread::sleep(duration);
            if let Some(shared) = registry.upgrade() {
                shared.ports.come_back();
            }
        });
    }

    /// Closes all connections and refuses new ones, also to the storage.
    pub fn go_away(&self) {
        self.shared.ports.go_away();
    }

    /// Listens again, at the same address.
    pub fn come_back(&self) {
        self.shared.ports.come_back();
    }

    /// Counters since the start or the last [`FakeRegistry::reset_stats`].
    pub fn stats(&self) -> Stats {
        self.shared.lock().stats.clone()
    }

    /// All requests since then, in order.
    pub fn log(&self) -> Vec<Logged> {
        self.shared.lock().log.clone()
    }

    /// Starts counting anew.
    pub fn reset_stats(&self) {
        let mut state = self.shared.lock();
        state.stats = Stats::default();
        state.log.clear();
    }

    /// Requests that a server may refuse.
    pub fn violations(&self) -> Vec<String> {
        self.shared.lock().violations.clone()
    }

    /// Uploads that were begun and neither finished nor given up.
    pub fn open_uploads(&self) -> usize {
        self.shared.lock().uploads.len()
    }
}
