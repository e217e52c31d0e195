//! The measurements of a daemon.

use std::{
    error::Error,
    time::{Duration, SystemTime},
};

use lazuli_registry::{RegistryError, ServerKind, TrafficCounts};

use crate::{
    cache::EvictionStats,
    daemon::{
        DaemonError,
        api::{DriverChoice, MirrorStatus, Mounted},
        node::Node,
    },
    image::ImageError,
    keeper::KeeperInfo,
    metrics::{Driver, MetricCounts, StartFailure},
};

/// All measurements at one moment. Everything but the keeper's history starts from zero with each
/// worker.
#[derive(Clone, Debug)]
pub struct Measurements {
    /// When the worker started.
    pub started_at: SystemTime,
    /// The keeper, and the history of its processes.
    pub keeper: KeeperInfo,
    /// Counters of readers and starts.
    pub counts: MetricCounts,
    /// Counters of servers' data and failures, by the number of their kind.
    pub traffic: [TrafficCounts; ServerKind::ALL.len()],
    /// Mounts that are served, by the number of their driver.
    pub mounts: [u64; Driver::ALL.len()],
    /// Blobs in the cache, and their bytes on the disk with the metadata of images; `None` if that
    /// cannot be read.
    pub cache: Option<(u64, u64)>,
    /// Stored bytes of images in use that are not on this node.
    pub missing: u64,
    /// The cache's evictions.
    pub evictions: EvictionStats,
    /// The mirror's activity, if there is one.
    pub mirror: Option<MirrorStatus>,
}

impl Node {
    pub(in crate::daemon) async fn measurements(&self) -> Measurements {
        let (cache, traffic) = (self.cache.clone(), self.admission.registry.pool.traffic());
        let look = move || {
            let missing = cache.in_use().iter().map(|blob| blob.missing_bytes()).sum();
            (cache.usage().ok(), missing)
        };
        let (used, missing) = tokio::task::spawn_blocking(look).await.unwrap_or_default();
        Measurements {
            started_at: self.status.started_at,
            keeper: self.drivers.link.keeper().unwrap_or_default(),
            counts: self.cache.metrics().counts(),
            traffic: ServerKind::ALL.map(|kind| traffic.counts(kind)),
            mounts: self.mounts.by_driver().await,
            cache: used,
            missing,
            evictions: self.cache.evictions(),
            mirror: self.status.others.mirror(),
        }
    }

    /// Counts a mount that a request asked for.
    pub(in crate::daemon) fn count_start(
        &self,
        made: &Result<Mounted, DaemonError>,
        time: Duration,
    ) {
        let metrics = self.cache.metrics();
        match made {
            Ok(made) => {
                if let Some(driver) = made.mount.driver.of_mounts() {
                    metrics.started(driver, time);
                }
            }
            Err(error) => metrics.start_failed(cause(error)),
        }
    }
}

impl DriverChoice {
    /// The driver of a mount that is recorded with this choice.
    pub(in crate::daemon) fn of_mounts(self) -> Option<Driver> {
        match self {
            DriverChoice::Auto => None,
            DriverChoice::Fanotify => Some(Driver::Fanotify),
            DriverChoice::Loop => Some(Driver::Loop),
            DriverChoice::Ext4 => Some(Driver::Ext4),
            DriverChoice::Fuse => Some(Driver::Fuse),
            DriverChoice::Disks => Some(Driver::Disks),
        }
    }
}

/// Why a mount was not made, in one word.
fn cause(error: &DaemonError) -> StartFailure {
    match error {
        DaemonError::Shared(shared) => cause(shared),
        DaemonError::Registry(_)
        | DaemonError::Image(ImageError::Registry(_))
        | DaemonError::NoBlob { .. }
        | DaemonError::Prefetch { .. } => StartFailure::Registry,
        DaemonError::Gate(gate) if is_of_registry(gate) => StartFailure::Registry,
        DaemonError::Gate(_) | DaemonError::NotVouched { .. } | DaemonError::Unverified { .. } => {
            StartFailure::Policy
        }
        DaemonError::Name(_)
        | DaemonError::Platform(_)
        | DaemonError::Image(_)
        | DaemonError::Prefix { .. }
        | DaemonError::NoDigest { .. }
        | DaemonError::NotItsManifest { .. } => StartFailure::Image,
        DaemonError::Stopping => StartFailure::GivenUp,
        _ => StartFailure::Node,
    }
}

/// Returns whether a registry caused an error.
fn is_of_registry(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<RegistryError>() {
            return true;
        }
        next = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use std::{path::PathBuf, sync::Arc};

    use super::*;

    #[test]
    fn starts_fail_for_the_registry_the_image_or_the_node() {
        let missing = || RegistryError::Missing { place: "a".into(), object: "b".into() };
        let shared = DaemonError::Shared(Arc::new(DaemonError::Registry(missing())));
        let not_lazy = ImageError::NotLazy { image: "a".into() };
        for (error, expected) in [
            (DaemonError::Registry(missing()), StartFailure::Registry),
            (DaemonError::Image(missing().into()), StartFailure::Registry),
            (shared, StartFailure::Registry),
            (DaemonError::Image(not_lazy), StartFailure::Image),
            (DaemonError::Taken { mountpoint: PathBuf::new() }, StartFailure::Node),
            (DaemonError::Stopping, StartFailure::GivenUp),
        ] {
            assert_eq!(cause(&error), expected, "{error}");
        }
    }
}
