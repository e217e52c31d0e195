//! The page of metrics.

use std::{
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
};
use tokio::time::{Instant, sleep};

use crate::{
    address::{Address, Listener},
    connections::{Limits, answer_all},
    family::{Family, encode},
};

/// Measures everything.
pub type Measure = dyn Fn() -> BoxFuture<'static, Vec<Family>> + Send + Sync;

/// A scrape takes milliseconds, so an old connection is stuck or hostile. The time is Prometheus's
/// default scrape timeout, after which it no longer reads the answer.
const LIMITS: Limits = Limits { connections: 64, time: Duration::from_secs(10) };

/// How long one text is reused for all clients. Measuring the cache reads directories.
const TEXT_LIFETIME: Duration = Duration::from_secs(1);

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
        let page = Arc::new(Page::new(measure));
        answer_all(listener, LIMITS, move |request| respond(request, page.clone())).await;
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

async fn respond<B>(request: Request<B>, page: Arc<Page>) -> Response<Full<Bytes>> {
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

    use crate::connections::answer_one;
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_time().build() else {
        return;
    };
    runtime.block_on(async {
        let (mut client, server) = duplex(1 << 20);
        let page = Arc::new(Page::new(Arc::new(|| Box::pin(async { Vec::new() }))));
        if client.write_all(bytes).await.is_ok() && client.shutdown().await.is_ok() {
            let _ = answer_one(server, move |request| respond(request, page.clone())).await;
            let mut answer = Vec::new();
            let _ = client.read_to_end(&mut answer).await;
            assert!(answer.is_empty() || answer.starts_with(b"HTTP/1."));
        }
    });
}
