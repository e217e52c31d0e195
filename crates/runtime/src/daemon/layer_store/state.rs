//! The layers that clients have found, and how many use each.

use std::{
    collections::HashMap,
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock},
    time::SystemTime,
};

use super::{held::HeldLayer, recent::Recent, window::Window};
use crate::{
    daemon::{
        api::DriverChoice,
        record::{Record as _, Records},
    },
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
pub(in crate::daemon) struct LayerStore {
    pub(super) settings: Option<LayerStoreSettings>,
    root: PathBuf,
    records: Records<HeldLayer>,
    layers: Mutex<HashMap<LayerName, HeldLayer>>,
    pub(super) recent: Recent,
    pub(super) window: Window,
    pub(super) session: OnceLock<Session>,
}

impl LayerStore {
    /// Opens the records in `root`.
    pub(in crate::daemon) fn open(
        root: PathBuf,
        settings: Option<LayerStoreSettings>,
    ) -> io::Result<Self> {
        let records = Records::open(root.clone())?;
        let all = records.all()?.into_iter().map(|layer: HeldLayer| (layer.name(), layer));
        let layers = Mutex::new(all.collect());
        let (recent, window, session) = Default::default();
        Ok(LayerStore { settings, root, records, layers, recent, window, session })
    }

    /// The driver for layers.
    pub(super) fn driver(&self) -> DriverChoice {
        self.settings.as_ref().map(|settings| settings.driver).unwrap_or_default()
    }

    /// The mount point of a layer.
    pub(super) fn mountpoint(&self, layer: &HeldLayer) -> PathBuf {
        self.root.join(layer.key()).join("diff")
    }

    /// A layer that was found before.
    pub(super) fn held(&self, name: &LayerName) -> Option<HeldLayer> {
        lock(&self.layers).get(name).cloned()
    }

    /// The same for a client that looks it up, and may use it soon.
    pub(super) fn look_up(&self, name: &LayerName) -> Option<HeldLayer> {
        let mut layers = lock(&self.layers);
        let layer = layers.get_mut(name)?;
        if layer.is_old() {
            layer.since = SystemTime::now();
            if let Err(error) = self.records.write_secret(layer) {
                tracing::warn!(layer = %name, %error, "its use is not noted on the disk");
            }
        }
        Some(layer.clone())
    }

    /// The names of all of them.
    pub(super) fn names(&self) -> Vec<LayerName> {
        lock(&self.layers).keys().cloned().collect()
    }

    /// Keeps a layer that was found.
    pub(super) fn hold(&self, layer: HeldLayer) -> io::Result<()> {
        let mountpoint = self.mountpoint(&layer);
        DirBuilder::new().recursive(true).mode(0o700).create(mountpoint)?;
        self.records.write_secret(&layer)?;
        lock(&self.layers).insert(layer.name(), layer);
        Ok(())
    }

    /// Changes how many clients use a layer, and returns it.
    pub(super) fn count(&self, name: &LayerName, change: i64) -> io::Result<Option<HeldLayer>> {
        let mut layers = lock(&self.layers);
        let Some(layer) = layers.get_mut(name) else { return Ok(None) };
        layer.users = layer.users.saturating_add_signed(change);
        self.records.write_secret(layer)?;
        Ok(Some(layer.clone()))
    }

    /// Forgets a layer that is not mounted, unless somebody uses it by now. Returns whether no
    /// layer of its image is left.
    pub(super) fn forget(&self, layer: &HeldLayer) -> bool {
        let mut layers = lock(&self.layers);
        if layers.get(&layer.name()).is_some_and(|now| now.users > 0) {
            return false;
        }
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
    pub(super) fn unused(&self) -> Vec<HeldLayer> {
        lock(&self.layers).values().filter(|layer| layer.is_unused()).cloned().collect()
    }
}

fn remove_directory(path: &Path) {
    if let Err(error) = fs::remove_dir(path) {
        tracing::debug!(path = %path.display(), %error, "stays");
    }
}
