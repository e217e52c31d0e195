//! The daemon's Unix socket: which nodes have a blob, and another way to its bytes.
//!
//! The daemon asks its scheduler which nodes have parts of a blob. No data passes through the
//! socket: the daemon makes a hard link to the file in which it keeps the blob, fills that file in
//! place, and reports finished pieces, which are then read from the link. Links need a directory on
//! the file system of the daemon's storage.
//!
//! The subset of `dfdaemon.v2.DfdaemonDownload` (API 2.3) used here.

use std::{
    collections::HashMap,
    fmt, fs, io,
    ops::Range,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use lazuli_image::{Digest, Stored};
use reqwest::header::HeaderMap;
use tokio::time::{Instant, timeout};
use tonic::{
    Request, Status,
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use crate::transport::health::Health;

/// `SchedulingPolicy.ALWAYS`.
const ALWAYS: i32 = 1;

/// Time-out of a lookup: about the time that it saves with a nearby registry.
const QUESTION: Duration = Duration::from_millis(20);

/// Time-out of a download, after which its link is removed: dfdaemon's own time-out for a piece.
const LONGEST: Duration = Duration::from_secs(30);

/// Seconds after which a link is stale.
const STALE: u64 = 600;

/// Maximum number of blobs whose downloads are counted.
const COUNTED: usize = 4096;

/// A download and its destination.
#[derive(Clone, PartialEq, prost::Message)]
struct Download {
    #[prost(string, tag = "1")]
    url: String,
    #[prost(map = "string, string", tag = "9")]
    request_header: HashMap<String, String>,
    #[prost(string, optional, tag = "11")]
    output_path: Option<String>,
    #[prost(bool, tag = "22")]
    force_hard_link: bool,
    #[prost(bool, tag = "30")]
    enable_task_id_based_blob_digest: bool,
    #[prost(int32, tag = "35")]
    scheduling_policy: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct DownloadTaskRequest {
    #[prost(message, optional, tag = "1")]
    download: Option<Download>,
}

/// Announces all pieces, then each one as it completes.
#[derive(Clone, PartialEq, prost::Message)]
struct DownloadTaskResponse {
    #[prost(message, optional, tag = "4")]
    started: Option<Started>,
    #[prost(message, optional, tag = "5")]
    finished: Option<Finished>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Started {
    #[prost(message, repeated, tag = "4")]
    pieces: Vec<Piece>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Finished {}

#[derive(Clone, PartialEq, prost::Message)]
struct StatTaskRequest {
    #[prost(string, tag = "1")]
    task_id: String,
}

/// The scheduler's knowledge of a blob.
#[derive(Clone, PartialEq, prost::Message)]
struct Task {
    /// The pieces that were fetched from the registry.
    #[prost(message, repeated, tag = "12")]
    pieces: Vec<Piece>,
    /// Downloads that have begun, also those that have ended.
    #[prost(uint32, tag = "14")]
    peer_count: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Piece {
    #[prost(uint64, tag = "3")]
    offset: u64,
    #[prost(uint64, tag = "4")]
    length: u64,
}

/// The socket of a daemon.
pub(super) struct Socket {
    path: PathBuf,
    /// The directory for links.
    links: PathBuf,
    channel: OnceLock<Channel>,
    health: Arc<Health>,
    /// Downloads of each blob that this node has begun.
    begun: Mutex<HashMap<Digest, u32>>,
}

impl PartialEq for Socket {
    fn eq(&self, other: &Self) -> bool {
        self.path == other.path && self.links == other.links
    }
}

impl Eq for Socket {}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Socket({})", self.path.display())
    }
}

/// A hard link, removed on drop.
struct Link(PathBuf);

impl Drop for Link {
    fn drop(&mut self) {
        // The link may not exist.
        let _ = fs::remove_file(&self.0);
    }
}

impl Socket {
    /// The socket at `path`; links are made in the directory `links`.
    pub(super) fn new(path: &Path, links: &Path) -> Self {
        let health = Arc::new(Health::new(path.display().to_string()));
        Socket {
            path: path.to_owned(),
            links: links.to_owned(),
            channel: OnceLock::new(),
            health,
            begun: Mutex::default(),
        }
    }

    /// Reads bytes of the blob at `url`; `None` if they must be requested in another way. `headers`
    /// are for the registry.
    pub(super) async fn read(
        &self,
        url: &str,
        digest: &Digest,
        range: &Range<Stored>,
        headers: &HeaderMap,
    ) -> Option<Bytes> {
        if !self.health.is_well() {
            return None;
        }
        let started = Instant::now();
        let (link, range) = (self.link(digest), range.clone());
        let download = self.download(url, &range, headers, &link.0);
        let (channel, health) = (self.channel(), self.health.clone());
        let socket = self.path.clone();
        let bring = async move {
            let channel = channel?;
            let ran = timeout(LONGEST, run(channel, download)).await;
            ran.unwrap_or_else(|_| Err(Status::deadline_exceeded("it takes too long")))?;
            read(link, range).await.map_err(|error| Status::data_loss(error.to_string()))
        };
        let bring = async move {
            bring.await.inspect(|_| health.worked()).inspect_err(|status: &Status| {
                tracing::debug!(error = status.message(), socket = %socket.display(), "does not deliver");
                health.failed(started, None);
            })
        };
        // Continue when the caller is gone: the daemon may make the link later, and it has to be
        // removed.
        tokio::spawn(bring).await.ok()?.ok()
    }

    /// A unique name with the time in it.
    fn link(&self, digest: &Digest) -> Link {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let (made, process) = (seconds(), std::process::id());
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        Link(self.links.join(format!("{}-{made}-{process}-{number}", digest.hex())))
    }

    fn download(
        &self,
        url: &str,
        range: &Range<Stored>,
        headers: &HeaderMap,
        link: &Path,
    ) -> Download {
        let text = |value: &reqwest::header::HeaderValue| Some(value.to_str().ok()?.to_owned());
        let headers =
            headers.iter().filter_map(|(name, value)| Some((name.to_string(), text(value)?)));
        let mut request_header: HashMap<_, _> = headers.collect();
        let (start, last) = (range.start.0, range.end.0.saturating_sub(1));
        request_header.insert("range".to_owned(), format!("bytes={start}-{last}"));
        Download {
            url: url.to_owned(),
            request_header,
            output_path: Some(link.display().to_string()),
            force_hard_link: true,
            enable_task_id_based_blob_digest: true,
            scheduling_policy: ALWAYS,
        }
    }

    /// This node begins a download of a part of a blob.
    pub(super) fn begin(&self, digest: &Digest) {
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        if begun.len() >= COUNTED {
            begun.clear();
        }
        *begun.entry(*digest).or_default() += 1;
    }

    /// Returns whether a node has a part of a blob, or so many nodes read the blob that one fetch
    /// of a whole piece costs the registry less than a fetch of each node's part; `None` if
    /// unknown.
    pub(super) async fn has(&self, digest: &Digest, range: &Range<Stored>) -> Option<bool> {
        if !self.health.is_well() {
            return None;
        }
        let Task { pieces, peer_count } = match timeout(QUESTION, self.stat(digest)).await {
            Ok(Ok(task)) => task,
            // dfdaemon 1.5 reports a blob unknown to the scheduler only by this text.
            Ok(Err(status)) if status.message().contains("not found") => Task::default(),
            _ => return None,
        };
        let mut at = range.start.0;
        let mut pieces: Vec<_> =
            pieces.iter().map(|p| (p.offset, p.offset.saturating_add(p.length))).collect();
        pieces.sort_unstable();
        for (start, end) in pieces {
            if start <= at {
                at = at.max(end);
            }
        }
        let begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner).get(digest).copied();
        // Nodes that start together download as often as this one. Before it has begun nothing can
        // be said.
        let nodes = begun.map_or(1, |begun| u64::from(peer_count / begun));
        let wanted = range.end.0.saturating_sub(range.start.0);
        Some(at >= range.end.0 || nodes.saturating_mul(wanted) > super::PIECE)
    }

    async fn stat(&self, digest: &Digest) -> Result<Task, Status> {
        const METHOD: &str = "/dfdaemon.v2.DfdaemonDownload/StatTask";
        let mut client = Grpc::new(self.channel()?);
        client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        // Blobs have their digests as ids.
        let request = Request::new(StatTaskRequest { task_id: digest.hex().to_string() });
        let codec = ProstCodec::<_, Task>::default();
        let method = PathAndQuery::from_static(METHOD);
        Ok(client.unary(request, method, codec).await?.into_inner())
    }

    /// Removes links of a process that died: each keeps a blob on the disk.
    fn clear(&self) {
        let links = fs::read_dir(&self.links).into_iter().flatten().flatten();
        let now = seconds();
        let is_old = |name: &str| {
            let mut parts = name.split('-');
            let digest = parts.next().is_some_and(|part| {
                part.len() == 64 && part.bytes().all(|byte| byte.is_ascii_hexdigit())
            });
            let numbers: Option<Vec<u64>> = parts.map(|part| part.parse().ok()).collect();
            digest
                && matches!(numbers.as_deref(), Some([made, _, _]) if made.saturating_add(STALE) < now)
        };
        let old = links.filter(|link| link.file_name().to_str().is_some_and(is_old));
        old.for_each(|link| drop(Link(link.path())));
    }

    /// The connection, which is made anew by itself.
    fn channel(&self) -> Result<Channel, Status> {
        if let Some(channel) = self.channel.get() {
            return Ok(channel.clone());
        }
        let address = format!("unix:{}", self.path.display());
        let endpoint = Endpoint::from_shared(address);
        let endpoint = endpoint.map_err(|error| Status::unavailable(error.to_string()))?;
        let connect = || {
            // Before there can be any of this process.
            self.clear();
            endpoint.connect_timeout(super::CONNECT).connect_lazy()
        };
        Ok(self.channel.get_or_init(connect).clone())
    }
}

/// Since 1970.
fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Requests a download.
async fn run(channel: Channel, download: Download) -> Result<(), Status> {
    const METHOD: &str = "/dfdaemon.v2.DfdaemonDownload/DownloadTask";
    let mut client = Grpc::new(channel);
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let request = Request::new(DownloadTaskRequest { download: Some(download) });
    let codec = ProstCodec::<_, DownloadTaskResponse>::default();
    let method = PathAndQuery::from_static(METHOD);
    let mut events = client.server_streaming(request, method, codec).await?.into_inner();
    let mut missing = usize::MAX;
    while let Some(DownloadTaskResponse { started, finished }) = events.message().await? {
        match (started, finished) {
            (Some(started), _) => missing = started.pieces.len(),
            (_, Some(_)) => missing = missing.saturating_sub(1),
            _ => {}
        }
        if missing == 0 {
            // The stream ends when the scheduler has been told. A client that closes it earlier is
            // counted as a failed download.
            let end = async move { while let Ok(Some(_)) = events.message().await {} };
            tokio::spawn(timeout(LONGEST, end));
            return Ok(());
        }
    }
    // The file has holes.
    Err(Status::aborted("the download ended before all pieces were there"))
}

/// Reads a range of the linked file.
async fn read(link: Link, range: Range<Stored>) -> io::Result<Bytes> {
    let read = move || {
        let file = fs::File::open(&link.0)?;
        let mut bytes = vec![0; (range.end.0 - range.start.0) as usize];
        file.read_exact_at(&mut bytes, range.start.0)?;
        Ok(Bytes::from(bytes))
    };
    tokio::task::spawn_blocking(read).await.unwrap_or_else(|panic| Err(io::Error::other(panic)))
}
