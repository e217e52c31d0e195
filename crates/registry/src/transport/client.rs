//! One HTTP conversation with a registry: authorization, redirects, and errors with names.

use std::{
    fmt,
    future::Future,
    ops::Range,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::future::{FutureExt as _, join_all};
use lazuli_image::{Digest, Stored};
use reqwest::{
    Method, Response, StatusCode, Url,
    header::{AUTHORIZATION, HeaderMap},
};

use crate::{
    error::RegistryError,
    name::Reference,
    route::{options::Options, server::Server},
    transport::{
        CONNECTIONS,
        client_pool::ClientPool,
        client_pool::ReferrersApi,
        health::Health,
        preconnect::Preconnect,
        protocol::{Protocol, Timeouts},
        response::{DETAIL_LIMIT, detail, location, read_bounded, retry_after, stale},
        token::{Authorizer, Tried},
        traffic::{ServerKind, ServerTraffic},
    },
};

/// Redirects that are followed for one request. Registries use one, and some CDNs add another.
const REDIRECT_LIMIT: usize = 4;

/// One request. `object` is for messages.
#[derive(Clone, Debug)]
pub(crate) struct Call<'a> {
    pub(crate) method: Method,
    pub(crate) url: Url,
    pub(crate) scope: &'a str,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Option<Bytes>,
    pub(crate) object: &'a str,
}

/// A registry's repository over HTTP.
pub(crate) struct Client {
    /// The user's name for the image, for messages.
    pub(crate) place: String,
    reference: Reference,
    /// The registry that this server mirrors, sent as `ns` in each request: proxies for several
    /// registries that are made for containerd go by it.
    mirrors: Option<String>,
    server: Server,
    base: Url,
    health: Arc<Health>,
    traffic: ServerTraffic,
    pool: ClientPool,
    protocol: Protocol,
    http: reqwest::Client,
    /// Without an idle time-out: the answer to an upload only starts when the body has been sent.
    uploads: OnceLock<reqwest::Client>,
    authorizer: Arc<Authorizer>,
    /// It has given something to us without credentials, and with them.
    is_open: AtomicBool,
    is_closed: AtomicBool,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Client({} at {})", self.place, self.base)
    }
}

impl Client {
    /// Opens `image` at one of its servers. Credentials in files are looked up for that server's
    /// host; logins that came with images are for the registry itself.
    pub(crate) fn new(
        image: &Reference,
        server: Server,
        options: &Options,
    ) -> Result<Self, RegistryError> {
        // A peer-to-peer daemon gets the upstream's credentials, or none.
        let upstream = server.peer.as_ref().map_or(&server, |peer| &peer.upstream);
        let is_registry = upstream.is_registry(image);
        let (mut place, reference, mirrors) = if is_registry {
            (image.to_string(), image.clone(), None)
        } else {
            let place = format!("{image} (mirror {upstream})");
            (place, image.on(&upstream.host()), Some(image.registry().to_owned()))
        };
        if let Some(peer) = &server.peer {
            place = format!("{image} ({})", peer.daemon);
        }
        let malformed = |problem: String| RegistryError::malformed(&place, "the address", problem);
        let base = server.root.join(&format!("{}/", image.repository()));
        let base = base.map_err(|error| malformed(error.to_string()))?;
        let connect = server.connect.unwrap_or(options.timeouts.connect);
        let protocol = Protocol {
            is_loopback: image.on(&server.host()).is_loopback(),
            is_plain: base.scheme() == "http",
            tls: server.tls.clone(),
            timeouts: Timeouts { connect, ..options.timeouts },
        };
        let http = options.pool.http(&protocol).map_err(malformed)?;
        let authorizer = options.keyring.authorizer(upstream, &reference, || {
            let logins = is_registry.then(|| options.keyring.logins().clone());
            Authorizer::new(reference.clone(), options.credential_files.clone(), logins)
        });
        let health = options.pool.at(&base.origin().ascii_serialization());
        if server.peer.is_some() {
            // It runs on this node, and most of the time of its answers is its own work.
            health.answered(Duration::ZERO);
        }
        let kind = match () {
            () if server.peer.is_some() => ServerKind::Peer,
            () if is_registry => ServerKind::Registry,
            () => ServerKind::Mirror,
        };
        let traffic = ServerTraffic { all: options.pool.traffic(), kind };
        Ok(Client {
            place,
            health,
            traffic,
            pool: options.pool.clone(),
            reference,
            mirrors,
            server,
            base,
            protocol,
            http,
            uploads: OnceLock::new(),
            authorizer,
            is_open: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        })
    }

    /// Returns whether the server never needed credentials so far, see
    /// [`Pull::serves_anonymously`](crate::Pull::serves_anonymously).
    pub(crate) fn serves_anonymously(&self) -> bool {
        self.is_open.load(Ordering::Relaxed) && !self.is_closed.load(Ordering::Relaxed)
    }

    /// Notes an answer to a request with or without credentials. Headers that the operator set for
    /// the server count as credentials.
    fn note_access(&self, status: StatusCode, tried: &Tried) {
        if status.is_success() || status.is_redirection() {
            let is_open = tried.is_open() && self.server.headers.is_empty();
            let seen = if is_open { &self.is_open } else { &self.is_closed };
            seen.store(true, Ordering::Relaxed);
        }
    }

    /// The server that is asked.
    pub(crate) fn server(&self) -> &Server {
        &self.server
    }

    /// The URL of `path` in this repository: `manifests/latest`.
    pub(crate) fn url(&self, path: &str) -> Result<Url, RegistryError> {
        let joined = self.base.join(path);
        let mut url = joined
            .map_err(|error| RegistryError::malformed(&self.place, path, error.to_string()))?;
        self.name_registry(&mut url);
        Ok(url)
    }

    /// Resolves a link to a further page; `None` if it leads to another server.
    pub(crate) fn page(&self, response: &Response, link: &str) -> Option<Url> {
        let mut url = response.url().join(link).ok().filter(|url| self.is_registry(url))?;
        if !url.query_pairs().any(|(key, _)| key == "ns") {
            self.name_registry(&mut url);
        }
        Some(url)
    }

    /// Tells a mirror which registry a request is for.
    fn name_registry(&self, url: &mut Url) {
        if let Some(registry) = &self.mirrors {
            url.query_pairs_mut().append_pair("ns", registry);
        }
    }

    /// Opens connections for requests to come, unless that happened lately or the server is near.
    /// Sends pings: the HTTP library has no other way to fill its connection pool.
    pub(crate) fn preconnect(&self) -> Preconnect {
        if self.health.is_near() {
            return Preconnect::default();
        }
        let mut url = self.server.root.clone();
        self.name_registry(&mut url);
        let (http, limit) = (self.http.clone(), self.protocol.timeouts.connect);
        let ping = move |_| {
            let request = http.get(url.clone()).timeout(limit);
            async move {
                // Any answer will do, and 401 is usual. A connection returns to the pool once its
                // answer was read.
                if let Ok(response) = request.send().await {
                    let _ = read_bounded(response, DETAIL_LIMIT, "", "").await;
                }
            }
        };
        // The manifest is requested meanwhile. The parts of the bootstrap, the config and the
        // lookup of a trace follow.
        self.pool.preconnect(&self.base.origin().ascii_serialization(), || {
            Preconnect::begin(self.health.clone(), join_all((0..=CONNECTIONS).map(ping)).map(drop))
        })
    }

    /// Returns whether the server has a referrers API, if that is known.
    pub(crate) fn referrers_api(&self) -> Option<ReferrersApi> {
        self.pool.referrers_api(&self.base.origin().ascii_serialization())
    }

    /// Notes that the server has, or lacks, a referrers API.
    pub(crate) fn note_referrers_api(&self, api: ReferrersApi) {
        self.pool.note_referrers_api(&self.base.origin().ascii_serialization(), api);
    }

    /// Waits for `answer`. For a peer-to-peer daemon, gives up when its health probe fails.
    pub(crate) async fn watch<T>(
        &self,
        object: &str,
        answer: impl Future<Output = Result<T, RegistryError>>,
    ) -> Result<T, RegistryError> {
        match &self.server.peer {
            Some(peer) => peer.daemon.watch(&self.http, &self.place, object, answer).await,
            None => answer.await,
        }
    }

    /// Reads the next chunk of a body.
    pub(crate) async fn chunk(
        &self,
        response: &mut Response,
        object: &str,
    ) -> Result<Option<Bytes>, RegistryError> {
        let failed = |error| RegistryError::http(&self.place, object, error);
        let chunk = self.watch(object, async { response.chunk().await.map_err(failed) }).await;
        match &chunk {
            Ok(bytes) => self.traffic.arrived(bytes.as_ref().map_or(0, Bytes::len)),
            Err(error) => self.traffic.note(error),
        }
        chunk
    }

    /// The server's health.
    pub(crate) fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// Counters of the server's data and failures.
    pub(crate) fn traffic(&self) -> &ServerTraffic {
        &self.traffic
    }

    /// The scope of access to this repository, in the words of token servers.
    pub(crate) fn scope(&self, actions: &str) -> String {
        format!("repository:{}:{actions}", self.reference.repository())
    }

    /// A client for requests with a body that takes long to send.
    fn uploads(&self) -> Result<&reqwest::Client, RegistryError> {
        if let Some(client) = self.uploads.get() {
            return Ok(client);
        }
        let malformed = |problem| RegistryError::malformed(&self.place, "the address", problem);
        let builder = self.protocol.builder().map_err(malformed)?;
        let built = builder.timeout(self.protocol.timeouts.upload).build();
        let client = built.map_err(|error| RegistryError::http(&self.place, "an upload", error))?;
        Ok(self.uploads.get_or_init(|| client))
    }

    /// Returns whether the host of `url` may get credentials for the registry.
    fn is_registry(&self, url: &Url) -> bool {
        url.origin() == self.base.origin()
    }

    /// The authorization to begin with.
    async fn begin(&self, scope: &str, object: &str) -> Result<Tried, RegistryError> {
        let tried = self.authorizer.begin(scope).await;
        match &self.server.peer {
            Some(peer) if tried.is_secret() && !peer.daemon.takes_credentials() => {
                let (place, object) = (self.place.clone(), object.to_owned());
                Err(RegistryError::Withheld { place, object })
            }
            _ => Ok(tried),
        }
    }

    /// Reads a part of a blob by the peer-to-peer daemon's socket; `None` if it has no socket, or
    /// doesn't deliver.
    pub(crate) async fn by_socket(
        &self,
        digest: &Digest,
        range: &Range<Stored>,
    ) -> Result<Option<Bytes>, RegistryError> {
        let Some(peer) = &self.server.peer else { return Ok(None) };
        let path = format!("blobs/{digest}");
        let mut headers = peer.headers();
        if let Some(value) = self.begin(&self.scope("pull"), &path).await?.header() {
            headers.insert(AUTHORIZATION, value.clone());
        }
        let object = format!("{}/{path}", self.reference.repository());
        let url = peer.upstream.root.join(&object);
        let mut url =
            url.map_err(|error| RegistryError::malformed(&self.place, &path, error.to_string()))?;
        self.name_registry(&mut url);
        let bytes = peer.daemon.by_socket(url, digest, range, &headers).await;
        self.traffic.arrived(bytes.as_ref().map_or(0, Bytes::len));
        Ok(bytes)
    }

    /// Sends `call` with the authorization that the registry wants. After a 401, tries all known
    /// credentials once. A call without a body must be safe to repeat.
    pub(crate) async fn send(&self, call: &Call<'_>) -> Result<Response, RegistryError> {
        let http = if call.body.is_some() { self.uploads()? } else { &self.http };
        let ours = self.is_registry(&call.url);
        let mut tried =
            if ours { self.begin(call.scope, call.object).await? } else { Tried::default() };
        let mut resent = false;
        loop {
            let mut headers = if ours { self.server.headers.clone() } else { HeaderMap::new() };
            headers.extend(call.headers.clone());
            // Replaces the operator's value only once the registry has refused that.
            if let Some(value) = tried.header() {
                headers.insert(AUTHORIZATION, value.clone());
            }
            let mut request = http.request(call.method.clone(), call.url.clone()).headers(headers);
            if let Some(body) = &call.body {
                request = request.body(body.clone());
            }
            let sent = Instant::now();
            // The inner error may be retried, so it is not counted yet.
            let sending = async { Ok(request.send().await) };
            let sent_or_not = self.watch(call.object, sending).await;
            let response = match sent_or_not.inspect_err(|error| self.traffic.note(error))? {
                Ok(response) => response,
                Err(error) if stale(&error) && call.body.is_none() && !resent => {
                    resent = true;
                    continue;
                }
                Err(error) => {
                    let error = RegistryError::http(&self.place, call.object, error);
                    self.traffic.note(&error);
                    return Err(error);
                }
            };
            if ours {
                self.health.answered(sent.elapsed());
                self.note_access(response.status(), &tried);
            }
            // Access is authorized by the registry itself.
            let is_shared = self.server.peer.is_some();
            if response.status() != StatusCode::UNAUTHORIZED || !ours || is_shared {
                return Ok(response);
            }
            if !self.authorizer.renew(&self.http, call.scope, &mut tried, &response).await? {
                return Ok(response);
            }
        }
    }

    /// Sends `call` and follows redirects, leaving the credentials at the registry. Also returns
    /// where the answer came from, if that was another host.
    pub(crate) async fn follow(
        &self,
        mut call: Call<'_>,
    ) -> Result<(Response, Option<Url>), RegistryError> {
        for _ in 0..=REDIRECT_LIMIT {
            let response = self.send(&call).await?;
            if !response.status().is_redirection() {
                let elsewhere = (!self.is_registry(&call.url)).then_some(call.url);
                return Ok((response, elsewhere));
            }
            let target = location(&response)
                .filter(|url| url.scheme() == "https" || url.scheme() == call.url.scheme());
            call.url = target.ok_or_else(|| {
                let problem = "the redirect leads to no URL, or from https to something else";
                RegistryError::malformed(&self.place, call.object, problem)
            })?;
        }
        let problem = format!("more than {REDIRECT_LIMIT} redirects");
        Err(RegistryError::malformed(&self.place, call.object, problem))
    }

    /// The error that an unexpected answer means.
    pub(crate) async fn refuse(&self, response: Response, object: &str) -> RegistryError {
        let (place, object) = (self.place.clone(), object.to_owned());
        let status = response.status();
        let retry_after = retry_after(&response);
        let kind = response.headers().get("x-dragonfly-error-type");
        let is_passed_on = self.server.peer.is_some() && kind.is_some_and(|kind| kind == "backend");
        let detail = detail(response).await;
        let error = match status {
            StatusCode::NOT_FOUND => RegistryError::Missing { place, object },
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                let host = self.reference.registry().to_owned();
                RegistryError::Denied { place, object, host, detail }
            }
            // It does well itself, and may have other blobs.
            _ if is_passed_on => {
                RegistryError::Upstream { place, object, status: status.as_u16(), detail }
            }
            _ => RegistryError::Status {
                place,
                object,
                status: status.as_u16(),
                detail,
                retry_after,
            },
        };
        self.traffic.note(&error);
        error
    }
}
