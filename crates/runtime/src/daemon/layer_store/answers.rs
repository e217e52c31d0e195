//! Answers the questions of the file system.

use std::{io, ops::Range, path::PathBuf, thread, time::Duration};

use bytes::Bytes;
use tokio::{
    runtime::Handle,
    sync::{OwnedMutexGuard, OwnedRwLockReadGuard},
};

use super::held::HeldLayer;
use crate::{
    daemon::{images::Images, record::Record as _},
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

    /// A layer of which something may be said.
    fn held(&self, name: &LayerName) -> Option<HeldLayer> {
        self.found(name).filter(|held| !self.is_refuted(held))
    }

    fn found(&self, name: &LayerName) -> Option<HeldLayer> {
        self.leave_to_successor();
        let known = self.images.0.layer_store.look_up(name);
        known.or_else(|| self.runtime.block_on(self.images.find_held(name)))
    }

    /// Returns whether this node has found out since that a layer has another content than it was
    /// said to have.
    fn is_refuted(&self, held: &HeldLayer) -> bool {
        let HeldLayer { layer, toc, diff_id, index, .. } = held;
        toc.is_none() && self.images.0.ordinaries.is_refuted(layer, diff_id, *index)
    }

    /// Begins to count a user. Another worker that takes over by plan waits for the result to be
    /// dropped, and does not count a second time.
    fn begin_count(&self) -> OwnedRwLockReadGuard<()> {
        loop {
            match self.images.0.lifecycle.begin_request() {
                Some(request) => return request,
                // The other worker answers.
                None => thread::park(),
            }
        }
    }
}

impl Layers for Answers {
    fn known(&self) -> Vec<LayerName> {
        self.images.0.layer_store.names()
    }

    fn exists(&self, layer: &LayerName) -> bool {
        // Without its name a client could not say that it does not use the layer any more.
        self.found(layer).is_some_and(|held| held.users > 0 || !self.is_refuted(&held))
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
        // It may have been removed since the client found it.
        let found = self.runtime.block_on(self.images.find_to_use(layer));
        if found.is_none() {
            return;
        }
        let _request = self.begin_count();
        log(layer, self.images.0.layer_store.count(layer, 1).map(drop));
    }

    fn release(&self, layer: &LayerName) {
        let request = self.begin_count();
        match self.images.0.layer_store.count(layer, -1) {
            Ok(Some(held)) if held.users == 0 => {
                // If it is counted again, it stays at 0.
                drop(request);
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
        // There is no mount without a record.
        let _mount = self.lock_mount(layer).await;
        store.held(&layer.name())?;
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
        let name = layer.name();
        let _mount = self.lock_mount(layer).await;
        let _one = self.lock_layers(&name).await;
        // It may be used again by now, or was looked up and will be.
        if store.held(&name).is_none_or(|now| now.users > 0 || now.since != layer.since) {
            return;
        }
        if let Err(error) = self.unmount(&store.mountpoint(layer)).await {
            let (error, layer) = (error.for_people(), layer.name());
            tracing::warn!(%layer, error, "stays mounted");
            return;
        }
        let _documents = self.lock_documents(&layer.manifest).await;
        if store.forget(layer) {
            self.layers_released(layer.manifest).await;
        }
    }

    /// Keeps a layer from being mounted or removed by others.
    async fn lock_mount(&self, layer: &HeldLayer) -> OwnedMutexGuard<()> {
        self.0.admission.fetch_locks.lock(&format!("mount of {}", layer.key())).await
    }
}
