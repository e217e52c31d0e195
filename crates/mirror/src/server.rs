//! Connections: TLS with the node's own certificates, then HTTP/1.1.

use std::{convert::Infallible, io, sync::Arc, time::Duration};

use hyper::{server::conn::http1, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
};
use rustix::net::sockopt;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

use crate::Mirror;

/// Connections at a time. One takes some 60 KiB. Others wait to be accepted.
const CONNECTIONS: usize = 1024;

/// How long a handshake may take on the loopback interface, also of a busy machine.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How long a connection may be silent between requests. containerd closes its own after 30 s.
const IDLE: Duration = Duration::from_secs(45);

/// How long a client may take nothing of an answer that has been sent: the kernel then ends the
/// connection, and the memory that it holds is free.
const STALLED: Duration = Duration::from_secs(120);

/// Largest head of a request, in bytes: a token may hold a signed token of a registry.
const HEAD_LIMIT: usize = 128 << 10;

/// How long answers may take that are under way when the mirror ends.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// The pause after a connection could not be accepted: when descriptors ran out, it would fail
/// again.
const PAUSE: Duration = Duration::from_millis(50);

impl Mirror {
    /// Answers clients at `listener` until `leaving` ends.
    pub async fn serve(self: Arc<Self>, listener: TcpListener, leaving: impl Future<Output = ()>) {
        let tls = TlsAcceptor::from(self.tls.clone());
        let room = Arc::new(Semaphore::new(CONNECTIONS));
        let graceful = GracefulShutdown::new();
        tokio::pin!(leaving);
        loop {
            let accepted = async {
                let permit = room.clone().acquire_owned().await;
                (listener.accept().await, permit)
            };
            let (accepted, permit) = tokio::select! {
                accepted = accepted => accepted,
                () = &mut leaving => break,
            };
            let stream = match accepted.and_then(|(stream, _)| prepared(stream)) {
                Ok(stream) => stream,
                Err(error) => {
                    tracing::debug!(%error, "no connection to the mirror");
                    sleep(PAUSE).await;
                    continue;
                }
            };
            let (tls, mirror, watcher) = (tls.clone(), self.clone(), graceful.watcher());
            tokio::spawn(async move {
                let _permit = permit;
                match timeout(HANDSHAKE, tls.accept(stream)).await {
                    Ok(Ok(stream)) => {
                        let connection = mirror.converse(stream);
                        if let Err(error) = watcher.watch(connection).await {
                            tracing::debug!(%error, "a connection to the mirror ended");
                        }
                    }
                    // It has no certificate of this node.
                    Ok(Err(error)) => tracing::debug!(%error, "a client of the mirror is refused"),
                    Err(_) => tracing::debug!("a client of the mirror says nothing"),
                }
            });
        }
        let _ = timeout(LAST_WORDS, graceful.shutdown()).await;
    }

    fn converse(
        self: Arc<Self>,
        stream: tokio_rustls::server::TlsStream<TcpStream>,
    ) -> impl hyper_util::server::graceful::GracefulConnection<Error = hyper::Error> + Send {
        let service = service_fn(move |request| {
            let mirror = self.clone();
            async move { Ok::<_, Infallible>(mirror.answer(request).await) }
        });
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE)
            .max_buf_size(HEAD_LIMIT)
            .serve_connection(TokioIo::new(stream), service)
    }
}

/// A connection that does not hang on a client that is stuck.
fn prepared(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    let milliseconds = u32::try_from(STALLED.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(&stream, milliseconds)?;
    Ok(stream)
}
