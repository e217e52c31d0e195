//! How far pulls for commands are.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use super::pulls::OpenBlobs;
use crate::daemon::api::PrefetchStatus;

/// The layers that are being pulled.
#[derive(Debug, Default)]
pub(in crate::daemon) struct PullProgress {
    layers: Vec<ArrivingLayer>,
    /// As long as this lives.
    _open: OpenBlobs,
}

#[derive(Debug)]
pub(super) struct ArrivingLayer {
    pub(super) size: u64,
    pub(super) fetched: Arc<AtomicU64>,
}

impl PullProgress {
    pub(super) fn new(layers: Vec<ArrivingLayer>, open: OpenBlobs) -> Self {
        PullProgress { layers, _open: open }
    }

    pub(in crate::daemon) fn status(&self) -> PrefetchStatus {
        let here = |layer: &ArrivingLayer| layer.fetched.load(Ordering::Relaxed);
        PrefetchStatus {
            bytes_here: self.layers.iter().map(here).sum(),
            bytes_total: self.layers.iter().map(|layer| layer.size).sum(),
            done: false,
        }
    }
}
