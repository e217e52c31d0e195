//! Mounts of bootstraps that a client has in files, as nydusd's clients do.

use std::{path::Path, sync::Arc};

use lazuli_policy::Verified;
use lazuli_registry::{Login, Pull};
use lazuli_sys::path_error::At as _;

use super::mount::OTHERS;
use crate::{
    daemon::{DaemonError, admission::pins::Pin, api::MountRequest, node::Node},
    image::{BootstrapFile, Fetched, StoredImage},
    kernel::mount,
};

impl Node {
    /// Mounts an image by its bootstrap, unless it is mounted there. `login` is used for it from
    /// now on, until it is unmounted for good.
    pub(in crate::daemon) async fn mount_bootstrap(
        &self,
        mut request: MountRequest,
        login: Option<Login>,
        cancelled: impl Future<Output = ()>,
    ) -> Result<(), DaemonError> {
        request.mountpoint = mount::real_path(&request.mountpoint).at(&request.mountpoint)?;
        let mountpoint = &request.mountpoint;
        tokio::pin!(cancelled);
        loop {
            let serves = self.mounts.serves_at(mountpoint).await;
            if serves && !self.mounts.is_of(&request).await {
                return Err(DaemonError::Taken { mountpoint: mountpoint.clone() });
            }
            // Again after each pause: a request that failed meanwhile has forgotten it.
            if let Some(login) = &login {
                let kept = self.admission.logins.set(&request, login.clone()).await;
                kept.at(self.root.join("logins"))?;
            }
            if serves {
                return Ok(());
            }
            match self.mount(request.clone(), &mut cancelled).await {
                Err(DaemonError::Taken { .. }) => tokio::time::sleep(OTHERS).await,
                Err(error) => {
                    self.admission.logins.remove(mountpoint);
                    return Err(error);
                }
                Ok(_) => return Ok(()),
            }
        }
    }

    /// The image of a bootstrap in a file, if it may run, and a pin on its metadata. A policy is
    /// asked about the file's digest: that of the manifest in the registry is not known.
    pub(super) async fn of_bootstrap(
        &self,
        request: &MountRequest,
        bootstrap: &Path,
        repository: Arc<dyn Pull>,
    ) -> Result<(StoredImage, Verified, Fetched, Pin), DaemonError> {
        let path = bootstrap.to_owned();
        let file = tokio::task::spawn_blocking(move || BootstrapFile::open(&path)).await;
        let file = file.map_err(|_| DaemonError::Stopping)??;
        let verified = self.admission.admit_bootstrap(request, file.digest).await?;
        let images = self.root.join("images");
        let read = file.read(&images).await?;
        let digest = read.manifest_digest();
        let _lock = self.admission.fetch_locks.lock(&digest.to_string()).await;
        let pin = self.admission.pins.pin(&images, digest);
        let (stored, fetched) = read.store(&repository, &images).await?;
        Ok((stored, verified.of_index(digest), fetched, pin))
    }
}
