//! What `status` shows beside mounts: since when the worker runs, what failed last, what is
//! counted, and other parts of the worker.

use std::{
    collections::HashMap,
    fmt,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::{Instant, SystemTime},
};

use super::{latest_failures::LatestFailures, occupied::Counted};
use crate::daemon::api::{MirrorStatus, SnapshotStatus, SnapshotsStatus};

/// Reports the purposes of mounts, see
/// [`Images::explained_by`](crate::daemon::Images::explained_by). Blocks while it reads.
pub type Explain = dyn Fn() -> (SnapshotsStatus, HashMap<PathBuf, SnapshotStatus>) + Send + Sync;

/// Reports the mirror's activity.
pub type MirrorActivity = dyn Fn() -> MirrorStatus + Send + Sync;

/// See the module.
#[derive(Debug)]
pub(in crate::daemon) struct StatusParts {
    pub(in crate::daemon) others: Explanation,
    pub(in crate::daemon) latest_failures: Arc<LatestFailures>,
    pub(in crate::daemon) counted: Counted,
    pub(in crate::daemon) started: Instant,
    /// The same by the calendar.
    pub(super) started_at: SystemTime,
}

impl StatusParts {
    /// The parts of a worker that starts now.
    pub(in crate::daemon) fn new() -> Self {
        let (others, latest_failures, counted) = Default::default();
        let (started, started_at) = (Instant::now(), SystemTime::now());
        StatusParts { others, latest_failures, counted, started, started_at }
    }
}

/// Other parts of the worker that contribute to `status`, once they exist.
#[derive(Default)]
pub(in crate::daemon) struct Explanation {
    snapshots: OnceLock<Arc<Explain>>,
    mirror: OnceLock<Arc<MirrorActivity>>,
}

impl fmt::Debug for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Explanation").finish_non_exhaustive()
    }
}

impl Explanation {
    /// Sets the snapshot service. Only the first call counts.
    pub(in crate::daemon) fn set_snapshots(&self, explain: Arc<Explain>) {
        let _ = self.snapshots.set(explain);
    }

    /// Sets the mirror. Only the first call counts.
    pub(in crate::daemon) fn set_mirror(&self, activity: Arc<MirrorActivity>) {
        let _ = self.mirror.set(activity);
    }

    /// The snapshots for containerd, and their mounts.
    pub(in crate::daemon) async fn read(
        &self,
    ) -> (Option<SnapshotsStatus>, HashMap<PathBuf, SnapshotStatus>) {
        let Some(explain) = self.snapshots.get().cloned() else { return Default::default() };
        match tokio::task::spawn_blocking(move || explain()).await {
            Ok((snapshots, mounts)) => (Some(snapshots), mounts),
            Err(error) => {
                tracing::error!(%error, "what is mounted for containerd cannot be told");
                Default::default()
            }
        }
    }

    /// The mirror's activity, if there is one.
    pub(in crate::daemon) fn mirror(&self) -> Option<MirrorStatus> {
        self.mirror.get().map(|activity| activity())
    }
}
