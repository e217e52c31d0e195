//! Answers `lazuli status`.

use std::time::{SystemTime, UNIX_EPOCH};

use lazuli_registry::{Failure, ServerKind, TrafficCounts};

use crate::daemon::{
    DaemonError,
    api::{CacheStatus, DaemonStatus, ServerStatus, Status},
    node::Node,
};

impl Node {
    /// Everything that `lazuli status` shows.
    pub(in crate::daemon) async fn status(&self) -> Result<Status, DaemonError> {
        let (snapshots, why) = self.status.others.read().await;
        let mut mounts = self.mounts.status(why).await;
        for mount in &mut mounts {
            let time = self.prefetcher.time_for_the_rest(mount.bytes_missing);
            mount.complete_in_seconds = match mount.bytes_missing {
                0 => Some(0),
                _ => time.map(|time| time.as_secs().max(1)),
            };
        }
        Ok(Status {
            daemon: self.daemon_status()?,
            mounts,
            snapshots,
            mirror: self.status.others.mirror(),
            servers: ServerKind::ALL.map(|kind| self.server_status(kind)).into(),
            failed_reads: self.status.latest_failures.all(),
        })
    }

    fn server_status(&self, kind: ServerKind) -> ServerStatus {
        let TrafficCounts { bytes, failures } = self.admission.registry.pool.traffic().counts(kind);
        let failures = Failure::ALL.iter().zip(failures).filter(|(_, count)| *count > 0);
        let failures = failures.map(|(cause, count)| (cause.name().to_owned(), count)).collect();
        ServerStatus { kind: kind.name().to_owned(), bytes, failures }
    }

    fn daemon_status(&self) -> Result<DaemonStatus, DaemonError> {
        let (driver, driver_reason) = self.drivers.default_driver();
        let (blobs, bytes_used) = self.cache.usage()?;
        let evicted = self.cache.evictions();
        let keeper = self.drivers.link.keeper().unwrap_or_default();
        Ok(DaemonStatus {
            keeper_pid: keeper.pid,
            worker_pid: std::process::id(),
            restarts: keeper.restarts,
            last_exit: keeper.last_exit,
            last_exit_seconds_ago: keeper.last_exit_at.map(seconds_since),
            keeper_restarts: keeper.keeper_restarts,
            takeovers: keeper.takeovers,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            root: self.root.clone(),
            uptime_seconds: self.status.started.elapsed().as_secs(),
            driver,
            driver_reason,
            cache: CacheStatus {
                directory: self.root.join("cache"),
                blobs,
                bytes_used,
                max_bytes: evicted.max_bytes,
                over_budget: evicted.is_over,
                evicted_chunks: evicted.chunks,
                evicted_blobs: evicted.blobs,
                evicted_bytes: evicted.bytes,
            },
        })
    }
}

/// Seconds since a time in seconds since 1970; `None` for a future time.
fn seconds_since(time: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_secs().saturating_sub(time)
}
