//! Connections: TLS with the node's own certificates, then HTTP/1.1.

use std::{
    convert::Infallible,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use hyper::{
    header::{CONNECTION, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::Mirror;

/// Concurrent connections: each takes about 60 KiB, so all of them 60 MiB. Further ones wait to be
/// accepted.
const CONNECTIONS: usize = 1024;

/// Time limit for a handshake on the loopback interface, also of a busy machine.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How long a connection may be silent between requests. containerd closes its own after 30 s.
const IDLE: Duration = Duration::from_secs(45);

/// Time limit for a client to read more of an answer that has been sent: after it the kernel ends
/// the connection, which frees its memory.
const STALLED: Duration = Duration::from_secs(120);

/// Largest head of a request, in bytes: a token may hold a signed token of a registry.
const HEAD_LIMIT: usize = 128 << 10;

/// Time for answers in progress to finish when the mirror shuts down.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(2);

/// The pause after a connection could not be accepted: when descriptors ran out, it would fail
/// again.
const PAUSE: Duration = Duration::from_millis(50);

impl Mirror {
    /// Answers clients at `listener` until `leaving` ends.
    pub async fn serve(self: Arc<Self>, listener: TcpListener, leaving: impl Future<Output = ()>) {
        let tls = TlsAcceptor::from(self.tls.clone());
        let permits = Arc::new(Semaphore::new(CONNECTIONS));
        let (ending, watching) = watch::channel(());
        tokio::pin!(leaving);
        loop {
            let accepted = async {
                let permit = permits.clone().acquire_owned().await;
                (listener.accept().await, permit)
            };
            let (accepted, permit) = tokio::select! {
                accepted = accepted => accepted,
                () = &mut leaving => break,
            };
            let stream = match accepted.and_then(|(stream, _)| set_tcp_options(stream)) {
                Ok(stream) => stream,
                Err(error) => {
                    tracing::debug!(%error, "no connection to the mirror");
                    sleep(PAUSE).await;
                    continue;
                }
            };
            let (tls, mirror, watching) = (tls.clone(), self.clone(), watching.clone());
            tokio::spawn(async move {
                let _permit = permit;
                match timeout(HANDSHAKE, tls.accept(stream)).await {
                    Ok(Ok(stream)) => {
                        if let Err(error) = mirror.serve_client(stream, watching).await {
                            tracing::debug!(%error, "a connection to the mirror ended");
                        }
                    }
                    // It has no certificate of this node.
                    Ok(Err(error)) => tracing::debug!(%error, "a client of the mirror is refused"),
                    Err(_) => tracing::debug!("a client of the mirror says nothing"),
                }
            });
        }
        drop(watching);
        let _ = ending.send(());
        let _ = timeout(SHUTDOWN_LIMIT, ending.closed()).await;
    }

    /// Serves a connection until the client closes it or, once `ending` is signalled, after one
    /// more answer. A connection without a request stays open for its first one: a client that lost
    /// its last connection while it sent a request would otherwise fail twice in a row.
    async fn serve_client(
        self: Arc<Self>,
        stream: TlsStream<TcpStream>,
        mut ending: watch::Receiver<()>,
    ) -> Result<(), hyper::Error> {
        let phase = Arc::new(Phase::default());
        let seen = phase.clone();
        let service = service_fn(move |request| {
            let (mirror, phase) = (self.clone(), seen.clone());
            async move {
                phase.asked.store(true, Ordering::Relaxed);
                let mut answer = mirror.answer(request).await;
                if phase.ending.load(Ordering::Relaxed) {
                    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, Infallible>(answer)
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE)
            .max_buf_size(HEAD_LIMIT)
            .serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        tokio::select! {
            ended = &mut connection => return ended,
            _ = ending.changed() => {}
        }
        phase.ending.store(true, Ordering::Relaxed);
        if phase.asked.load(Ordering::Relaxed) {
            connection.as_mut().graceful_shutdown();
        }
        connection.await
    }
}

/// The progress of a connection.
#[derive(Debug, Default)]
struct Phase {
    /// It has had a request.
    asked: AtomicBool,
    /// The answer to its next request is its last one.
    ending: AtomicBool,
}

/// Sets TCP options, so that a client that stops reading cannot hold the connection for longer than
/// [`STALLED`].
fn set_tcp_options(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    let milliseconds = u32::try_from(STALLED.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(&stream, milliseconds)?;
    Ok(stream)
}
