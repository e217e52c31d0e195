//! Blobs from other nodes, through the Dragonfly daemon of this one.
//!
//! Its proxy acts as the registry that each request names. It fetches pieces of 4 MiB and more from
//! nodes that have them, or one node fetches them from the registry for all. It is asked for blobs
//! only, and not trusted: digests are checked as always.
//!
//! On the same node its socket tells which nodes have a blob, and is another way to the data, see
//! `socket`.
//!
//! A daemon that hangs keeps connections open, so its health port is probed while an answer is
//! awaited.

mod socket;

use std::{fmt, future::Future, ops::Range, path::Path, str::FromStr, sync::Arc, time::Duration};

use bytes::Bytes;
use lazuli_image::{Digest, Stored};
use reqwest::{
    Url,
    header::{HeaderMap, HeaderName, HeaderValue},
};
use tokio::time::sleep;

use self::socket::Socket;

use crate::{blob::Urgency, error::RegistryError, name::InvalidName, route::mirror::Mirror};

/// Minimum blob size to ask it for, in bytes. Its lookup takes about as long as a nearby registry
/// needs for this many bytes.
pub(crate) const LEAST: u64 = 128 << 10;

/// Silence before a health probe, and the time between two probes. Data on this node arrives within
/// 20 ms, data of another node within 100 ms.
const SILENCE: Duration = Duration::from_millis(300);

/// Time-out of a health probe, which needs neither disk nor network.
const LIMIT: Duration = Duration::from_millis(500);

/// Silence of a healthy daemon before a hedged request. It may be waiting for the registry on
/// behalf of all nodes; if each of them hedged earlier, the registry would serve each.
pub(crate) const HEDGE_AFTER: Duration = Duration::from_secs(3);

/// Bytes of a piece, of blobs of up to 2 GiB; it has more of those that are bigger.
const PIECE: u64 = 4 << 20;

/// For a connection: it is on this machine, or near.
pub(crate) const CONNECT: Duration = Duration::from_millis(500);

/// Its default health port.
const HEALTH_PORT: u16 = 4003;

/// Whether a peer-to-peer daemon may see the node's registry credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerCredentials {
    /// The daemon is not asked for content that needs credentials.
    Withheld,
    /// They are in its requests.
    Shown,
}

/// A Dragonfly daemon, dfdaemon 1.5.3 or later: older ones don't support the scheduling policy.
#[derive(Clone, PartialEq, Eq)]
pub struct Dragonfly {
    proxy: Url,
    health: Url,
    credentials: PeerCredentials,
    socket: Option<Arc<Socket>>,
}

impl Dragonfly {
    /// The daemon with its proxy at `proxy`, `http://HOST:PORT`, and its health port at `health`,
    /// port 4003 of the same host by default.
    ///
    /// # Errors
    /// These are no addresses of servers.
    pub fn new(
        proxy: &str,
        health: Option<&str>,
        credentials: PeerCredentials,
    ) -> Result<Self, InvalidName> {
        let proxy = Mirror::from_str(proxy)?.root;
        let mut alive = match health {
            Some(health) => Mirror::from_str(health)?.root,
            None => proxy.clone(),
        };
        alive.set_path("/healthy");
        if health.is_none() && alive.set_port(Some(HEALTH_PORT)).is_err() {
            return Err(InvalidName::new(proxy.as_str(), "it has no port"));
        }
        Ok(Dragonfly { proxy, health: alive, credentials, socket: None })
    }

    /// The same daemon, which is on this node and can be asked at its Unix socket, too. Hard links
    /// to its files are made in `links`.
    pub fn with_socket(self, socket: &Path, links: &Path) -> Self {
        Dragonfly { socket: Some(Arc::new(Socket::new(socket, links))), ..self }
    }

    /// Returns whether to ask for this range of a blob of `size` bytes: it fills most of its
    /// pieces, or a node has it. Without the daemon's socket, nodes are unknown; demand reads then
    /// ask, since a second fetch by another node would cost the registry more, and prefetch does
    /// not.
    pub(crate) async fn suits_range(
        &self,
        blob: &Digest,
        size: u64,
        range: &Range<Stored>,
        urgency: Urgency,
    ) -> bool {
        let is_demand = urgency == Urgency::Demand;
        if fills_pieces(size, range) {
            return true;
        }
        match &self.socket {
            Some(socket) => socket.has(blob, range).await.unwrap_or(is_demand),
            None => is_demand,
        }
    }

    /// This node begins to download a blob, or a part of it.
    pub(crate) fn begin(&self, digest: &Digest) {
        self.socket.iter().for_each(|socket| socket.begin(digest));
    }

    /// The bytes of a blob at `url`, if the daemon has a socket and delivers there.
    pub(crate) async fn by_socket(
        &self,
        url: Url,
        digest: &Digest,
        range: &Range<Stored>,
        headers: &HeaderMap,
    ) -> Option<Bytes> {
        self.socket.as_ref()?.read(url.as_str(), digest, range, headers).await
    }

    /// Returns whether the daemon may see the node's registry credentials.
    pub(crate) fn takes_credentials(&self) -> bool {
        self.credentials == PeerCredentials::Shown
    }

    /// The address at which it stands for the API at `upstream`.
    pub(crate) fn root(&self, upstream: &Url) -> Url {
        let mut root = self.proxy.clone();
        root.set_path(upstream.path());
        root
    }

    /// Headers that name the registry and select how the daemon fetches a blob. `None` if the
    /// origin does not fit a header.
    pub(crate) fn headers(upstream: &Url) -> Option<HeaderMap> {
        let origin = upstream.origin().ascii_serialization();
        let headers = [
            ("x-dragonfly-use-p2p", "true"),
            ("x-dragonfly-registry", origin.as_str()),
            // By default, it fetches ranges of up to one piece from the registry without telling
            // other nodes.
            ("x-dragonfly-scheduling-policy", "always"),
            // Makes all nodes identify a blob by its digest, whatever registry and repository they
            // know it from.
            ("x-dragonfly-enable-task-id-based-blob-digest", "true"),
        ];
        let header = |(name, value)| {
            Some((HeaderName::from_static(name), HeaderValue::from_str(value).ok()?))
        };
        headers.into_iter().map(header).collect()
    }

    /// Awaits `answer` while the daemon is healthy, and probes it after a silence.
    pub(crate) async fn watch<T>(
        &self,
        http: &reqwest::Client,
        place: &str,
        object: &str,
        answer: impl Future<Output = Result<T, RegistryError>>,
    ) -> Result<T, RegistryError> {
        let dies = async {
            loop {
                sleep(SILENCE).await;
                let question = http.get(self.health.clone()).timeout(LIMIT).send().await;
                if let Err(error) = question.and_then(reqwest::Response::error_for_status) {
                    return error;
                }
            }
        };
        tokio::select! {
            biased;
            answer = answer => answer,
            error = dies => {
                tracing::debug!(%error, place, "is not healthy");
                let cause = format!("{} does not answer either", self.health);
                Err(RegistryError::Interrupted { place: place.to_owned(), object: object.to_owned(), cause })
            }
        }
    }
}

impl fmt::Display for Dragonfly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let proxy = self.proxy.as_str();
        write!(f, "dragonfly at {}", proxy.strip_suffix("/v2/").unwrap_or(proxy))
    }
}

impl fmt::Debug for Dragonfly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dragonfly({})", self.proxy)
    }
}

/// Returns whether `range` is at least a quarter of the pieces that it lies in, of a blob of `size`
/// bytes. The reads of a start are, in images that were ordered for it. In other images they are a
/// tenth, and a start through Dragonfly took ten times as long.
fn fills_pieces(size: u64, range: &Range<Stored>) -> bool {
    let (first, last) = (range.start.0 / PIECE, range.end.0.saturating_sub(1) / PIECE);
    let end = (last + 1).saturating_mul(PIECE).min(size);
    let wanted = range.end.0.saturating_sub(range.start.0);
    wanted.saturating_mul(4) >= end.saturating_sub(first * PIECE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_health_port_differs_from_the_proxy_port() {
        let daemon =
            Dragonfly::new("http://127.0.0.1:4001", None, PeerCredentials::Withheld).unwrap();
        assert_eq!(daemon.health.as_str(), "http://127.0.0.1:4003/healthy");
        assert_eq!(daemon.to_string(), "dragonfly at http://127.0.0.1:4001");
    }

    #[test]
    fn ranges_that_fill_a_quarter_of_their_pieces_are_found() {
        for (size, range, fills) in [
            (100 * PIECE, 0..PIECE / 4, true),
            (100 * PIECE, 0..PIECE / 4 - 1, false),
            (100 * PIECE, PIECE - 10..PIECE + 10, false),
            (100 * PIECE, PIECE / 2..2 * PIECE + PIECE / 2, true),
            (300 << 10, 0..200 << 10, true),
            (PIECE + 10, PIECE..PIECE + 10, true),
            (u64::MAX, 0..1, false),
            (u64::MAX, 0..u64::MAX, true),
            (u64::MAX, u64::MAX - 1..u64::MAX, false),
        ] {
            let stored = Stored(range.start)..Stored(range.end);
            assert_eq!(fills_pieces(size, &stored), fills, "{range:?} of {size}");
        }
    }

    #[test]
    fn a_daemon_needs_a_valid_address() {
        let other =
            Dragonfly::new("http://[::1]:1", Some("http://[::1]:2"), PeerCredentials::Withheld)
                .unwrap();
        assert_eq!(other.health.as_str(), "http://[::1]:2/healthy");
        for (proxy, health) in [
            ("127.0.0.1:4001", None),
            ("http://a.example:1/x", None),
            ("http://a.example:1", Some("x")),
        ] {
            assert!(
                Dragonfly::new(proxy, health, PeerCredentials::Withheld).is_err(),
                "{proxy} {health:?}"
            );
        }
    }
}
