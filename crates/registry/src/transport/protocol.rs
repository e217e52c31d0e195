//! The protocol options of one server.

use std::{sync::Arc, time::Duration};

use reqwest::redirect::Policy;

use crate::transport::tls::{Loading, Tls};

/// How long to wait, for each thing that can hang.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// For a connection, TLS included. 5 s: three SYN retransmissions (1 + 2 s) get through, and a
    /// reader that waits in the kernel learns early that a host is gone.
    pub connect: Duration,
    /// For the next bytes of an answer. 15 s: longer than the worst stall of storage behind a
    /// registry, short enough that a retry still fits into a reader's deadline.
    pub idle: Duration,
    /// For one piece of an upload, sent and accepted. 5 min: 8 MiB over 256 kbit/s.
    pub upload: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            connect: Duration::from_secs(5),
            idle: Duration::from_secs(15),
            upload: Duration::from_secs(300),
        }
    }
}

/// The protocol options of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Protocol {
    /// It is on this machine.
    pub(crate) is_loopback: bool,
    /// Its own addresses begin with `http:`.
    pub(crate) is_plain: bool,
    pub(crate) tls: Arc<Tls>,
    pub(crate) timeouts: Timeouts,
}

impl Protocol {
    /// Builds the client for this protocol. The error is a problem with this machine's TLS.
    pub(crate) fn builder(&self) -> Result<reqwest::ClientBuilder, String> {
        // From plain HTTP only a redirect leads to TLS.
        let loading = if self.is_plain { Loading::OnDemand } else { Loading::Ahead };
        let tls = self.tls.config(loading);
        let builder = reqwest::Client::builder()
            .user_agent(concat!("lazuli/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(self.timeouts.connect)
            .redirect(Policy::none())
            .tls_backend_preconfigured(
                tls.map_err(|error| format!("TLS cannot be set up: {error}"))?,
            );
        #[cfg(target_feature = "crt-static")]
        let builder = builder.dns_resolver(super::resolver::FileResolver::default());
        // A proxy cannot reach this machine's loopback interface.
        Ok(if self.is_loopback { builder.no_proxy() } else { builder })
    }
}
