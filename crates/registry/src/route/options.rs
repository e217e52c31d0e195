//! Options for access to images.

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use crate::{
    error::HostsError,
    name::Reference,
    route::{
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
    /// Where to look for credentials, see [`credentials::default_files`].
    pub credential_files: Vec<PathBuf>,
    /// How long to wait.
    pub timeouts: Timeouts,
    /// Servers that are asked before those of `hosts` and the registry itself.
    pub mirrors: Mirrors,
    /// The peer-to-peer daemon, which is asked for blobs before all servers.
    pub dragonfly: Option<Dragonfly>,
    /// What containerd has been told about registries.
    pub hosts: Hosts,
    /// Logins that came with images, shared by all images.
    pub keyring: Keyring,
    /// Repositories whose referrers take an ordinary image's place.
    pub referrers: TrustedReferrers,
    /// Which index makes an ordinary image a lazy one.
    pub indexes: IndexTrust,
    /// Health of servers and connections to them, shared by all images.
    pub pool: ClientPool,
    /// Where this node's own mirror listens. containerd's `hosts.toml` names it for every registry;
    /// it is left out here, because it would ask itself.
    pub own_mirror: Option<SocketAddr>,
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
        }
    }
}

impl Options {
    /// The servers that have what `reference` names, in the order in which they are to be asked,
    /// the registry itself last.
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

    /// Sets up the client for plain registries on this machine, ahead of the first image. What
    /// takes some milliseconds of it is to load the code, which is that of all clients; the
    /// system's TLS roots are left to the first server that needs them.
    pub fn warm_up(&self) {
        let (tls, timeouts) = (Arc::default(), self.timeouts);
        let manner = Protocol { is_loopback: true, is_plain: true, tls, timeouts };
        // What is wrong with this machine's TLS is told when an image is opened, with the image's
        // name.
        let _ = self.pool.http(&manner);
    }
}
