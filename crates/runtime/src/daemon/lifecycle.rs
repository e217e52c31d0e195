//! Whether the worker still takes requests.

use std::{sync::Arc, time::Duration};

use tokio::sync::{OwnedRwLockReadGuard, RwLock, watch};

/// Whether the worker still takes requests, and which are in progress.
#[derive(Debug, Default)]
pub(super) struct Lifecycle {
    /// Whether another worker is about to take over.
    leaving: watch::Sender<bool>,
    /// Read-locked while a request is carried out.
    working: Arc<RwLock<()>>,
}

impl Lifecycle {
    /// Registers a request until the result is dropped; `None` if the worker takes no more.
    pub(super) fn begin_request(&self) -> Option<OwnedRwLockReadGuard<()>> {
        self.working.clone().try_read_owned().ok()
    }

    pub(super) fn is_leaving(&self) -> bool {
        *self.leaving.borrow()
    }

    /// Returns when another worker is about to take over.
    pub(super) async fn left(&self) {
        let _ = self.leaving.subscribe().wait_for(|leaving| *leaving).await;
    }

    /// Waits for requests in progress, for a while; later ones are answered with
    /// [`Response::Again`](super::Response::Again) for ever.
    pub(super) async fn quiesce(&self, limit: Duration) {
        self.leaving.send_replace(true);
        match tokio::time::timeout(limit, self.working.clone().write_owned()).await {
            Ok(guard) => std::mem::forget(guard),
            Err(_) => tracing::warn!("leaving in the middle of a request"),
        }
    }
}
