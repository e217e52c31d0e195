//! Ends a worker, for good or for a successor.

use std::path::Path;

use super::{DaemonError, filesystems::users, node::Node};

/// How to handle images that are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Keep serving them.
    IfUnused,
    /// Detach their mounts. Processes that still have files open get errors instead of missing
    /// data.
    Forced,
}

impl Node {
    /// Returns when the mounts of now have answered every request that an earlier worker left.
    pub(super) async fn caught_up(&self) {
        if let Some(Ok(session)) = self.drivers.disks.get() {
            session.caught_up().await;
        }
        self.mounts.caught_up().await;
    }

    /// Makes the node ready to end; nothing is mounted afterwards.
    ///
    /// # Errors
    /// An image is in use, and is not to be detached.
    pub(super) async fn stop(&self, stop: Stop) -> Result<(), DaemonError> {
        let may_stop = |mounts: &[(&Path, &str)]| match stop {
            Stop::IfUnused => self.refuse_if_used(mounts),
            Stop::Forced => Ok(()),
        };
        self.mounts.stop(may_stop).await?.detach().await;
        self.end_layers();
        let filesystems = self.filesystems.clone();
        let ended = tokio::task::spawn_blocking(move || {
            filesystems.settle();
            filesystems.cut_off();
        });
        ended.await.unwrap_or_else(|error| tracing::error!(%error, "stopping failed half way"));
        self.cache.flush();
        Ok(())
    }

    fn refuse_if_used(&self, mounts: &[(&Path, &str)]) -> Result<(), DaemonError> {
        if !mounts.is_empty() {
            let describe = |(path, image): &(&Path, &str)| match users::of(path) {
                holders if holders.is_empty() => format!("{image} at {}", path.display()),
                holders => format!("{image} at {} (in use{holders})", path.display()),
            };
            let mounted: Vec<_> = mounts.iter().map(describe).collect();
            return Err(DaemonError::Mounted { mounts: mounted.join(", ") });
        }
        let images = self.filesystems.settle();
        if images.is_empty() { Ok(()) } else { Err(DaemonError::StillUsed { images }) }
    }
}
