//! Transport: connections, TLS, credentials, tokens, HTTP exchanges.

pub(crate) mod client;
pub(crate) mod client_pool;
pub mod credentials;
pub mod health;
pub(crate) mod keyring;
pub(crate) mod logins;
pub(crate) mod preconnect;
pub(crate) mod protocol;
#[cfg(any(test, target_feature = "crt-static"))]
mod resolver;
pub(crate) mod response;
pub(crate) mod tls;
pub(crate) mod token;
pub(crate) mod traffic;

/// Number of connections over which the data of a start is spread: opened while the manifest is
/// requested, then used by parts of the bootstrap, and of the first chunks. A new connection
/// carries ten segments, 14.6 kB, in its first round trip and twice as many in each one that
/// follows, so twice as many connections are faster by one round trip, and half as many slower by
/// one.
pub const CONNECTIONS: u64 = 16;
