//! A registry endpoint on the node, which containerd's pulls ask first.
//!
//! containerd asks it before the registry itself, because `hosts.toml` says so:
//!
//! ```text
//! containerd ── name, secret ──▶ Mirror ── the client's login, if any ──▶ registry, mirrors, peers
//!                                  │
//!  request_path ─ authorization ─ sessions ─┬─ manifests ── shared_answers   for some seconds
//!                                           │     ├─ outage_answers   while the registry is away
//!                                           │     └─ bundled          by the node's bundle
//!                                           └─ blobs ─ stream   in parts, hashed as they pass
//! ```
//!
//! It has no images, users or rights of its own: the registry decides what a client may see, for
//! each login separately (`sessions`). If the mirror cannot answer, it says so within
//! [`ANSWER_LIMIT`], and the client asks the registry.
#![forbid(unsafe_code)]

use std::{fmt, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Limited};
use hyper::{
    HeaderMap, Method, Request, StatusCode,
    body::Incoming,
    header::{ALLOW, AUTHORIZATION, HeaderName, HeaderValue, IF_NONE_MATCH, WWW_AUTHENTICATE},
};
use lazuli_registry::{Bundle, Login, Manifest, Options, Reference};
use tokio_rustls::rustls::ServerConfig;

mod authorization;
mod blobs;
mod bundled;
mod counters;
mod error;
mod fetch_permits;
mod files;
#[cfg(fuzzing)]
pub mod fuzz;
mod identity;
mod lazy_names;
mod manifests;
mod outage_answers;
mod pull_logins;
mod range;
mod reply;
mod request_path;
mod seal;
mod server;
mod sessions;
mod shared_answers;
mod stream;

pub use counters::Activity;
pub use error::MirrorError;
pub use identity::Identity;
pub use lazy_names::LazyNames;

use authorization::{Challenge, Shown, TokenRequest, challenges};
use counters::Counters;
use fetch_permits::FetchPermits;
use manifests::{Answer, Question};
use outage_answers::OutageAnswers;
use pull_logins::PullLogins;
use reply::{Problem, Reply};
use request_path::{NoTarget, Target};
use seal::Seal;
use sessions::Sessions;
use shared_answers::Answers;
use stream::Memory;

/// Time without an answer from a registry after which the client gets 503, and asks it directly.
/// containerd 2.4 would wait 30 s for an answer.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// Biggest form that is sent to the token endpoint, in bytes.
const FORM_LIMIT: usize = 64 << 10;

/// The operator's settings, and the directory of the mirror.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The directory for certificates and answers.
    pub directory: PathBuf,
    /// The address of the mirror and of its token endpoint.
    pub address: SocketAddr,
    /// How the node reaches registries. Its credentials are not used.
    pub registry: Options,
    /// Patterns of tags that get the lazy form of their image.
    pub lazy: LazyNames,
    /// How long manifests are answered after the registry went away.
    pub stale: Duration,
}

/// The mirror's reports to the node about pulled images.
pub trait Node: fmt::Debug + Send + Sync {
    /// The manifest of an image was fetched for a client with this login, which is about to
    /// pull it. `image` has its digest. Returns at once.
    fn expect(&self, image: Reference, manifest: Manifest, login: Option<Login>);
}

/// A mirror of every registry, for this node.
pub struct Mirror {
    address: SocketAddr,
    tls: Arc<ServerConfig>,
    seal: Seal,
    sessions: Sessions,
    answers: Arc<Answers<Question, Answer>>,
    permits: FetchPermits,
    memory: Memory,
    lazy: LazyNames,
    outage_answers: OutageAnswers,
    bundle: Option<Bundle>,
    pulls: PullLogins,
    counters: Counters,
    node: Arc<dyn Node>,
}

impl fmt::Debug for Mirror {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mirror({})", self.address)
    }
}

impl Mirror {
    /// Opens the mirror. Makes certificates if there are none.
    ///
    /// # Errors
    /// The directory cannot be used.
    pub fn open(settings: Settings, node: Arc<dyn Node>) -> Result<Arc<Self>, MirrorError> {
        let Settings { directory, address, registry, lazy, stale } = settings;
        let identity = Identity::open(&directory)?;
        // What the registry says is kept apart from what the bundle has.
        let bundle = registry.bundle.clone();
        let own = Options { own_mirror: Some(address), bundle: None, ..registry };
        Ok(Arc::new(Mirror {
            address,
            tls: Arc::new(identity.tls()?),
            seal: identity.seal()?,
            sessions: Sessions::new(own),
            answers: Answers::new(manifests::ANSWERS),
            permits: FetchPermits::default(),
            memory: Memory::default(),
            lazy,
            outage_answers: OutageAnswers::new(directory.join("answers"), stale),
            bundle,
            pulls: PullLogins::default(),
            counters: Counters::default(),
            node,
        }))
    }

    /// The login that the newest pull of `image`, which has a digest, had.
    pub fn login(&self, image: &Reference) -> Option<Login> {
        self.pulls.login(image)
    }

    /// Returns the mirror's counters.
    pub fn activity(&self) -> Activity {
        self.counters.read()
    }

    /// Answers one request.
    async fn answer(self: &Arc<Self>, request: Request<Incoming>) -> Reply {
        let is_head = request.method() == Method::HEAD;
        let reply = match Target::parse(request.uri().path(), request.uri().query()) {
            Ok(Target::Token) => self.token(request).await,
            Ok(_) if !is_head && request.method() != Method::GET => read_only(),
            Ok(Target::Root) => version(),
            Ok(target) => self.content(&target, request.headers(), is_head).await,
            Err(NoTarget::Unknown) => {
                let text = "mirrors have manifests and blobs only";
                reply::error(StatusCode::NOT_FOUND, "UNSUPPORTED", text)
            }
            Err(NoTarget::Malformed(problem)) => {
                reply::error(StatusCode::BAD_REQUEST, "NAME_INVALID", &problem)
            }
        };
        if is_head { reply::head_of(reply) } else { reply }
    }

    /// A manifest or a blob.
    async fn content(
        self: &Arc<Self>,
        target: &Target,
        headers: &HeaderMap,
        is_head: bool,
    ) -> Reply {
        let (reference, what) = match target {
            Target::Blob(reference, _) => (reference, "BLOB"),
            Target::Manifest(reference) => (reference, "MANIFEST"),
            Target::Root | Target::Token => return version(),
        };
        if self.is_own(reference) {
            let text = "the mirror has no images of its own";
            return reply::error(StatusCode::NOT_FOUND, "NAME_UNKNOWN", text);
        }
        let shown = text(headers, &AUTHORIZATION);
        let login = match Shown::read(shown, reference.registry(), &self.seal) {
            Shown::Nothing => None,
            Shown::Login(login) => Some(login),
            Shown::Unusable => return self.challenge(reference, Challenge::InvalidToken),
        };
        let is_stranger = login.is_none();
        let session = match self.sessions.get(reference, login, &self.seal) {
            Ok(session) => session,
            Err(error) => return Problem::of(&error).reply(what),
        };
        let answer = match target {
            Target::Blob(_, digest) => {
                self.blob_or_bundled(&session, *digest, headers, is_head).await
            }
            _ => {
                let document = self.manifest_or_bundled(&session, reference).await;
                document.map(|document| manifest_reply(&document, headers))
            }
        };
        match answer {
            Ok(reply) => reply,
            // The client may have a login that may see it, or may ask more often.
            Err(Problem::Denied(_) | Problem::Busy(_)) if is_stranger => {
                self.challenge(reference, Challenge::NoLogin)
            }
            Err(problem) => {
                tracing::debug!(%reference, ?problem, "a pull is left to the registry");
                problem.reply(what)
            }
        }
    }

    /// Returns whether a name means the mirror itself as its registry.
    fn is_own(&self, reference: &Reference) -> bool {
        let names = [self.address.to_string(), format!("localhost:{}", self.address.port())];
        names.iter().any(|name| name == reference.registry())
    }

    /// Asks a client for its login.
    fn challenge(&self, reference: &Reference, why: Challenge) -> Reply {
        let text = "the registry wants a login";
        let mut reply = reply::error(StatusCode::UNAUTHORIZED, "UNAUTHORIZED", text);
        for challenge in challenges(self.address, reference, why) {
            if let Ok(value) = HeaderValue::try_from(challenge) {
                reply.headers_mut().append(WWW_AUTHENTICATE, value);
            }
        }
        reply
    }

    /// The token endpoint: a login becomes a token that stands for it.
    async fn token(&self, request: Request<Incoming>) -> Reply {
        let malformed = |text: &str| reply::error(StatusCode::BAD_REQUEST, "UNSUPPORTED", text);
        let (head, body) = request.into_parts();
        let parameters = match head.method {
            Method::GET => Bytes::from(head.uri.query().unwrap_or_default().to_owned()),
            Method::POST => match Limited::new(body, FORM_LIMIT).collect().await {
                Ok(form) => form.to_bytes(),
                Err(_) => return malformed("the form is too long, or did not arrive"),
            },
            _ => return read_only(),
        };
        let shown = text(&head.headers, &AUTHORIZATION);
        let Some(TokenRequest { registry, login }) = TokenRequest::parse(&parameters, shown) else {
            return malformed("`service` does not name a registry");
        };
        let Some(login) = login else {
            return reply::error(StatusCode::UNAUTHORIZED, "UNAUTHORIZED", "there is no login");
        };
        let Some(token) = self.seal.token(&registry, &login, std::time::SystemTime::now()) else {
            return malformed("there is no token for this login");
        };
        let seconds = seal::LIFETIME.as_secs();
        let answer = serde_json::json!({
            "token": token, "access_token": token, "expires_in": seconds, "scope": "",
        });
        json(StatusCode::OK, answer.to_string())
    }
}

/// The answer with a manifest, unless the client has it.
fn manifest_reply(document: &lazuli_registry::Document, headers: &HeaderMap) -> Reply {
    let etag = reply::etag(&document.digest);
    let known = text(headers, &IF_NONE_MATCH).is_some_and(|known| known.contains(&etag));
    let mut reply = if known {
        reply::not_modified()
    } else {
        reply::whole(StatusCode::OK, document.raw.clone())
    };
    reply::describe(&mut reply, &document.digest, &document.media_type);
    reply
}

/// The answer to `/v2/`: this is a registry.
fn version() -> Reply {
    let mut reply = json(StatusCode::OK, "{}".to_owned());
    let name = HeaderName::from_static("docker-distribution-api-version");
    reply.headers_mut().insert(name, HeaderValue::from_static("registry/2.0"));
    reply
}

fn json(status: StatusCode, text: String) -> Reply {
    let mut reply = reply::whole(status, Bytes::from(text));
    let value = HeaderValue::from_static("application/json");
    reply.headers_mut().insert(hyper::header::CONTENT_TYPE, value);
    reply
}

fn read_only() -> Reply {
    let text = "mirrors are only read";
    let mut reply = reply::error(StatusCode::METHOD_NOT_ALLOWED, "UNSUPPORTED", text);
    reply.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    reply
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}
