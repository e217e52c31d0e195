//! Blobs from other nodes, through the Dragonfly daemon of this one.
//!
//! Its proxy stands for a registry that each request names. What is asked of it is fetched from the
//! nodes that have it, or from the registry by one of them for all, in pieces of 4 MiB and more. It
//! is asked for blobs alone, and never believed: digests are checked as always.
//!
//! On this node it can say who has what, and there is another way to the data than its proxy, see
//! `socket`.
//!
//! A daemon that hangs keeps connections open, so whoever waits for an answer asks whether it
//! lives, at another port.

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

/// Smallest blob that is asked of it, in bytes. To find out who has it takes about as long as a
/// registry nearby needs for so much.
pub(crate) const LEAST: u64 = 128 << 10;

/// How long it may be silent before it is asked whether it lives, and between two such questions.
/// What is on this node comes within 20 ms, what another one has within 100 ms.
const SILENCE: Duration = Duration::from_millis(300);

/// How long that answer may take. It needs neither disk nor network.
const LIMIT: Duration = Duration::from_millis(500);

/// How long it may bring nothing, as long as it lives, before others are asked as well. Whom it
/// waits for is the registry, on behalf of all nodes: if every one of them hedged its requests, the
/// registry would have to serve each.
pub(crate) const HEDGE_AFTER: Duration = Duration::from_secs(3);

/// Bytes of a piece, of blobs of up to 2 GiB; it has more of those that are bigger.
const PIECE: u64 = 4 << 20;

/// For a connection: it is on this machine, or near.
pub(crate) const CONNECT: Duration = Duration::from_millis(500);

/// The port at which it says that it lives, unless somebody changed that.
const HEALTH_PORT: u16 = 4003;

/// A Dragonfly daemon, dfdaemon 1.5.3 or later: older ones do not know the scheduling policy.
#[derive(Clone, PartialEq, Eq)]
pub struct Dragonfly {
    proxy: Url,
    health: Url,
    credentials: bool,
    socket: Option<Arc<Socket>>,
}

impl Dragonfly {
    /// The daemon whose proxy is at `proxy`, `http://HOST:PORT`, and which says at `health` that it
    /// lives; port 4003 of the same host by default. `credentials`: it may be shown what this node
    /// shows to registries.
    ///
    /// # Errors
    /// These are no addresses of servers.
    pub fn new(proxy: &str, health: Option<&str>, credentials: bool) -> Result<Self, InvalidName> {
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

    /// Whether to ask for this range of a blob of `size` bytes: it fills most of its pieces, or a
    /// node has it. Without the daemon's socket that is unknown. Then demand reads ask, since a
    /// second fetch by another node would cost the registry more, and prefetch does not.
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

    /// Whether it may be shown what this node shows to registries.
    pub(crate) fn takes_credentials(&self) -> bool {
        self.credentials
    }

    /// The address at which it stands for the API at `upstream`.
    pub(crate) fn root(&self, upstream: &Url) -> Url {
        let mut root = self.proxy.clone();
        root.set_path(upstream.path());
        root
    }

    /// Headers that tell it which registry is meant and how a blob is to be fetched. `None` if the
    /// origin cannot be a header.
    pub(crate) fn headers(upstream: &Url) -> Option<HeaderMap> {
        let origin = upstream.origin().ascii_serialization();
        let headers = [
            ("x-dragonfly-use-p2p", "true"),
            ("x-dragonfly-registry", origin.as_str()),
            // By itself it fetches ranges of up to one piece from the registry, and tells no other
            // node.
            ("x-dragonfly-scheduling-policy", "always"),
            // A blob has the same name for all nodes, whatever registry and repository they know it
            // from.
            ("x-dragonfly-enable-task-id-based-blob-digest", "true"),
        ];
        let header = |(name, value)| {
            Some((HeaderName::from_static(name), HeaderValue::from_str(value).ok()?))
        };
        headers.into_iter().map(header).collect()
    }

    /// Waits for `answer` as long as the daemon lives; it is asked when there was none for a while.
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

/// Whether `range` is at least a quarter of the pieces that it lies in, of a blob of `size` bytes:
/// what a start reads of an image that was made for that. Of other images it is a tenth, and a
/// start through Dragonfly took ten times as long.
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
    fn its_health_is_asked_at_another_port() {
        let daemon = Dragonfly::new("http://127.0.0.1:4001", None, false).unwrap();
        assert_eq!(daemon.health.as_str(), "http://127.0.0.1:4003/healthy");
        assert_eq!(daemon.to_string(), "dragonfly at http://127.0.0.1:4001");
    }

    #[test]
    fn a_range_is_much_of_its_pieces_or_not() {
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
    fn it_is_an_address() {
        let other = Dragonfly::new("http://[::1]:1", Some("http://[::1]:2"), false).unwrap();
        assert_eq!(other.health.as_str(), "http://[::1]:2/healthy");
        for (proxy, health) in [
            ("127.0.0.1:4001", None),
            ("http://a.example:1/x", None),
            ("http://a.example:1", Some("x")),
        ] {
            assert!(Dragonfly::new(proxy, health, false).is_err(), "{proxy} {health:?}");
        }
    }
}
