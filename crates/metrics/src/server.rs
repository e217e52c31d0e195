//! An HTTP server with few connections: each gets one answer within [`CONNECTION_LIMIT`], then
//! closes.

use std::{
    collections::VecDeque,
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    header::{ALLOW, CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::AbortHandle,
    time::{Instant, sleep, timeout},
};

use crate::{
    address::{Address, Listener},
    family::{Family, encode},
};

/// Measures everything.
pub type Measure = dyn Fn() -> BoxFuture<'static, Vec<Family>> + Send + Sync;

/// Maximum number of connections. One more closes the oldest: a scrape takes milliseconds, so an
/// old connection is stuck or hostile.
const CONNECTIONS: usize = 64;

/// Time limit for a connection, from accept to the last byte of its answer: Prometheus's default
/// scrape timeout, after which it no longer reads the answer.
const CONNECTION_LIMIT: Duration = Duration::from_secs(10);

/// Time limit for the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// Largest head of a request, in bytes; the least that the HTTP library takes.
const HEAD_LIMIT: usize = 8 << 10;

/// How long one text is reused for all clients. Measuring the cache reads directories.
const TEXT_LIFETIME: Duration = Duration::from_secs(1);

/// Pause between two accepts. It caps a flood of clients at 500 connections a second, too few to
/// slow down the node's readers.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(2);

/// Pause before an address that is taken is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// The content type of OpenMetrics.
const OPENMETRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// Answers clients at `address` until `shutdown` ends. While the address is in use, it retries: a
/// daemon without metrics is better than none.
pub async fn serve(address: Address, measure: Arc<Measure>, shutdown: impl Future<Output = ()>) {
    tokio::pin!(shutdown);
    let serving = async {
        let listener = listen(&address).await;
        tracing::info!(%address, "serving metrics");
        accept_all(listener, Arc::new(Page::new(measure))).await;
    };
    tokio::select! {
        () = serving => {}
        () = &mut shutdown => {}
    }
}

async fn listen(address: &Address) -> Listener {
    let mut last_logged = None;
    loop {
        match address.listen().await {
            Ok(listener) => return listener,
            Err(error) if last_logged == Some(error.kind()) => {}
            Err(error) => {
                tracing::error!(%address, %error, "metrics are not served, trying again");
                last_logged = Some(error.kind());
            }
        }
        sleep(RETRY).await;
    }
}

async fn accept_all(listener: Listener, page: Arc<Page>) {
    let mut open = Open::default();
    loop {
        let accepted = match &listener {
            Listener::Tcp(tcp) => tcp.accept().await.map(|(stream, _)| open.begin(stream, &page)),
            Listener::Unix(unix) => {
                unix.accept().await.map(|(stream, _)| open.begin(stream, &page))
            }
        };
        if let Err(error) = accepted {
            tracing::debug!(%error, "no connection for metrics");
        }
        // Also after an error: with no descriptor left, the next accept would fail at once.
        sleep(ACCEPT_INTERVAL).await;
    }
}

/// Open connections, the oldest first. Dropping it closes them.
#[derive(Debug, Default)]
struct Open(VecDeque<AbortHandle>);

impl Open {
    fn begin(
        &mut self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        page: &Arc<Page>,
    ) {
        self.0.retain(|connection| !connection.is_finished());
        if self.0.len() >= CONNECTIONS
            && let Some(oldest) = self.0.pop_front()
        {
            oldest.abort();
        }
        let page = page.clone();
        let task = tokio::spawn(async move {
            match timeout(CONNECTION_LIMIT, answer_one_request(stream, page)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "a client of metrics went away"),
                Err(_) => tracing::debug!("a client of metrics is too slow"),
            }
        });
        self.0.push_back(task.abort_handle());
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

/// Answers one request.
async fn answer_one_request(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    page: Arc<Page>,
) -> Result<(), hyper::Error> {
    let service = service_fn(move |request| {
        let page = page.clone();
        async move { Ok::<_, Infallible>(respond(&request, &page).await) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(false)
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_LIMIT)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

async fn respond<B>(request: &Request<B>, page: &Page) -> Response<Full<Bytes>> {
    let (status, kind, body) = match (request.method(), request.uri().path()) {
        (&(Method::GET | Method::HEAD), "/metrics") => match page.text().await {
            Some(text) => (StatusCode::OK, OPENMETRICS, text),
            None => {
                let problem = Bytes::from_static(b"the metrics have no text\n");
                (StatusCode::INTERNAL_SERVER_ERROR, plain(), problem)
            }
        },
        (&(Method::GET | Method::HEAD), _) => {
            let hint = Bytes::from_static(b"metrics are at /metrics\n");
            (StatusCode::NOT_FOUND, plain(), hint)
        }
        _ => (StatusCode::METHOD_NOT_ALLOWED, plain(), Bytes::from_static(b"expected GET\n")),
    };
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, kind);
    if status == StatusCode::METHOD_NOT_ALLOWED {
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    }
    response
}

fn plain() -> HeaderValue {
    HeaderValue::from_static("text/plain; charset=utf-8")
}

/// The answer to `/metrics`, measured at most once every [`TEXT_LIFETIME`].
struct Page {
    measure: Arc<Measure>,
    last: Mutex<Option<Measurement>>,
}

/// A measurement, in progress or done. Clients that ask meanwhile share it, and it continues when
/// they disconnect.
struct Measurement {
    begun: Instant,
    text: Shared<BoxFuture<'static, Option<Bytes>>>,
}

impl Page {
    fn new(measure: Arc<Measure>) -> Self {
        Page { measure, last: Mutex::default() }
    }

    /// `None` if there is none, for reasons that are in the log.
    async fn text(&self) -> Option<Bytes> {
        let text = {
            let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            let is_fresh = |last: &Measurement| {
                last.text.peek().is_none() || last.begun.elapsed() < TEXT_LIFETIME
            };
            if !last.as_ref().is_some_and(is_fresh) {
                *last = Some(self.begin());
            }
            last.as_ref()?.text.clone()
        };
        text.await
    }

    fn begin(&self) -> Measurement {
        let families = (self.measure)();
        let measuring = tokio::spawn(async move { encode(families.await) });
        let text = async move {
            let problem = match measuring.await {
                Ok(Ok(text)) => return Some(text.into()),
                Ok(Err(error)) => error.to_string(),
                Err(error) => error.to_string(),
            };
            tracing::error!(problem, "metrics have no text");
            None
        };
        Measurement { begun: Instant::now(), text: text.boxed().shared() }
    }
}

/// Serves one connection with `bytes` as the client's input: answered or refused, then closed.
#[cfg(fuzzing)]
pub(crate) fn request(bytes: &[u8]) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_time().build() else {
        return;
    };
    runtime.block_on(async {
        let (mut client, server) = duplex(1 << 20);
        let page = Arc::new(Page::new(Arc::new(|| Box::pin(async { Vec::new() }))));
        if client.write_all(bytes).await.is_ok() && client.shutdown().await.is_ok() {
            let _ = answer_one_request(server, page).await;
            let mut answer = Vec::new();
            let _ = client.read_to_end(&mut answer).await;
            assert!(answer.is_empty() || answer.starts_with(b"HTTP/1."));
        }
    });
}
