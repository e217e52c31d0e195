//! The daemon's gRPC service on a Unix socket, for clients on the same machine.
//!
//! Blobs are stored in the fake's own files, each piece at its offset in the blob. A client that
//! asks for a part gets a list of its pieces, then a message as each becomes available, and reads
//! them through a hard link.

use std::{
    fs, io,
    ops::Range,
    os::unix::{fs::FileExt as _, net::UnixListener},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::mpsc, time::sleep};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Code, Request, Response, Status, transport::Server};

use self::api::{
    DownloadPieceFinishedResponse, DownloadTaskRequest, DownloadTaskResponse,
    DownloadTaskStartedResponse, Piece, StatTaskRequest,
    dfdaemon_download_server::{DfdaemonDownload, DfdaemonDownloadServer},
    download_task_response::Response as Event,
};
use super::{
    Fault, Logged, Shared,
    origin::Origin,
    origin::Refusal,
    pool::{Known, Pool, Task},
    proxy,
};

#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
mod api {
    tonic::include_proto!("dfdaemon.v2");
}

/// Delay between the last piece of a download and the end of its stream. The real daemon reports to
/// the scheduler in between.
const END_DELAY: Duration = Duration::from_millis(30);

/// `SchedulingPolicy.ALWAYS`.
const ALWAYS: i32 = 1;

/// The socket of a daemon, and its files.
#[derive(Debug)]
pub(super) struct Socket {
    path: PathBuf,
    files: Arc<TempDir>,
    /// `None` while the socket is closed.
    runtime: Option<Runtime>,
}

impl Socket {
    /// Listens at `path`.
    pub(super) fn new(path: &Path, daemon: &Arc<Shared>) -> io::Result<Self> {
        // Links do not lead to other file systems.
        let beside = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
        let files = Arc::new(tempfile::Builder::new().prefix("dfdaemon-").tempdir_in(beside)?);
        let mut socket = Socket { path: path.to_owned(), files, runtime: None };
        socket.come_back(daemon)?;
        Ok(socket)
    }

    /// Listens again, if it does not.
    pub(super) fn come_back(&mut self, daemon: &Arc<Shared>) -> io::Result<()> {
        if self.runtime.is_some() {
            return Ok(());
        }
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).enable_all().build()?;
        let listener = UnixListener::bind(&self.path)?;
        listener.set_nonblocking(true)?;
        let service = Service { daemon: daemon.clone(), files: self.files.clone() };
        runtime.spawn(async move {
            let incoming = UnixListenerStream::new(tokio::net::UnixListener::from_std(listener)?);
            let server = Server::builder().add_service(DfdaemonDownloadServer::new(service));
            server.serve_with_incoming(incoming).await.map_err(io::Error::other)
        });
        self.runtime = Some(runtime);
        Ok(())
    }

    /// Closes all connections and the socket.
    pub(super) fn go_away(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            let _ = fs::remove_file(&self.path);
            // Its tasks may wait for long.
            runtime.shutdown_background();
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.go_away();
    }
}

struct Service {
    daemon: Arc<Shared>,
    files: Arc<TempDir>,
}

/// Runs work that may wait for a registry, or for the end of a fault, on a thread of its own.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|panic| Err(Status::internal(panic.to_string())))
}

impl Service {
    /// Logs a request, and returns the current fault once the daemon no longer hangs.
    async fn log_request(&self, logged: Logged) -> Result<Option<Fault>, Status> {
        let (pool, number) = (self.daemon.pool.clone(), self.daemon.number);
        blocking(move || {
            pool.change(number, |peer| peer.at_socket.push(logged));
            pool.wait_out(number, &[Fault::Hung]);
            Ok(pool.change(number, |peer| peer.fault))
        })
        .await
    }
}

#[tonic::async_trait]
impl DfdaemonDownload for Service {
    type DownloadTaskStream = ReceiverStream<Result<DownloadTaskResponse, Status>>;

    async fn download_task(
        &self,
        request: Request<DownloadTaskRequest>,
    ) -> Result<Response<Self::DownloadTaskStream>, Status> {
        let download = request.into_inner().download.unwrap_or_default();
        let headers = download.request_header.iter();
        let headers = headers.map(|(name, value)| (name.to_lowercase(), value.clone())).collect();
        let logged =
            Logged { method: "DownloadTask".into(), target: download.url.clone(), headers };
        self.log_request(logged.clone()).await?;
        let path = download.url.split('?').next().unwrap_or_default();
        let blob = path.rsplit_once("/blobs/sha256:").map(|(_, hex)| hex.to_owned());
        // The fake knows blobs only by their digests.
        let blob = blob.filter(|_| download.enable_task_id_based_blob_digest);
        let blob = blob.ok_or_else(|| Status::invalid_argument("the task is not a blob"))?;
        let link = download.output_path.filter(|_| download.force_hard_link);
        let link = link.ok_or_else(|| Status::invalid_argument("only hard links are made"))?;
        let task = Task {
            pool: self.daemon.pool.clone(),
            number: self.daemon.number,
            blob,
            origin: Origin {
                url: download.url,
                authorization: logged.headers.get("authorization").cloned(),
            },
            shared: download.scheduling_policy == ALWAYS,
        };
        let file = self.files.path().join(&task.blob);
        let (events, stream) = mpsc::channel(4);
        // Continues after the client disconnects, as in the real daemon.
        tokio::spawn(async move {
            let told = events.clone();
            let range = logged.headers.get("range").cloned();
            let run = move || fill(&task, range.as_deref(), &file, Path::new(&link), &told);
            match blocking(run).await {
                Ok(()) => sleep(END_DELAY).await,
                Err(status) => drop(events.send(Err(status)).await),
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn stat_task(
        &self,
        request: Request<StatTaskRequest>,
    ) -> Result<Response<api::Task>, Status> {
        let id = request.into_inner().task_id;
        let logged =
            Logged { method: "StatTask".into(), target: id.clone(), headers: Default::default() };
        if self.log_request(logged).await? == Some(Fault::Alone) {
            return Err(Status::internal("the scheduler does not answer"));
        }
        let Some(Known { pieces, downloads }) = self.daemon.pool.known(&id) else {
            return Err(Status::internal(format!(
                "status: NotFound, message: \"task {id} not found\""
            )));
        };
        let pieces = pieces.into_iter().map(|(number, range)| piece(number, range)).collect();
        Ok(Response::new(api::Task { id, pieces, peer_count: downloads }))
    }
}

fn piece(number: u64, range: Range<u64>) -> Piece {
    Piece { number: number as u32, offset: range.start, length: range.end - range.start }
}

/// Fills the pieces of a range into the file of a blob, to which a link is made.
fn fill(
    task: &Task,
    range: Option<&str>,
    path: &Path,
    link: &Path,
    events: &mpsc::Sender<Result<DownloadTaskResponse, Status>>,
) -> Result<(), Status> {
    let Task { pool, number, .. } = task;
    let tell = |event| {
        let told = DownloadTaskResponse { task_id: task.blob.clone(), response: Some(event) };
        // A client that is gone doesn't matter to the others.
        let _ = events.blocking_send(Ok(told));
    };
    task.begin();
    let size = task.size().map_err(refused)?;
    let range = match range {
        Some(text) => proxy::parse(text, size)
            .ok_or_else(|| Status::invalid_argument(format!("no range: {text}")))?,
        None => 0..size,
    };
    let failed = |error: io::Error| Status::internal(error.to_string());
    let file = fs::OpenOptions::new().write(true).create(true).truncate(false).open(path);
    let file = file.map_err(failed)?;
    fs::hard_link(path, link).map_err(failed)?;
    let pieces = task.pieces(&range, size);
    let listed = pieces.iter().map(|(number, range)| piece(*number, range.clone())).collect();
    tell(Event::Started(DownloadTaskStartedResponse { content_length: size, pieces: listed }));
    for (at, part) in pieces {
        pool.wait_out(*number, &[Fault::Hung, Fault::Stuck]);
        let bytes = task.read(part.clone()).map_err(refused)?;
        pool.wait_out(*number, &[Fault::Hung, Fault::Stuck]);
        let bytes = pool.change(*number, |peer| peer.hand_out(bytes));
        file.write_all_at(&bytes, part.start).map_err(failed)?;
        let handed = part.end.min(range.end) - part.start.max(range.start);
        pool.change(*number, |peer| peer.stats.served += handed);
        let piece = Some(piece(at, part));
        tell(Event::Finished(DownloadPieceFinishedResponse { piece }));
    }
    Ok(())
}

fn refused(refusal: Refusal) -> Status {
    let (code, text) = match refusal {
        Refusal::Backend(status) => (Code::Internal, format!("backend error: {status}")),
        Refusal::Own(507) => (Code::ResourceExhausted, "no space left on device".to_owned()),
        Refusal::Own(status) => (Code::Internal, format!("own error: {status}")),
    };
    Status::new(code, text)
}

impl Pool {
    /// The scheduler's knowledge of a blob.
    fn known(&self, blob: &str) -> Option<Known> {
        self.lock().known.get(blob).cloned()
    }
}
