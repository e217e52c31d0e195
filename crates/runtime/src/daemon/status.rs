//! Answers `lazuli status`.

use super::{
    DaemonError,
    api::{CacheStatus, DaemonStatus, Status},
    node::Node,
};

impl Node {
    /// Everything that `lazuli status` shows.
    pub(super) async fn status(&self) -> Result<Status, DaemonError> {
        let (snapshots, why) = self.explanation.read().await;
        Ok(Status {
            daemon: self.daemon_status()?,
            mounts: self.mounts.status(why).await,
            snapshots,
            mirror: self.explanation.mirror(),
        })
    }

    fn daemon_status(&self) -> Result<DaemonStatus, DaemonError> {
        let (driver, driver_reason) = self.default_driver();
        let (blobs, bytes_used) = self.cache.usage()?;
        let evicted = self.cache.evictions();
        let keeper = self.link.keeper().unwrap_or_default();
        Ok(DaemonStatus {
            keeper_pid: keeper.pid,
            worker_pid: std::process::id(),
            restarts: keeper.restarts,
            last_exit: keeper.last_exit,
            keeper_restarts: keeper.keeper_restarts,
            takeovers: keeper.takeovers,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            root: self.root.clone(),
            uptime_seconds: self.started.elapsed().as_secs(),
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
