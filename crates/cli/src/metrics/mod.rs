//! The daemon's metrics for Prometheus.

mod families;

use std::sync::Arc;

use anyhow::{Context, Result};
use lazuli_metrics::Address;
use lazuli_runtime::daemon::Worker;
use serde::Deserialize;
use tokio::task::JoinHandle;

/// The `[metrics]` table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Metrics {
    /// The address to serve them at: an IP address with a port, or the path of a Unix socket.
    listen: String,
}

impl Metrics {
    /// Returns the address to serve them at.
    pub(crate) fn address(&self) -> Result<Address> {
        self.listen.parse().context("metrics.listen")
    }
}

/// Serves metrics, if configured. The task ends when another worker takes over. Nothing else
/// depends on it.
pub(crate) fn serve(table: Option<&Metrics>, worker: &Worker) -> Option<JoinHandle<()>> {
    let address = table?.address();
    let address = address
        .inspect_err(|error| tracing::error!(error = format!("{error:#}"), "no metrics"))
        .ok()?;
    let images = worker.images();
    let leaving = images.clone();
    let measure = Arc::new(move || -> futures_util::future::BoxFuture<'static, _> {
        let images = images.clone();
        Box::pin(async move { families::of(&images.measurements().await) })
    });
    let serving = async move { lazuli_metrics::serve(address, measure, leaving.leaving()).await };
    Some(tokio::spawn(serving))
}
