//! Counters of data from servers, and of failed requests.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use crate::error::RegistryError;

/// The kind of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerKind {
    /// The registry that an image's name means.
    Registry,
    /// A mirror of it.
    Mirror,
    /// The peer-to-peer daemon of this node.
    Peer,
}

impl ServerKind {
    /// Every kind, in the order of its numbers.
    pub const ALL: [Self; 3] = [Self::Registry, Self::Mirror, Self::Peer];

    /// Its name in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Registry => "registry",
            Self::Mirror => "mirror",
            Self::Peer => "peer",
        }
    }
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No connection could be made.
    Unreachable,
    /// Certificates are the reason.
    Untrusted,
    /// The connection broke.
    Interrupted,
    /// Nothing, or next to nothing, arrived.
    Silent,
    /// Credentials were refused: 401 or 403.
    Denied,
    /// The server has enough to do: 429.
    Throttled,
    /// It failed: 5xx.
    Server,
    /// Any other status or answer. 404 does not count: clients ask for optional objects.
    Refused,
}

impl Failure {
    /// Every reason, in the order of its numbers.
    pub const ALL: [Self; 8] = [
        Self::Unreachable,
        Self::Untrusted,
        Self::Interrupted,
        Self::Silent,
        Self::Denied,
        Self::Throttled,
        Self::Server,
        Self::Refused,
    ];

    /// Its name in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Untrusted => "untrusted",
            Self::Interrupted => "interrupted",
            Self::Silent => "silent",
            Self::Denied => "denied",
            Self::Throttled => "throttled",
            Self::Server => "server",
            Self::Refused => "refused",
        }
    }

    fn of(error: &RegistryError) -> Option<Self> {
        Some(match error {
            RegistryError::Unreachable { .. } => Self::Unreachable,
            RegistryError::Untrusted { .. } => Self::Untrusted,
            RegistryError::Interrupted { .. } => Self::Interrupted,
            RegistryError::Denied { .. } => Self::Denied,
            RegistryError::Status { status: 429, .. } => Self::Throttled,
            RegistryError::Status { status: 500.., .. } | RegistryError::Upstream { .. } => {
                Self::Server
            }
            RegistryError::Status { .. } => Self::Refused,
            _ => return None,
        })
    }
}

/// Counters of data and failures, of all servers of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficCounts {
    /// Bytes of blobs that arrived, including those of interrupted answers.
    pub bytes: u64,
    /// Requests that failed, by the number of the [`Failure`].
    pub failures: [u64; Failure::ALL.len()],
}

/// Counters of the servers that share a [`ClientPool`](crate::ClientPool).
#[derive(Debug, Default)]
pub struct Traffic([Counters; ServerKind::ALL.len()]);

#[derive(Debug, Default)]
struct Counters {
    bytes: AtomicU64,
    failures: [AtomicU64; Failure::ALL.len()],
}

impl Traffic {
    /// The counters of one kind of server.
    pub fn counts(&self, kind: ServerKind) -> TrafficCounts {
        let Counters { bytes, failures } = &self.0[kind as usize];
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TrafficCounts { bytes: read(bytes), failures: failures.each_ref().map(read) }
    }
}

/// The counters that one server adds to.
#[derive(Clone, Debug)]
pub struct ServerTraffic {
    pub(crate) all: Arc<Traffic>,
    pub(crate) kind: ServerKind,
}

impl ServerTraffic {
    /// The kind of the server.
    pub fn kind(&self) -> ServerKind {
        self.kind
    }

    /// Counts a request that failed.
    pub fn failed(&self, failure: Failure) {
        let counters = &self.all.0[self.kind as usize];
        counters.failures[failure as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts bytes of a blob that arrived.
    pub(crate) fn arrived(&self, bytes: usize) {
        self.all.0[self.kind as usize].bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a request that failed with `error`, if that is the server's failure.
    pub(crate) fn note(&self, error: &RegistryError) {
        if let Some(failure) = Failure::of(error) {
            self.failed(failure);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_failures_are_numbered_in_the_order_of_their_lists() {
        assert!(ServerKind::ALL.iter().enumerate().all(|(at, kind)| *kind as usize == at));
        assert!(Failure::ALL.iter().enumerate().all(|(at, failure)| *failure as usize == at));
    }

    #[test]
    fn each_kind_of_server_has_its_own_counters() {
        let all = Arc::<Traffic>::default();
        let of = |kind| ServerTraffic { all: all.clone(), kind };
        of(ServerKind::Mirror).arrived(7);
        of(ServerKind::Mirror).failed(Failure::Silent);
        of(ServerKind::Peer).arrived(1);
        let mirror = all.counts(ServerKind::Mirror);
        assert_eq!((mirror.bytes, mirror.failures[Failure::Silent as usize]), (7, 1));
        assert_eq!(all.counts(ServerKind::Peer).bytes, 1);
        assert_eq!(all.counts(ServerKind::Registry), TrafficCounts::default());
    }

    #[test]
    fn statuses_are_told_apart_and_404_is_no_failure() {
        let of = |status| {
            let (place, object, detail) = Default::default();
            Failure::of(&RegistryError::Status { place, object, status, detail, retry_after: None })
        };
        assert_eq!(of(429), Some(Failure::Throttled));
        assert_eq!(of(503), Some(Failure::Server));
        assert_eq!(of(416), Some(Failure::Refused));
        let (place, object) = Default::default();
        assert_eq!(Failure::of(&RegistryError::Missing { place, object }), None);
    }
}
