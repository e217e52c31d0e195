//! Other parts of the worker that `status` asks.

use std::{
    collections::HashMap,
    fmt,
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use super::api::{MirrorStatus, SnapshotStatus, SnapshotsStatus};

/// Tells what mounts are for, see [`Images::explained_by`](super::Images::explained_by). Blocks
/// while it reads.
pub type Explain = dyn Fn() -> (SnapshotsStatus, HashMap<PathBuf, SnapshotStatus>) + Send + Sync;

/// What the mirror did so far.
pub type MirrorActivity = dyn Fn() -> MirrorStatus + Send + Sync;

/// Other parts of the worker that `status` asks, once they are there.
#[derive(Default)]
pub(super) struct Explanation {
    snapshots: OnceLock<Arc<Explain>>,
    mirror: OnceLock<Arc<MirrorActivity>>,
}

impl fmt::Debug for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Explanation").finish_non_exhaustive()
    }
}

impl Explanation {
    /// Has the snapshot service asked. The first one stays.
    pub(super) fn set_snapshots(&self, explain: Arc<Explain>) {
        let _ = self.snapshots.set(explain);
    }

    /// Has the mirror asked. The first one stays.
    pub(super) fn set_mirror(&self, activity: Arc<MirrorActivity>) {
        let _ = self.mirror.set(activity);
    }

    /// What is kept for containerd, and what is mounted for it.
    pub(super) async fn read(&self) -> (Option<SnapshotsStatus>, HashMap<PathBuf, SnapshotStatus>) {
        let Some(explain) = self.snapshots.get().cloned() else { return Default::default() };
        match tokio::task::spawn_blocking(move || explain()).await {
            Ok((snapshots, mounts)) => (Some(snapshots), mounts),
            Err(error) => {
                tracing::error!(%error, "what is mounted for containerd cannot be told");
                Default::default()
            }
        }
    }

    /// What the mirror did, if there is one.
    pub(super) fn mirror(&self) -> Option<MirrorStatus> {
        self.mirror.get().map(|activity| activity())
    }
}
