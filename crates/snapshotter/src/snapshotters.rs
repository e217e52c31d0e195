//! The snapshotters behind one socket.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::sync::OnceCell;

use crate::{Images, SnapshotError, mounts::Form, requests::Snapshotter};

/// The name by which containerd asks for snapshots of virtual machines: that of its plugin.
const MACHINES: &str = "lazuli-vm";

/// One for each name, with snapshots of its own: the same key may mean another one.
pub(crate) struct Snapshotters {
    pub(crate) files: Snapshotter,
    /// Opened when it is first used.
    pub(crate) machines: OnceCell<Snapshotter>,
    machines_state: PathBuf,
    machines_images: Arc<dyn Images>,
}

impl Snapshotters {
    /// Opens or creates the snapshots in the state directory; those of virtual machines if they
    /// were used before.
    pub(crate) async fn open(
        state: &Path,
        files: Arc<dyn Images>,
        machines: Arc<dyn Images>,
    ) -> Result<Self, SnapshotError> {
        let snapshotters = Snapshotters {
            files: Snapshotter::open(state, files, Form::Files).await?,
            machines: OnceCell::new(),
            machines_state: state.join("vm"),
            machines_images: machines,
        };
        if snapshotters.machines_state.exists()
            && let Err(error) = snapshotters.named(MACHINES).await
        {
            tracing::error!(%error, "virtual machines get no snapshots");
        }
        Ok(snapshotters)
    }

    /// The one that containerd means by `name`.
    pub(crate) async fn named(&self, name: &str) -> Result<&Snapshotter, SnapshotError> {
        if name != MACHINES {
            return Ok(&self.files);
        }
        let open =
            || Snapshotter::open(&self.machines_state, self.machines_images.clone(), Form::Disks);
        self.machines.get_or_try_init(open).await
    }
}

impl fmt::Debug for Snapshotters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshotters").field("files", &self.files).finish_non_exhaustive()
    }
}
