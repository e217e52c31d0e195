//! Upstream's API over HTTP on a Unix socket. A client that holds a connection learns from its end
//! that the process died, so none is closed for being idle.

use std::{
    convert::Infallible, fs, io, os::unix::fs::PermissionsExt as _, path::Path, sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    header::{CONNECTION, CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::watch,
};

use super::{
    documents,
    service::{Instance, Service},
};

/// Pause after a connection could not be accepted: without descriptors, the next one would fail at
/// once.
const PAUSE: Duration = Duration::from_millis(100);

/// Longer than any configuration of an image, in bytes.
const BODY_LIMIT: usize = 1 << 20;

/// Listens at a path, where a process that died may have left its socket.
pub(super) fn listen(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Answers clients until one of them ends the process.
pub(super) async fn serve(listener: UnixListener, service: Arc<Service>) {
    let (ended, mut ending) = watch::channel(false);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    tokio::spawn(connection(stream, service.clone(), ended.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(PAUSE).await;
                }
            },
            _ = ending.wait_for(|ended| *ended) => return,
        }
    }
}

async fn connection(stream: UnixStream, service: Arc<Service>, ended: watch::Sender<bool>) {
    let (tell, mut told) = watch::channel(false);
    let answer = service_fn(move |request| {
        let (service, tell) = (service.clone(), tell.clone());
        async move {
            let response = respond(request, service).await;
            tell.send_replace(response.headers().contains_key(CONNECTION));
            Ok::<_, Infallible>(response)
        }
    });
    let served = http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
    if let Err(error) = served {
        tracing::debug!(%error, "a client went away");
    }
    // After the answer was sent.
    if *told.borrow_and_update() {
        ended.send_replace(true);
    }
}

/// A request for which there is no answer.
struct Refusal {
    status: StatusCode,
    error: anyhow::Error,
}

impl From<anyhow::Error> for Refusal {
    fn from(error: anyhow::Error) -> Self {
        Refusal { status: StatusCode::INTERNAL_SERVER_ERROR, error }
    }
}

enum Answer {
    Done,
    Document(Value),
    /// Done, and the process ends.
    End,
}

async fn respond(request: Request<Incoming>, service: Arc<Service>) -> Response<Full<Bytes>> {
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let answered = answer(request, service).await;
    let (status, document) = match &answered {
        Ok(Answer::Done | Answer::End) => (StatusCode::NO_CONTENT, None),
        Ok(Answer::Document(document)) => (StatusCode::OK, Some(document.to_string())),
        Err(Refusal { status, error }) => {
            let message = format!("{error:#}");
            tracing::warn!(%method, %uri, message, "refused");
            let code = status.canonical_reason();
            (*status, Some(json!({ "code": code, "message": message }).to_string()))
        }
    };
    let mut response = Response::new(Full::new(Bytes::from(document.unwrap_or_default())));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Ok(Answer::End) = answered {
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

async fn answer(request: Request<Incoming>, service: Arc<Service>) -> Result<Answer, Refusal> {
    let malformed = |error| Refusal { status: StatusCode::BAD_REQUEST, error };
    let (head, body) = request.into_parts();
    let query = Query::of(head.uri.query()).map_err(malformed)?;
    let body = Limited::new(body, BODY_LIMIT).collect().await;
    let body = body.map_err(|error| malformed(anyhow!(error)))?.to_bytes();
    let (method, path) = (head.method, head.uri.path().to_owned());
    // What the node's daemon does takes as long as its registry.
    let work = move || match (&method, &*path) {
        (&Method::GET, "/api/v1/daemon" | "/api/v2/daemon") => {
            Ok(Answer::Document(documents::daemon(&service)))
        }
        (&Method::PUT, "/api/v1/daemon/start") => done(service.start()),
        (&Method::PUT, "/api/v1/daemon/exit") => Ok(Answer::End),
        (&Method::PUT, "/api/v1/daemon/fuse/sendfd") => done(service.send()),
        (&Method::PUT, "/api/v1/daemon/fuse/takeover") => done(service.take_over()),
        (&Method::POST, "/api/v1/mount") => {
            let instance = instance(&body).map_err(malformed)?;
            done(service.mount(query.mountpoint().map_err(malformed)?, instance))
        }
        (&Method::DELETE, "/api/v1/mount") => {
            done(service.unmount(query.mountpoint().map_err(malformed)?))
        }
        (&Method::PUT, "/api/v1/config") => {
            let Config { registry_auth } =
                serde_json::from_slice(&body).map_err(|error| malformed(error.into()))?;
            done(service.set_login(query.id(), &registry_auth))
        }
        (&Method::GET, "/api/v1/metrics") => {
            service.status(query.id())?;
            Ok(Answer::Document(documents::operations(query.id())))
        }
        (&Method::GET, "/api/v1/metrics/blobcache") => {
            let mount = service.status(query.id())?;
            Ok(Answer::Document(documents::cache(query.id(), &mount)))
        }
        // Reads that wait are in the metrics of the node's daemon.
        (&Method::GET, "/api/v1/metrics/inflight") => Ok(Answer::Done),
        (method, path) => Err(Refusal {
            status: StatusCode::NOT_FOUND,
            error: anyhow!("{method} {path} is not supported"),
        }),
    };
    tokio::task::spawn_blocking(work).await.context("the answer ended early")?
}

fn done(result: Result<()>) -> Result<Answer, Refusal> {
    Ok(result.map(|()| Answer::Done)?)
}

/// The body of `PUT /api/v1/config`.
#[derive(Deserialize)]
struct Config {
    registry_auth: String,
}

/// The body of `POST /api/v1/mount`.
#[derive(Deserialize)]
struct Mount {
    fs_type: String,
    source: std::path::PathBuf,
    #[serde(default)]
    config: String,
}

fn instance(body: &[u8]) -> Result<Instance> {
    let Mount { fs_type, source, config } = serde_json::from_slice(body)?;
    if !source.is_absolute() {
        return Err(anyhow!("`source` is {}, expected an absolute path", source.display()));
    }
    match &*fs_type {
        "rafs" => Ok(Instance::Image { source, config }),
        "passthrough_fs" => Ok(Instance::Directory { source }),
        other => Err(anyhow!("`fs_type` is `{other}`, expected `rafs` or `passthrough_fs`")),
    }
}

/// What follows the path of a request.
#[derive(Default)]
struct Query {
    mountpoint: Option<String>,
    id: Option<String>,
}

impl Query {
    fn of(query: Option<&str>) -> Result<Self> {
        let mut parsed = Query::default();
        for (name, value) in form_urlencoded::parse(query.unwrap_or_default().as_bytes()) {
            match &*name {
                "mountpoint" => parsed.mountpoint = Some(value.into_owned()),
                "id" => parsed.id = Some(value.into_owned()),
                other => return Err(anyhow!("the parameter `{other}` is not supported")),
            }
        }
        Ok(parsed)
    }

    fn mountpoint(&self) -> Result<&str> {
        self.mountpoint.as_deref().context("expected `?mountpoint=PATH`")
    }

    /// The mount that is meant; without a name the one of a process that has only one.
    fn id(&self) -> &str {
        self.id.as_deref().unwrap_or("/")
    }
}
