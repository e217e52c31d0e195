//! The layer store: podman and CRI-O find layers of ordinary images there, and mount them instead
//! of pulling them. [`crate::kernel::layer_store`] has the file system.
//!
//! A layer is shown, and its DiffID said, under the conditions on which containerd's layers are
//! reported as present (see `ordinary`). In every other case the name does not exist, and the
//! client pulls the layer itself.
//!
//! ```text
//! ROOT/layers/
//!   KEY.json   a layer that was found: its image's manifest, its digests, and how many use it
//!   KEY/diff   the layer, mounted
//! ```
//!
//! A layer is found once, and its image pinned: a container starts from it after its tag was moved,
//! or while its registry is away. It is mounted whenever a client looks at it and it is not.

mod answers;
mod blob;
mod find;
mod held;
mod serve;

use std::{
    collections::HashMap,
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock},
};

pub(super) use self::serve::Leftover;
use self::{blob::Window, find::Recent, held::HeldLayer};
use super::{
    api::DriverChoice,
    record::{Record as _, Records},
};
use crate::{
    kernel::layer_store::{LayerName, Session},
    sync::lock,
};

/// The operator's settings.
#[derive(Clone, Debug)]
pub struct LayerStoreSettings {
    /// Where the file system is mounted.
    pub directory: PathBuf,
    /// The driver for layers.
    pub driver: DriverChoice,
}

/// The layers that clients have found.
#[derive(Debug)]
pub(super) struct LayerStore {
    settings: Option<LayerStoreSettings>,
    root: PathBuf,
    records: Records<HeldLayer>,
    layers: Mutex<HashMap<LayerName, HeldLayer>>,
    recent: Recent,
    window: Window,
    session: OnceLock<Session>,
}

impl LayerStore {
    /// Opens the records in `root`.
    pub(super) fn open(root: PathBuf, settings: Option<LayerStoreSettings>) -> io::Result<Self> {
        let records = Records::open(root.clone())?;
        let all = records.all()?.into_iter().map(|layer: HeldLayer| (layer.name(), layer));
        let layers = Mutex::new(all.collect());
        let (recent, window, session) = Default::default();
        Ok(LayerStore { settings, root, records, layers, recent, window, session })
    }

    /// The mount point of a layer.
    fn mountpoint(&self, layer: &HeldLayer) -> PathBuf {
        self.root.join(layer.key()).join("diff")
    }

    /// A layer that was found before.
    fn held(&self, name: &LayerName) -> Option<HeldLayer> {
        lock(&self.layers).get(name).cloned()
    }

    /// The names of all of them.
    fn names(&self) -> Vec<LayerName> {
        lock(&self.layers).keys().cloned().collect()
    }

    /// Keeps a layer that was found.
    fn hold(&self, layer: HeldLayer) -> io::Result<()> {
        let mountpoint = self.mountpoint(&layer);
        DirBuilder::new().recursive(true).mode(0o700).create(mountpoint)?;
        self.records.write_secret(&layer)?;
        lock(&self.layers).insert(layer.name(), layer);
        Ok(())
    }

    /// Changes how many clients use a layer, and returns it.
    fn count(&self, name: &LayerName, change: i64) -> io::Result<Option<HeldLayer>> {
        let mut layers = lock(&self.layers);
        let Some(layer) = layers.get_mut(name) else { return Ok(None) };
        layer.users = layer.users.saturating_add_signed(change);
        self.records.write_secret(layer)?;
        Ok(Some(layer.clone()))
    }

    /// Forgets a layer that nobody uses and that is not mounted. Returns whether no layer of its
    /// image is left.
    fn forget(&self, layer: &HeldLayer) -> bool {
        let mut layers = lock(&self.layers);
        layers.remove(&layer.name());
        if let Err(error) = self.records.remove(&layer.key()) {
            tracing::warn!(layer = %layer.layer, %error, "a layer that is not used stays");
        }
        let directory = self.root.join(layer.key());
        for path in [&*directory.join("diff"), &*directory] {
            remove_directory(path);
        }
        !layers.values().any(|other| other.manifest == layer.manifest)
    }

    /// Layers that no client has used for a while.
    fn unused(&self) -> Vec<HeldLayer> {
        lock(&self.layers).values().filter(|layer| layer.is_unused()).cloned().collect()
    }
}

fn remove_directory(path: &Path) {
    if let Err(error) = fs::remove_dir(path) {
        tracing::debug!(path = %path.display(), %error, "stays");
    }
}
