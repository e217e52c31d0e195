//! An HTTP server with few connections: each gets one answer within a time limit, then closes.

use std::{collections::VecDeque, convert::Infallible, time::Duration};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::AbortHandle,
    time::{sleep, timeout},
};

use crate::address::Listener;

/// Bounds of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of connections. One more closes the oldest.
    pub connections: usize,
    /// Time limit for a connection, from accept to the last byte of its answer.
    pub time: Duration,
}

/// Time limit for the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// Largest head of a request, in bytes; the least that the HTTP library takes.
const HEAD_LIMIT: usize = 8 << 10;

/// Pause between two accepts. It caps a flood of clients at 500 connections a second, too few to
/// slow down the node's readers.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(2);

/// Answers clients at `listener`, until the future is dropped, which closes all connections.
pub async fn answer_all<A, F>(listener: Listener, limits: Limits, answer: A)
where
    A: Fn(Request<Incoming>) -> F + Clone + Send + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let mut open = Open::default();
    loop {
        let answer = answer.clone();
        let accepted = match &listener {
            Listener::Tcp(tcp) => {
                tcp.accept().await.map(|(stream, _)| open.begin(stream, limits, answer))
            }
            Listener::Unix(unix) => {
                unix.accept().await.map(|(stream, _)| open.begin(stream, limits, answer))
            }
        };
        if let Err(error) = accepted {
            tracing::debug!(%error, "no connection");
        }
        // Also after an error: with no descriptor left, the next accept would fail at once.
        sleep(ACCEPT_INTERVAL).await;
    }
}

/// Open connections, the oldest first. Dropping it closes them.
#[derive(Debug, Default)]
struct Open(VecDeque<AbortHandle>);

impl Open {
    fn begin<A, F>(
        &mut self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        limits: Limits,
        answer: A,
    ) where
        A: Fn(Request<Incoming>) -> F + Send + 'static,
        F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
    {
        self.0.retain(|connection| !connection.is_finished());
        if self.0.len() >= limits.connections
            && let Some(oldest) = self.0.pop_front()
        {
            oldest.abort();
        }
        let task = tokio::spawn(async move {
            match timeout(limits.time, answer_one(stream, answer)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "a client went away"),
                Err(_) => tracing::debug!("a client is too slow"),
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
pub(crate) async fn answer_one<A, F>(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    answer: A,
) -> Result<(), hyper::Error>
where
    A: Fn(Request<Incoming>) -> F,
    F: Future<Output = Response<Full<Bytes>>>,
{
    let service = service_fn(move |request| {
        let answer = answer(request);
        async { Ok::<_, Infallible>(answer.await) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(false)
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_LIMIT)
        .serve_connection(TokioIo::new(stream), service)
        .await
}
