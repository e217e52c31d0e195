//! Health and connections of servers, shared by open images.
//!
//! A node opens an image several times, to check it, to mount it and to read it, and opens other
//! images of the same registry. Each opening makes its own object, which reuses the state and
//! connections of earlier ones.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use tokio::time::Instant;

use crate::transport::{
    CONNECTIONS, health::Health, preconnect::Preconnect, protocol::Protocol, traffic::Traffic,
};

/// How long images share one client. A client reads the system's TLS roots once, and an added root
/// must count without a restart. Idle connections end after 90 s.
const CLIENT_AGE: Duration = Duration::from_secs(300);

/// How long it is remembered whether a server has the referrers API.
const REFERRERS_API_AGE: Duration = Duration::from_secs(3600);

/// Idle connections kept for each server: enough for two starts. A burst may open more, which close
/// afterwards.
const MOST_IDLE: usize = 2 * CONNECTIONS as usize;

/// How long preconnected connections count as warm: servers that close idle ones early do so after
/// a minute or more, nginx after 75 s.
const WARM: Duration = Duration::from_secs(60);

/// Whether a server has the referrers API of the OCI distribution specification 1.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReferrersApi {
    /// It has the API.
    Present,
    /// It lacks the API: lists of referrers are under tags.
    Missing,
}

/// State of the servers in use. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct ClientPool(Arc<Mutex<Servers>>);

/// Maps are keyed by the origin of a server.
#[derive(Debug, Default)]
struct Servers {
    health: HashMap<String, Weak<Health>>,
    /// Whether servers have the referrers API, and since when that is known. Entries stay after a
    /// server's last image is gone: few servers are used within the hour for which an entry counts.
    referrers_api: HashMap<String, (ReferrersApi, Instant)>,
    /// Connections to a server that were opened ahead, and when.
    prepared: HashMap<String, (Preconnect, Instant)>,
    clients: Vec<SharedClient>,
    traffic: Arc<Traffic>,
}

/// A connection pool and the settings of its servers: only servers with the same settings share a
/// pool, so that trust in one and identities shown to it never apply to another.
#[derive(Debug)]
struct SharedClient {
    protocol: Protocol,
    made: Instant,
    http: reqwest::Client,
}

impl ClientPool {
    /// The health of the server at `origin`, `https://registry.example`.
    pub fn at(&self, origin: &str) -> Arc<Health> {
        let mut servers = self.lock();
        if let Some(health) = servers.health.get(origin).and_then(Weak::upgrade) {
            return health;
        }
        servers.health.retain(|_, health| health.strong_count() > 0);
        let health = Arc::new(Health::new(origin));
        servers.health.insert(origin.to_owned(), Arc::downgrade(&health));
        health
    }

    /// Counters of all these servers' data and failures.
    pub fn traffic(&self) -> Arc<Traffic> {
        self.lock().traffic.clone()
    }

    /// Returns the client for requests without a body to servers with this protocol. Images share
    /// its connections and the system's roots that it loaded. The error is a problem with this
    /// machine's TLS.
    pub(crate) fn http(&self, protocol: &Protocol) -> Result<reqwest::Client, String> {
        let clients = &mut self.lock().clients;
        clients.retain(|client| client.made.elapsed() < CLIENT_AGE);
        if let Some(client) = clients.iter().find(|client| client.protocol == *protocol) {
            return Ok(client.http.clone());
        }
        let builder = protocol.builder()?.read_timeout(protocol.timeouts.idle);
        let builder = builder.pool_max_idle_per_host(MOST_IDLE);
        let http = builder.build().map_err(|error| error.to_string())?;
        let made = Instant::now();
        clients.push(SharedClient { protocol: protocol.clone(), made, http: http.clone() });
        Ok(http)
    }

    /// Returns the connections that were opened ahead within the last minute, else has them opened
    /// by `begin`.
    pub(crate) fn preconnect(
        &self,
        origin: &str,
        begin: impl FnOnce() -> Preconnect,
    ) -> Preconnect {
        let prepared = &mut self.lock().prepared;
        prepared.retain(|_, (_, when)| when.elapsed() < WARM);
        let opened = prepared.entry(origin.to_owned());
        opened.or_insert_with(|| (begin(), Instant::now())).0.clone()
    }

    /// Returns whether the server has a referrers API, if an answer of the last hour told.
    pub(crate) fn referrers_api(&self, origin: &str) -> Option<ReferrersApi> {
        let (api, since) = self.lock().referrers_api.get(origin).copied()?;
        (since.elapsed() < REFERRERS_API_AGE).then_some(api)
    }

    /// Notes that the server has, or lacks, a referrers API.
    pub(crate) fn note_referrers_api(&self, origin: &str, api: ReferrersApi) {
        let known = &mut self.lock().referrers_api;
        known.retain(|_, (_, since)| since.elapsed() < REFERRERS_API_AGE);
        known.insert(origin.to_owned(), (api, Instant::now()));
    }

    fn lock(&self) -> MutexGuard<'_, Servers> {
        // No panic can leave the state half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        route::options::Options,
        transport::{protocol::Timeouts, tls::Tls},
    };

    #[test]
    fn a_server_is_known_by_its_origin() {
        let pool = ClientPool::default();
        let one = pool.at("http://a.example");
        assert!(Arc::ptr_eq(&one, &pool.clone().at("http://a.example")));
        assert!(!Arc::ptr_eq(&one, &pool.at("https://a.example")));
    }

    #[tokio::test(start_paused = true)]
    async fn the_referrers_api_of_a_server_is_known_for_an_hour() {
        let pool = ClientPool::default();
        pool.note_referrers_api("http://a.example", ReferrersApi::Missing);
        pool.note_referrers_api("http://b.example", ReferrersApi::Missing);
        pool.note_referrers_api("http://b.example", ReferrersApi::Present);
        assert_eq!(pool.referrers_api("http://a.example"), Some(ReferrersApi::Missing));
        assert_eq!(pool.referrers_api("http://b.example"), Some(ReferrersApi::Present));
        assert_eq!(pool.referrers_api("http://c.example"), None);
        tokio::time::advance(REFERRERS_API_AGE).await;
        assert_eq!(pool.referrers_api("http://a.example"), None);
    }

    #[tokio::test(start_paused = true)]
    async fn connections_are_opened_ahead_once_a_minute() {
        let pool = ClientPool::default();
        let begins = |origin: &str| {
            let mut begun = false;
            pool.preconnect(origin, || {
                begun = true;
                Preconnect::default()
            });
            begun
        };
        assert!(begins("http://a.example"));
        assert!(begins("http://b.example"));
        tokio::time::advance(WARM / 2).await;
        assert!(!begins("http://a.example"));
        tokio::time::advance(WARM / 2).await;
        assert!(begins("http://a.example"));
    }

    #[tokio::test(start_paused = true)]
    async fn only_servers_with_the_same_settings_share_a_client() {
        let pool = ClientPool::default();
        let clients = || pool.lock().clients.len();
        let ask = |protocol: &Protocol| {
            pool.http(protocol).unwrap();
            clients()
        };
        let usual = Protocol {
            is_loopback: false,
            is_plain: false,
            tls: Arc::default(),
            timeouts: Timeouts::default(),
        };
        let local = Protocol { is_loopback: true, ..usual.clone() };
        let plain = Protocol { is_plain: true, ..usual.clone() };
        let trusting = Tls { skip_verify: true, ..Tls::default() };
        let trusting = Protocol { tls: Arc::new(trusting), ..usual.clone() };
        let connect = Duration::from_secs(1);
        let hasty = Protocol { timeouts: Timeouts { connect, ..usual.timeouts }, ..usual.clone() };
        let all = [usual, local, plain, trusting, hasty];
        for (position, protocol) in all.iter().enumerate() {
            assert_eq!(ask(protocol), position + 1);
        }
        assert!(all.iter().all(|protocol| ask(protocol) == all.len()));
        tokio::time::advance(CLIENT_AGE).await;
        assert_eq!(ask(&all[0]), 1);
    }

    #[tokio::test]
    async fn an_image_finds_the_client_that_was_set_up_ahead() {
        let options = Options::default();
        options.warm_up();
        let clients = || options.pool.lock().clients.len();
        assert_eq!(clients(), 1);
        crate::open(&"127.0.0.1:5000/a:1".parse().unwrap(), &options).unwrap();
        assert_eq!(clients(), 1);
    }
}
