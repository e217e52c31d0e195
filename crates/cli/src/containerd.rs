//! Connects the snapshot service to the worker, which mounts its images.

use std::{
    collections::HashMap,
    error::Error,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use lazuli_image::{Digest, InvalidDigest};
use lazuli_mirror::Mirror;
use lazuli_registry::{InvalidName, Login, Reference};
use lazuli_runtime::daemon::{
    DaemonError, DriverChoice, Images, MountRequest, Occupied, SnapshotStatus, SnapshotsStatus,
    Worker,
};
use lazuli_snapshotter::{
    self as snapshotter, Contents, CoveredLayers, Image, ImageSnapshot, Overview, Server,
};
use tokio::task::JoinHandle;

use crate::config::FirstPull;

/// Serves containerd, if configured. The task ends when another worker takes over. Readers of
/// images are served even if this fails.
pub(crate) fn serve(
    root: &Path,
    driver: DriverChoice,
    first: FirstPull,
    mirror: Option<Arc<Mirror>>,
    worker: &mut Worker,
) -> Option<JoinHandle<()>> {
    let listener = worker.snapshots()?;
    let (root, images) = (root.to_owned(), worker.images());
    Some(tokio::spawn(async move {
        let leaving = images.clone();
        let files = DaemonImages { images, driver, first, mirror };
        let machines = DaemonImages { driver: DriverChoice::Disks, ..files.clone() };
        let served = match Server::open(&root, Arc::new(files), Arc::new(machines)).await {
            Ok(server) => {
                tracing::info!("serving containerd");
                let overview = server.overview();
                leaving.explained_by(Arc::new(move || explain(&overview)));
                server.serve(listener, leaving.leaving()).await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = served {
            tracing::error!(%error, "containerd is not served");
        }
    }))
}

/// The snapshots in `lazuli status`.
fn explain(overview: &Overview) -> (SnapshotsStatus, HashMap<PathBuf, SnapshotStatus>) {
    let Contents { committed, active, views, former, removed, images } = match overview.read() {
        Ok(contents) => contents,
        Err(error) => {
            let error = Some(error.to_string());
            return (SnapshotsStatus { error, ..SnapshotsStatus::default() }, HashMap::new());
        }
    };
    let status = SnapshotsStatus { committed, active, views, former, removed, error: None };
    let mounts = images.into_iter().map(|image| {
        let ImageSnapshot { name, mountpoint, containers: layers } = image;
        let containers = layers.keys().cloned().collect();
        (mountpoint, SnapshotStatus { name, containers, layers })
    });
    (status, mounts.collect())
}

#[derive(Clone)]
struct DaemonImages {
    images: Images,
    driver: DriverChoice,
    /// Selects the layers without an index that are pulled whole.
    first: FirstPull,
    /// Has the logins of pulled images.
    mirror: Option<Arc<Mirror>>,
}

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

fn outcome<T>(result: Result<T, DaemonError>) -> Outcome<T> {
    result.map_err(|error| error.for_people().into())
}

#[async_trait]
impl snapshotter::Images for DaemonImages {
    async fn check(&self, image: &Image) -> Outcome {
        let request = self.request(image, Path::new("/"))?;
        outcome(self.images.check(&request, self.login(image).as_ref()).await)
    }

    async fn data_layers(&self, image: &Image) -> Outcome<Vec<String>> {
        let request = self.request(image, Path::new("/"))?;
        let layers = self.images.data_layers(&request, self.login(image).as_ref()).await;
        outcome(layers.map(|layers| layers.iter().map(Digest::to_string).collect()))
    }

    async fn bootstrap_layer(&self, image: &Image) -> Outcome<String> {
        let request = self.request(image, Path::new("/"))?;
        let layer = self.images.bootstrap_layer(&request, self.login(image).as_ref()).await;
        outcome(layer.map(|layer| layer.to_string()))
    }

    async fn ordinary_layer(
        &self,
        image: &Image,
        layer: &str,
        namespace: &str,
    ) -> Outcome<Option<CoveredLayers>> {
        let request = self.request(image, Path::new("/"))?;
        let layer: Digest = layer.parse().map_err(|error: InvalidDigest| error.to_string())?;
        let (login, may_pull) = (self.login(image), self.first.pulls_in(namespace));
        let shown = self.images.ordinary_layer(&request, login.as_ref(), &layer, may_pull);
        let covered = outcome(shown.await)?;
        Ok(covered.map(|covered| CoveredLayers {
            count: covered.count,
            is_lazy_image: covered.is_lazy_image,
        }))
    }

    async fn admit(&self, image: &Image) -> Outcome {
        let request = self.request(image, Path::new("/"))?;
        outcome(self.images.admit(&request, self.login(image).as_ref()).await)
    }

    async fn mount(&self, image: &Image, at: &Path) -> Outcome {
        outcome(self.images.mount(self.request(image, at)?, self.login(image).as_ref()).await)
    }

    async fn unmount(&self, at: &Path) -> Outcome {
        outcome(self.images.unmount(at).await)
    }

    async fn occupied(&self, at: &Path) -> (u64, u64) {
        let Occupied { bytes, files } = self.images.occupied(at).await;
        (bytes, files)
    }

    async fn removed(&self, image: &Image) {
        if let Some(digest) = image.manifest_digest.as_deref().and_then(|text| text.parse().ok()) {
            self.images.removed(digest).await;
            self.images.ordinary_removed(digest).await;
        }
    }
}

impl DaemonImages {
    fn request(&self, image: &Image, at: &Path) -> Outcome<MountRequest> {
        Ok(MountRequest {
            image: pinned(image)?.to_string(),
            asked: Some(image.reference.clone()),
            mountpoint: at.to_owned(),
            driver: self.driver,
            platform: None,
            plain_http: false,
            base: true,
            layers: image.layers,
            layer: None,
            bootstrap: None,
            nosuid: false,
        })
    }

    /// The login of the image: from labels, or from its pull through the mirror.
    fn login(&self, image: &Image) -> Option<Login> {
        if let Some(login) = &image.login {
            return Some(Login::new(&*login.user, &*login.secret));
        }
        self.mirror.as_ref()?.login(&pinned(image).ok()?)
    }
}

/// The image's name with the digest to which it resolved at the pull: a tag may have moved since,
/// and a digest in the reference may be that of an index.
///
/// Both come from labels. If a client sets none, containerd uses the image's own annotations, which
/// its maker chose. So the name must be that of an image in a registry, never of a local file.
fn pinned(image: &Image) -> Outcome<Reference> {
    let Image { reference, manifest_digest, .. } = image;
    let name: Reference = reference.parse().map_err(|error: InvalidName| {
        format!("its label must name an image in a registry: {error}")
    })?;
    let digest = manifest_digest.as_deref().ok_or_else(|| {
        format!("it was pulled without the digest of its manifest: remove {reference} from containerd, and pull it again")
    })?;
    let digest: Digest = digest.parse().map_err(|error: InvalidDigest| error.to_string())?;
    Ok(name.at(digest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(reference: &str, digest: Option<&str>) -> Image {
        let manifest_digest = digest.map(str::to_owned);
        Image { reference: reference.to_owned(), manifest_digest, layers: None, login: None }
    }

    #[test]
    fn an_image_name_is_pinned_to_its_digest() {
        let [one, two] = ["1", "2"].map(|digit| format!("sha256:{}", digit.repeat(64)));
        for (reference, expected) in [
            ("r.example/a:1".to_owned(), format!("r.example/a:1@{two}")),
            (format!("r.example/a@{one}"), format!("r.example/a@{two}")),
            ("busybox".to_owned(), format!("docker.io/library/busybox:latest@{two}")),
        ] {
            let pinned = pinned(&image(&reference, Some(&two))).unwrap();
            assert_eq!(pinned.to_string(), expected);
        }
    }

    #[test]
    fn labels_name_no_file_and_no_moving_tag() {
        let digest = format!("sha256:{}", "2".repeat(64));
        for (reference, digest, problem) in [
            ("oci:/tenant/volume", Some(&*digest), "must name an image in a registry: `oci:/te"),
            ("oci:/tenant/volume:tag", Some(&*digest), "must name an image in a registry"),
            ("/tenant/volume", Some(&*digest), "must name an image in a registry"),
            ("dir:/", Some(&*digest), "must name an image in a registry"),
            ("r.example/a:1", None, "remove r.example/a:1 from containerd"),
            ("r.example/a:1", Some("latest"), "`latest` is not a digest"),
        ] {
            let error = pinned(&image(reference, digest)).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }
}
