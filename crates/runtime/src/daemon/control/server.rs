//! The server of the control socket.

use std::{io, sync::Arc};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    sync::{oneshot, watch},
};

use crate::{
    daemon::{
        api::{Request, Response},
        mounts::mount::InUse,
        node::Node,
        shutdown::Stop,
    },
    kernel::mount,
};

/// A request is a few hundred bytes; paths are at most 4096 each.
const LINE_LIMIT: u64 = 64 << 10;

/// Serves connections until `stop` becomes true.
pub(in crate::daemon) async fn serve(
    node: Arc<Node>,
    listener: UnixListener,
    stop: watch::Sender<bool>,
) -> io::Result<()> {
    let mut stopped = stop.subscribe();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    tokio::spawn(connection(node.clone(), stream, stop.clone()));
                }
                // Out of descriptors, or a client that is gone again: not a reason to end.
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                }
            },
            () = async { drop(stopped.wait_for(|stop| *stop).await) } => return Ok(()),
        }
    }
}

async fn connection(node: Arc<Node>, mut stream: UnixStream, stop: watch::Sender<bool>) {
    let (reader, mut writer) = stream.split();
    let mut reader = BufReader::new(reader);
    loop {
        let mut line = String::new();
        match (&mut reader).take(LINE_LIMIT).read_line(&mut line).await {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "a client went away");
                return;
            }
        }
        let request = serde_json::from_str(&line);
        let stopping = matches!(request, Ok(Request::Stop { .. }));
        let response = match request {
            Ok(request) => {
                let (here, gone) = oneshot::channel();
                let work = answer(&node, request, gone);
                tokio::pin!(work);
                tokio::select! {
                    response = &mut work => response,
                    read = reader.fill_buf() => {
                        // Nothing more to read: the client went away. Else it is its next request.
                        if read.is_ok_and(<[u8]>::is_empty) {
                            drop(here);
                        }
                        work.await
                    }
                }
            }
            Err(error) => failed(format!("not a request: {error}")),
        };
        let Ok(mut line) = serde_json::to_vec(&response) else { return };
        line.push(b'\n');
        if writer.write_all(&line).await.is_err() {
            return;
        }
        if stopping && matches!(response, Response::Done) {
            stop.send_replace(true);
            // The client waits for the connection to close: it closes with the process, see
            // `Client::stop`.
            std::future::pending::<()>().await;
        }
    }
}

/// Carries a request out. When `gone` closes, no client waits for the answer any more.
async fn answer(node: &Arc<Node>, request: Request, gone: oneshot::Receiver<()>) -> Response {
    // Held while anything is done, see `Node::quiesce`.
    let Some(_request) = node.lifecycle.begin_request() else { return Response::Again };
    // A task of its own: a disconnected client must not leave a mount half made, and a panic must
    // not end the connection.
    let node = node.clone();
    let cancelled = async {
        let _ = gone.await;
    };
    let work = tokio::spawn(async move {
        let done = |()| Response::Done;
        let result = match request {
            Request::Ping => Ok(Response::Done),
            Request::Mount(request) => node.mount(request, cancelled).await.map(Response::Mounted),
            Request::MountBootstrap { request, login } => {
                node.mount_bootstrap(request, login, cancelled).await.map(done)
            }
            Request::Umount { mountpoint, lazy: false } => {
                node.umount(&mountpoint, InUse::Refuse).await.map(done)
            }
            Request::Umount { mountpoint, lazy: true } => {
                // Through links, as it was mounted. One that is gone may be in the table.
                let mountpoint = mount::real_path(&mountpoint).unwrap_or(mountpoint);
                node.umount_for_good(&mountpoint).await.map(done)
            }
            Request::Status => node.status().await.map(Response::Status),
            Request::Prefetch(request) => node.prefetch(request).map(Response::Prefetch),
            Request::ScrubPlan => node.scrub_plan().await.map(Response::ScrubPlan),
            Request::Scrub { image, position, from } => {
                node.scrub(image, position, from).await.map(Response::Scrubbed)
            }
            Request::Stop { force: true } => node.stop(Stop::Forced).await.map(done),
            Request::Stop { force: false } => node.stop(Stop::IfUnused).await.map(done),
        };
        result.unwrap_or_else(|error| Response::Error {
            message: error.for_people(),
            no_index: node.may_pull(&error),
        })
    });
    let panicked =
        |_| failed("the daemon failed while it worked on this; its log says more".into());
    work.await.unwrap_or_else(panicked)
}

fn failed(message: String) -> Response {
    Response::Error { message, no_index: false }
}
