//! The answer to `lazuli status`.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf};

use lazuli_image::Digest;
use serde::{Deserialize, Serialize};

use super::driver::DriverChoice;

/// The state of the daemon and its mounts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// The daemon itself.
    pub daemon: DaemonStatus,
    /// Every mount, ordered by mount point.
    pub mounts: Vec<MountStatus>,
    /// The snapshots for containerd, if it is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<SnapshotsStatus>,
    /// The mirror's activity, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<MirrorStatus>,
    /// The activity of servers of each kind, since the worker started.
    #[serde(default)]
    pub servers: Vec<ServerStatus>,
    /// The latest failed reads in the log, the oldest first, at most 16.
    #[serde(default)]
    pub failed_reads: Vec<FailedReadStatus>,
}

/// The activity of all servers of one kind since the worker started.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServerStatus {
    /// `registry`, `mirror` or `peer`.
    pub kind: String,
    /// Bytes of blobs that arrived.
    pub bytes: u64,
    /// Requests that failed, by the causes of docs/metrics.md; those that occurred.
    pub failures: BTreeMap<String, u64>,
}

/// A read that ended with an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedReadStatus {
    /// 1 for the first one that this worker logged, and one more for each.
    pub number: u64,
    /// The reader's pod as `NAMESPACE/NAME`, where the kubelet's logs have a name for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The pod's uid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// The container's name in the pod, or its id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Images that have the blob, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Files of them that have the bytes, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// One of the causes of docs/metrics.md.
    pub cause: String,
}

/// The mirror's activity since the worker started.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MirrorStatus {
    /// The address that it listens at.
    pub listen: SocketAddr,
    /// Questions that were answered without asking a registry.
    pub hits: u64,
    /// Questions that a registry was asked.
    pub misses: u64,
    /// Questions that were answered while a registry was away.
    pub stale: u64,
    /// Bytes of blobs that were passed on to clients.
    pub bytes: u64,
}

/// The snapshots for containerd.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SnapshotsStatus {
    /// Layers.
    pub committed: usize,
    /// Writable snapshots, of containers.
    pub active: usize,
    /// Read-only snapshots.
    pub views: usize,
    /// Snapshots of a containerd whose state was deleted since, and whose names were given again.
    /// They are counted above as well.
    pub former: usize,
    /// Removed snapshots whose files are not deleted yet, or are still mounted somewhere.
    pub removed: usize,
    /// Why the rest is not known, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Why containerd needs a mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotStatus {
    /// containerd's name of the image's uppermost layer.
    pub name: String,
    /// Keys of active snapshots on top of it, `NAMESPACE/NUMBER/CONTAINER`.
    pub containers: Vec<String>,
    /// For each of them the upper directories of overlayfs on top of the image, lowest first; empty
    /// if user ids are mapped for it.
    #[serde(default)]
    pub layers: BTreeMap<String, Vec<PathBuf>>,
}

/// The daemon itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// Process that holds descriptors which must stay open while another worker is started.
    pub keeper_pid: u32,
    /// Process that serves readers.
    pub worker_pid: u32,
    /// Workers that died and were started again since the daemon was started, also those that
    /// died together with their keeper.
    pub restarts: u64,
    /// How the last one ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_exit: Option<String>,
    /// Seconds since then, by the node's clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_exit_seconds_ago: Option<u64>,
    /// Keepers that died since then.
    #[serde(default)]
    pub keeper_restarts: u64,
    /// Takeovers since then.
    #[serde(default)]
    pub takeovers: u64,
    /// Version of both.
    pub version: String,
    /// State directory.
    pub root: PathBuf,
    /// Seconds since that process started.
    pub uptime_seconds: u64,
    /// The driver that `--driver auto` selects here.
    pub driver: DriverChoice,
    /// The reason.
    pub driver_reason: String,
    /// The node's cache.
    pub cache: CacheStatus,
}

/// The node's cache.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CacheStatus {
    /// Its directory.
    pub directory: PathBuf,
    /// Blobs that have a file in it.
    pub blobs: u64,
    /// Bytes it occupies on disk.
    pub bytes_used: u64,
    /// Bytes that it may occupy, if the operator has set a limit.
    #[serde(default)]
    pub max_bytes: Option<u64>,
    /// Whether it exceeds the limit because all of it is in use.
    #[serde(default)]
    pub over_budget: bool,
    /// Chunks of images in use that were given up since the daemon started.
    #[serde(default)]
    pub evicted_chunks: u64,
    /// Blobs that no image in use had and that were given up.
    #[serde(default)]
    pub evicted_blobs: u64,
    /// Bytes of both.
    #[serde(default)]
    pub evicted_bytes: u64,
}

/// One mount.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MountStatus {
    /// The image as it was named.
    pub image: String,
    /// The manifest to which that name resolved at the mount.
    pub manifest_digest: Digest,
    /// Where.
    pub mountpoint: PathBuf,
    /// The driver: `fanotify`, `loop` or `fuse`.
    pub driver: DriverChoice,
    /// Why this one.
    pub driver_reason: String,
    /// Bytes fetched for this image since the daemon opened it: manifest, config, bootstrap and
    /// data.
    pub bytes_fetched: u64,
    /// Requests for them.
    pub requests: u64,
    /// Bytes of the image as stored (compressed): the size of a full pull.
    pub bytes_total: u64,
    /// Decoded bytes that were not fetched because another image on this node has the same chunks.
    #[serde(default)]
    pub bytes_copied: u64,
    /// Chunks of the image's blobs that are on this node, verified.
    pub chunks_ready: u64,
    /// Chunks of the image's blobs.
    pub chunks_total: u64,
    /// Bytes of the image, as stored, that are not on this node: readers of them need a registry.
    #[serde(default)]
    pub bytes_missing: u64,
    /// Seconds until none are missing, if the rest of the image keeps arriving as it does now.
    #[serde(default)]
    pub complete_in_seconds: Option<u64>,
    /// Questions of the kernel that the daemon answered for this image.
    pub events: u64,
    /// Pages in which programs may see zeros, because keeper and worker died together while they
    /// had them mapped, and this kernel cannot take them away (before 6.17).
    pub stale_pages: u64,
    /// The snapshot that it is, if it was made for containerd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotStatus>,
}
