//! One server that has images of a registry: the registry itself, or a mirror.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use reqwest::{Url, header::HeaderMap};

use crate::{
    name::Reference,
    route::{
        api::api,
        dragonfly::{self, Dragonfly},
        mirror::Mirror,
    },
    transport::tls::Tls,
};

/// A server's capabilities, as containerd names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capabilities {
    /// May deliver content by digest.
    pub(crate) pull: bool,
    /// May resolve tags.
    pub(crate) resolve: bool,
    /// May be pushed to.
    pub(crate) push: bool,
    /// May list referrers.
    pub(crate) referrers: bool,
}

impl Capabilities {
    pub(crate) const ALL: Self =
        Capabilities { pull: true, resolve: true, push: true, referrers: true };
    pub(crate) const NONE: Self =
        Capabilities { pull: false, resolve: false, push: false, referrers: false };
}

/// A server's address and settings. Equal servers share connections.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Server {
    /// Root of the API; ends with a slash: `https://mirror.example/v2/`.
    pub(crate) root: Url,
    pub(crate) may: Capabilities,
    pub(crate) tls: Arc<Tls>,
    /// Sent along with each request to this server.
    pub(crate) headers: HeaderMap,
    /// Time-out of a connection, if not the usual one.
    pub(crate) connect: Option<Duration>,
    /// Set if this is a peer-to-peer daemon that fetches from another server.
    pub(crate) peer: Option<Peer>,
}

impl Server {
    /// A server without particular settings.
    pub(crate) fn new(root: Url) -> Self {
        Server {
            root,
            may: Capabilities::ALL,
            tls: Arc::default(),
            headers: HeaderMap::new(),
            connect: None,
            peer: None,
        }
    }

    /// Host and port, as credentials are kept for it.
    pub(crate) fn host(&self) -> String {
        let host = self.root.host_str().unwrap_or_default();
        self.root.port().map_or(host.to_owned(), |port| format!("{host}:{port}"))
    }

    /// This server through the Dragonfly daemon of the node, if the server may deliver blobs.
    pub(crate) fn through(&self, daemon: &Dragonfly) -> Option<Server> {
        if !self.may.pull {
            return None;
        }
        let peer = Peer { daemon: daemon.clone(), upstream: Box::new(self.clone()) };
        let mut headers = peer.headers();
        headers.extend(Dragonfly::headers(&self.root)?);
        Some(Server {
            may: Capabilities { pull: true, ..Capabilities::NONE },
            headers,
            connect: Some(dragonfly::CONNECT),
            peer: Some(peer),
            ..Server::new(daemon.root(&self.root))
        })
    }

    /// Returns whether it is the server at this loopback address, by any name of this machine.
    pub(crate) fn is_at(&self, address: SocketAddr) -> bool {
        let host = self.root.host_str().unwrap_or_default().trim_matches(['[', ']']);
        let same_host = match host.parse::<IpAddr>() {
            Ok(ip) => ip == address.ip(),
            Err(_) => host == "localhost",
        };
        same_host && self.root.port_or_known_default() == Some(address.port())
    }

    /// Returns whether this is the registry itself rather than a mirror.
    pub(crate) fn is_registry(&self, reference: &Reference) -> bool {
        api(self.root.scheme(), reference.registry())
            .is_ok_and(|root| root.origin() == self.root.origin())
    }
}

impl From<&Mirror> for Server {
    fn from(mirror: &Mirror) -> Self {
        Server::new(mirror.root.clone())
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let root = self.root.as_str();
        f.write_str(root.strip_suffix("/v2/").unwrap_or(root))
    }
}

impl fmt::Debug for Server {
    // Headers may hold passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({self})")
    }
}

/// A peer-to-peer daemon and the server that it fetches from.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) daemon: Dragonfly,
    pub(crate) upstream: Box<Server>,
}

impl Peer {
    /// The headers that the upstream is sent with each request, unless the daemon must not see
    /// them: they may be passwords.
    pub(crate) fn headers(&self) -> HeaderMap {
        match self.daemon.takes_credentials() {
            true => self.upstream.headers.clone(),
            false => HeaderMap::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderValue;

    use super::*;
    use crate::route::dragonfly::PeerCredentials;

    #[test]
    fn the_registry_is_named_in_each_request() {
        let daemon =
            Dragonfly::new("http://127.0.0.1:4001", None, PeerCredentials::Withheld).unwrap();
        let mut upstream = Server::new("https://registry.example:5000/v2/proxy/".parse().unwrap());
        upstream.headers.insert("x-team", HeaderValue::from_static("secret"));
        let way = upstream.through(&daemon).unwrap();
        assert_eq!(way.root.as_str(), "http://127.0.0.1:4001/v2/proxy/");
        assert_eq!(way.headers["x-dragonfly-registry"], "https://registry.example:5000");
        assert!(!way.headers.contains_key("x-team"));
        let may = Capabilities { pull: true, ..Capabilities::NONE };
        assert_eq!(way.may, may);
        let trusted =
            Dragonfly::new("http://127.0.0.1:4001", None, PeerCredentials::Shown).unwrap();
        assert_eq!(upstream.through(&trusted).unwrap().headers["x-team"], "secret");
        upstream.may.pull = false;
        assert!(upstream.through(&daemon).is_none());
    }

    #[test]
    fn a_loopback_server_is_known_by_every_name() {
        let own = "127.0.0.1:5444".parse().unwrap();
        for (root, expected) in [
            ("https://127.0.0.1:5444/v2/", true),
            ("http://127.0.0.1:5444/v2/", true),
            ("https://localhost:5444/v2/", true),
            ("https://127.0.0.1:5445/v2/", false),
            ("https://127.0.0.1/v2/", false),
            ("https://[::1]:5444/v2/", false),
            ("https://registry.example:5444/v2/", false),
        ] {
            assert_eq!(Server::new(root.parse().unwrap()).is_at(own), expected, "{root}");
        }
    }
}
