//! Request policy: whether, when and how patiently to send requests to a place.

use std::{ops::Range, sync::Arc, time::Duration};

use lazuli_image::{Digest, Stored};

use crate::{
    blob::Urgency,
    distribution::range,
    route::dragonfly,
    transport::{client::Client, health::Health, preconnect::Preconnect, traffic::ServerTraffic},
};

/// How to use the server behind a place. The default is that of a directory: ask for anything, at
/// any time.
///
/// A peer-to-peer daemon fetches for several nodes, in pieces larger than most reads, so it is
/// asked for less than a registry or mirror and is given more time.
#[derive(Clone, Debug, Default)]
pub struct RequestPolicy {
    /// The server to connect to ahead of requests.
    preconnect: Option<Arc<Client>>,
    /// The record of the server that most requests go to.
    health: Option<Arc<Health>>,
    /// The peer-to-peer daemon that all requests go through.
    peer: Option<Arc<Client>>,
    /// The counters of the only server.
    traffic: Option<ServerTraffic>,
}

impl RequestPolicy {
    /// The policy for one server.
    pub(crate) fn of(client: &Arc<Client>) -> Self {
        let peer = client.server().peer.is_some().then(|| client.clone());
        RequestPolicy {
            preconnect: peer.is_none().then(|| client.clone()),
            health: Some(client.health().clone()),
            peer,
            traffic: Some(client.traffic().clone()),
        }
    }

    /// The policy for several servers together: connections are opened to the server of `first`,
    /// and the record is that of `record`.
    pub(crate) fn combined(first: Option<Self>, record: Option<Self>) -> Self {
        RequestPolicy {
            preconnect: first.and_then(|policy| policy.preconnect),
            health: record.and_then(|policy| policy.health),
            peer: None,
            traffic: None,
        }
    }

    /// Starts to open connections for many requests to come, unless the server is near or this
    /// happened within the last minute. Call it on a runtime, before the first request, and await
    /// the result before the others. Requests work whether or not it succeeds.
    pub fn preconnect(&self) -> Preconnect {
        self.preconnect.as_ref().map_or_else(Preconnect::default, |client| client.preconnect())
    }

    /// Announces that the whole blob is going to be read, so that a peer-to-peer daemon may begin.
    /// Call it on a runtime. Reads work whether or not it succeeds.
    pub fn expect_whole(&self, blob: &Digest) {
        if let Some(client) = &self.peer {
            range::expect_whole(client.clone(), *blob);
        }
    }

    /// Whether the server is a peer-to-peer daemon: its answers come from other nodes, so it must
    /// not be asked for bytes without a digest.
    pub fn is_peer(&self) -> bool {
        self.peer.is_some()
    }

    /// Returns whether to ask for blobs of this size.
    pub fn suits_size(&self, bytes: u64) -> bool {
        self.peer.is_none() || bytes >= dragonfly::LEAST
    }

    /// Returns whether to ask for this range of a blob of `size` bytes. A peer-to-peer daemon
    /// fetches whole pieces if no node has them yet.
    pub async fn suits_range(
        &self,
        blob: &Digest,
        size: u64,
        range: &Range<Stored>,
        urgency: Urgency,
    ) -> bool {
        match self.peer.as_ref().and_then(|client| client.server().peer.as_ref()) {
            Some(peer) => peer.daemon.suits_range(blob, size, range, urgency).await,
            None => true,
        }
    }

    /// Silence of the server before a hedged request; `None` for the default.
    pub fn hedge_after(&self) -> Option<Duration> {
        self.is_peer().then_some(dragonfly::HEDGE_AFTER)
    }

    /// Counters of the server; `None` for directories, and for several servers together.
    pub fn traffic(&self) -> Option<&ServerTraffic> {
        self.traffic.as_ref()
    }

    /// The server's health; `None` for directories.
    pub fn health(&self) -> Option<&Arc<Health>> {
        self.health.as_ref()
    }
}
