//! One server that has images of a registry: the registry itself, or a mirror.

use std::{fmt, sync::Arc, time::Duration};

use reqwest::{Url, header::HeaderMap};

use crate::{dragonfly::Through, mirror::Mirror, name::Reference, tls::Tls};

/// What a server is trusted with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capabilities {
    /// To deliver what has a digest.
    pub(crate) pull: bool,
    /// To say what a tag means.
    pub(crate) resolve: bool,
    /// To be pushed to.
    pub(crate) push: bool,
    /// To say what refers to an image.
    pub(crate) referrers: bool,
}

impl Capabilities {
    pub(crate) const ALL: Self =
        Capabilities { pull: true, resolve: true, push: true, referrers: true };
    pub(crate) const NONE: Self =
        Capabilities { pull: false, resolve: false, push: false, referrers: false };
}

/// Where a server is, and how it is spoken to. Equal ones need no second connection.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Server {
    /// Root of the API; ends with a slash: `https://mirror.example/v2/`.
    pub(crate) root: Url,
    pub(crate) may: Capabilities,
    pub(crate) tls: Arc<Tls>,
    /// Sent along with each request to this server.
    pub(crate) headers: HeaderMap,
    /// For a connection, instead of what is usual.
    pub(crate) connect: Option<Duration>,
    /// Whom this is a way to, if it is one that nodes share.
    pub(crate) through: Option<Through>,
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
            through: None,
        }
    }

    /// Host and port, as credentials are kept for it.
    pub(crate) fn host(&self) -> String {
        let host = self.root.host_str().unwrap_or_default();
        self.root.port().map_or(host.to_owned(), |port| format!("{host}:{port}"))
    }

    /// Whether it is the very registry that images name, and not somebody who has the same.
    pub(crate) fn is_registry(&self, reference: &Reference) -> bool {
        api(self.root.scheme(), reference.registry())
            .is_ok_and(|root| root.origin() == self.root.origin())
    }
}

/// The root of the API at a host and port; what is wrong with them, otherwise.
pub(crate) fn api(scheme: &str, host: &str) -> Result<Url, String> {
    // Docker Hub's API is not at the host that names it.
    let host = if host == "docker.io" { "registry-1.docker.io" } else { host };
    Url::parse(&format!("{scheme}://{host}/v2/")).map_err(|error| error.to_string())
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
