//! Images of the node for other parts of the worker than the control socket: mounted, and
//! remembered.

mod expect;
mod layers;

use std::{path::Path, sync::Arc};

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use lazuli_image::Digest;
use lazuli_registry::{ImageName, Keyring, Login, Manifest, Options};
use lazuli_sys::path_error::At as _;

use super::{
    DaemonError,
    api::MountRequest,
    mounts::mount::OTHERS,
    node::Node,
    status::{
        measurements::Measurements,
        occupied::{self, Occupied},
        parts::{Explain, MirrorActivity},
    },
};

/// Questions to a registry at the same time.
const PARALLEL: usize = 8;

/// The images of the worker in this process.
#[derive(Clone, Debug)]
pub struct Images(pub(super) Arc<Node>);

impl Images {
    /// Makes `status` report the purposes of mounts. Only the first call counts.
    pub fn explained_by(&self, explain: Arc<Explain>) {
        self.0.status.others.set_snapshots(explain);
    }

    /// The present measurements of the daemon.
    pub async fn measurements(&self) -> Measurements {
        self.0.measurements().await
    }

    /// Makes `status` report the mirror's activity.
    pub fn mirrored_by(&self, activity: Arc<MirrorActivity>) {
        self.0.status.others.set_mirror(activity);
    }

    /// Checks that the image is lazy and all of its data can be reached. `login` came with the
    /// image, if at all.
    pub async fn check(
        &self,
        request: &MountRequest,
        login: Option<&Login>,
    ) -> Result<(), DaemonError> {
        if self.0.admission.checked.take(&request.image, login).await {
            return Ok(());
        }
        self.look_for_blobs(request, login).await
    }

    /// Asks the registry for the image's manifest and whether it has each of its blobs.
    pub(super) async fn look_for_blobs(
        &self,
        request: &MountRequest,
        login: Option<&Login>,
    ) -> Result<(), DaemonError> {
        let name: ImageName = request.image.parse()?;
        // Only as long as this takes: it may be wrong.
        let _login = login.map(|login| self.0.admission.logins.lend(&name, login.clone()));
        let repository = lazuli_registry::open(&name, &self.0.admission.options(request))?;
        // It will be mounted if all is well.
        let preconnect = repository.request_policy().preconnect();
        // A client that may not read the image learns it from its first blob.
        let known =
            self.0.admission.recent.get(&name).filter(|manifest| !data_of(manifest).is_empty());
        let manifest = match known {
            Some(manifest) => manifest,
            None => Arc::new(repository.manifest(None).await?),
        };
        preconnect.done().await;
        stream::iter(data_of(&manifest))
            .map(|blob| {
                let repository = repository.clone();
                async move {
                    if repository.has_blob(&blob).await? {
                        return Ok(());
                    }
                    Err(DaemonError::NoBlob { image: repository.describe(), blob })
                }
            })
            .buffer_unordered(PARALLEL)
            .try_collect()
            .await
    }

    /// Mounts an image, unless its mount point has a mount of this daemon; admission is checked in
    /// any case. `login` replaces the mount's earlier one if the registry accepts it; it is kept
    /// until [`Images::unmount`], even while nothing is mounted.
    pub async fn mount(
        &self,
        request: MountRequest,
        login: Option<&Login>,
    ) -> Result<(), DaemonError> {
        let Some(_request) = self.0.lifecycle.begin_request() else {
            return Err(DaemonError::Stopping);
        };
        if let Some(login) = login
            && self.may_replace_login(&request, login).await
        {
            let kept = self.0.admission.logins.set(&request, login.clone()).await;
            kept.at(self.0.root.join("logins"))?;
        }
        loop {
            if self.0.mounts.serves_at(&request.mountpoint).await {
                return self.0.admission.admit_pinned(&request).await.map(drop);
            }
            match self.0.mount(request.clone(), std::future::pending()).await {
                Err(DaemonError::Taken { .. }) => tokio::time::sleep(OTHERS).await,
                other => return other.map(drop),
            }
        }
    }

    /// Returns whether a mount has no other login, or `login` alone reads the image: any client
    /// that brings a layer of the image may name a login, and the mount's readers depend on a good
    /// one.
    async fn may_replace_login(&self, request: &MountRequest, login: &Login) -> bool {
        if self.0.admission.logins.of(&request.mountpoint).is_none_or(|known| known == *login) {
            return true;
        }
        let alone = async {
            let (name, _) = request.name_and_digest()?;
            let keyring = Keyring::default();
            keyring.set("alone", &name, login.clone());
            let options = Options { keyring, ..self.0.admission.options(request) };
            lazuli_registry::open(&name, &options)?.manifest(None).await?;
            Ok::<_, DaemonError>(())
        };
        let read = alone.await;
        if let Err(error) = &read {
            let image = &request.image;
            tracing::warn!(image, %error, "the mount keeps its earlier login: a new one is refused");
        }
        read.is_ok()
    }

    /// Removes a mount, if there is one. Users of a busy mount are served until they are done.
    pub async fn unmount(&self, mountpoint: &Path) -> Result<(), DaemonError> {
        let Some(_request) = self.0.lifecycle.begin_request() else {
            return Err(DaemonError::Stopping);
        };
        self.0.umount_for_good(mountpoint).await
    }

    /// The disk usage of the image mounted at a place. Data that images share is counted with one
    /// of them.
    pub async fn occupied(&self, mountpoint: &Path) -> Occupied {
        let node = &self.0;
        if let Some(known) = node.status.counted.get(mountpoint) {
            return known;
        }
        let count = occupied::count(node.mounts.served().await).await;
        let found = count.get(mountpoint).copied().unwrap_or_default();
        node.status.counted.set(count);
        found
    }

    /// Returns when another worker is about to take over, and nothing new should be begun.
    pub async fn leaving(&self) {
        self.0.lifecycle.left().await;
    }
}

/// The blobs that hold an image's data.
fn data_of(manifest: &Manifest) -> Vec<Digest> {
    let data = manifest.parsed.lazy_base().map_or(&[][..], |(data, _)| data);
    // The index of a layer is as little use without the layer as the other way round.
    data.iter().flat_map(|layer| layer.index_of().into_iter().chain([layer.digest])).collect()
}
