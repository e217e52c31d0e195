//! Answers the questions of the file system.

use std::{io, ops::Range, path::PathBuf, thread, time::Duration};

use bytes::Bytes;
use tokio::runtime::Handle;

use super::held::HeldLayer;
use crate::{
    daemon::images::Images,
    kernel::layer_store::{LayerName, Layers},
};

/// Deadline of a mount. It continues, and the client may find it when it looks again.
const MOUNT_WITHIN: Duration = Duration::from_secs(30);

/// See the module.
pub(super) struct Answers {
    pub(super) images: Images,
    pub(super) runtime: Handle,
}

impl Answers {
    /// Waits for the end of this worker if another one takes over, which then answers the request:
    /// it is in the journal.
    fn leave_to_successor(&self) {
        while self.images.0.lifecycle.is_leaving() {
            thread::park();
        }
    }

    fn held(&self, name: &LayerName) -> Option<HeldLayer> {
        self.leave_to_successor();
        let known = self.images.0.layer_store.held(name);
        known.or_else(|| self.runtime.block_on(self.images.find_held(name)))
    }
}

impl Layers for Answers {
    fn known(&self) -> Vec<LayerName> {
        self.images.0.layer_store.names()
    }

    fn exists(&self, layer: &LayerName) -> bool {
        self.held(layer).is_some()
    }

    fn diff(&self, layer: &LayerName) -> Option<PathBuf> {
        let held = self.held(layer)?;
        let mounted = self.images.clone();
        // A mount is not interrupted half way.
        let mounted = self.runtime.spawn(async move { mounted.mount_held(&held).await });
        let within = async { tokio::time::timeout(MOUNT_WITHIN, mounted).await };
        let mountpoint = self.runtime.block_on(within).ok()?.ok()?;
        if mountpoint.is_none() {
            self.leave_to_successor();
        }
        mountpoint
    }

    fn info(&self, layer: &LayerName) -> Option<Vec<u8>> {
        self.held(layer).map(|held| held.info())
    }

    fn stored_size(&self, layer: &LayerName) -> Option<u64> {
        self.held(layer).map(|held| held.stored_size)
    }

    fn read(&self, layer: &LayerName, range: Range<u64>) -> io::Result<Bytes> {
        let held = self.held(layer).ok_or(io::ErrorKind::NotFound)?;
        let read = self.runtime.block_on(self.images.read_stored(&held, range));
        read.inspect_err(|error| tracing::warn!(%layer, %error, "cannot be read as stored"))
    }

    fn acquire(&self, layer: &LayerName) {
        self.leave_to_successor();
        let counted = self.images.0.layer_store.count(layer, 1);
        log(layer, counted.map(drop));
    }

    fn release(&self, layer: &LayerName) {
        self.leave_to_successor();
        match self.images.0.layer_store.count(layer, -1) {
            Ok(Some(held)) if held.users == 0 => {
                self.runtime.block_on(self.images.remove_held(&held));
            }
            counted => log(layer, counted.map(drop)),
        }
    }
}

fn log(layer: &LayerName, counted: io::Result<()>) {
    if let Err(error) = counted {
        tracing::warn!(%layer, %error, "its users are not counted on the disk");
    }
}

impl Images {
    /// Mounts a layer unless it is mounted, if it may be shown, and returns where.
    async fn mount_held(&self, layer: &HeldLayer) -> Option<PathBuf> {
        let store = &self.0.layer_store;
        let mountpoint = store.mountpoint(layer);
        let request = layer.request(mountpoint.clone(), store.driver());
        match self.mount(request, None).await {
            Ok(()) => Some(mountpoint),
            Err(error) => {
                let (error, layer) = (error.for_people(), layer.name());
                tracing::warn!(%layer, error, "not shown");
                None
            }
        }
    }

    /// Takes away a layer that nobody uses. Containers that have it mounted keep it.
    pub(super) async fn remove_held(&self, layer: &HeldLayer) {
        let store = &self.0.layer_store;
        let _one = self.0.admission.fetch_locks.lock(&format!("layers of {}", layer.image)).await;
        // It may be used again by now.
        if store.held(&layer.name()).is_none_or(|now| now.users > 0) {
            return;
        }
        if let Err(error) = self.unmount(&store.mountpoint(layer)).await {
            let (error, layer) = (error.for_people(), layer.name());
            tracing::warn!(%layer, error, "stays mounted");
            return;
        }
        if store.forget(layer) {
            self.layers_released(layer.manifest).await;
        }
    }
}
