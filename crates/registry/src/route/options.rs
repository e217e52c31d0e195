//! Options for access to images.

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use crate::{
    error::HostsError,
    name::Reference,
    route::{
        bundle::Bundle,
        dragonfly::Dragonfly,
        hosts::Hosts,
        mirror::Mirrors,
        server::Server,
        trusted::{IndexTrust, TrustedReferrers},
    },
    transport::{
        client_pool::ClientPool,
        credentials,
        keyring::Keyring,
        protocol::{Protocol, Timeouts},
    },
};

/// How to reach places where images live.
#[derive(Clone, Debug)]
pub struct Options {
    /// Speak HTTP without TLS, also to registries that are not on this machine.
    pub plain_http: bool,
    /// The files to read credentials from, see [`credentials::default_files`].
    pub credential_files: Vec<PathBuf>,
    /// Time limits.
    pub timeouts: Timeouts,
    /// Servers that are asked before those of `hosts` and the registry itself.
    pub mirrors: Mirrors,
    /// The peer-to-peer daemon, which is asked for blobs before all servers.
    pub dragonfly: Option<Dragonfly>,
    /// containerd's registry configuration.
    pub hosts: Hosts,
    /// Logins that came with images, shared by all images.
    pub keyring: Keyring,
    /// Repositories whose lazy referrers replace ordinary images.
    pub referrers: TrustedReferrers,
    /// The indexes that make an ordinary image lazy.
    pub indexes: IndexTrust,
    /// Health of servers and connections to them, shared by all images.
    pub pool: ClientPool,
    /// Address of this node's own mirror. containerd's `hosts.toml` names it for every registry;
    /// requests of the mirror itself leave it out.
    pub own_mirror: Option<SocketAddr>,
    /// Images that this node was delivered with.
    pub bundle: Option<Bundle>,
}

impl Default for Options {
    /// TLS but for loopback registries, the credentials of this user, and nothing of containerd's.
    fn default() -> Self {
        Options {
            plain_http: false,
            credential_files: credentials::default_files(),
            timeouts: Timeouts::default(),
            mirrors: Mirrors::default(),
            dragonfly: None,
            hosts: Hosts::default(),
            keyring: Keyring::default(),
            referrers: TrustedReferrers::default(),
            indexes: IndexTrust::default(),
            pool: ClientPool::default(),
            own_mirror: None,
            bundle: None,
        }
    }
}

impl Options {
    /// Returns the servers to ask for `reference` in their order, the registry itself last.
    pub(crate) fn servers(&self, reference: &Reference) -> Result<Vec<Server>, HostsError> {
        let mirrors = self.mirrors.of(reference.registry()).iter().map(Server::from);
        let mut servers: Vec<_> = mirrors.collect();
        servers.extend(self.hosts.servers(reference, self.plain_http)?);
        servers.retain(|server| self.own_mirror.is_none_or(|own| !server.is_at(own)));
        let upstream = servers.iter().find(|server| server.may.pull);
        let shared = self.dragonfly.as_ref().zip(upstream);
        if let Some(shared) = shared.and_then(|(daemon, upstream)| upstream.through(daemon)) {
            servers.insert(0, shared);
        }
        Ok(servers)
    }

    /// Sets up a client for plain HTTP registries on this machine, ahead of the first image. The
    /// time goes into loading code that all clients share, some milliseconds. The system's TLS
    /// roots are left to the first server that needs them.
    pub fn warm_up(&self) {
        let (tls, timeouts) = (Arc::default(), self.timeouts);
        let protocol = Protocol { is_loopback: true, is_plain: true, tls, timeouts };
        // Ignored: problems with this machine's TLS are reported when an image is opened, with its
        // name.
        let _ = self.pool.http(&protocol);
    }
}
