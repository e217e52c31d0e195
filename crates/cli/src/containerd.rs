//! What the snapshot service needs of the node: images that the worker mounts.

use std::{
    collections::HashMap,
    error::Error,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use lazuli_image::Digest;
use lazuli_registry::Login;
use lazuli_runtime::daemon::{
    DaemonError, DriverChoice, Images, MountRequest, SnapshotStatus, SnapshotsStatus, Worker,
};
use lazuli_snapshotter::{self as snapshotter, Contents, Image, ImageSnapshot, Overview, Server};
use tokio::task::JoinHandle;

/// Serves containerd, if the configuration says so. The task ends when another worker takes over. Readers of images are
/// served also when this fails.
pub(crate) fn serve(
    root: &Path,
    driver: DriverChoice,
    worker: &mut Worker,
) -> Option<JoinHandle<()>> {
    let listener = worker.snapshots()?;
    let (root, images) = (root.to_owned(), worker.images());
    Some(tokio::spawn(async move {
        let leaving = images.clone();
        let served = match Server::open(&root, Arc::new(Mounted { images, driver })).await {
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

/// What `lazuli status` shows of snapshots.
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

struct Mounted {
    images: Images,
    driver: DriverChoice,
}

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

fn outcome<T>(result: Result<T, DaemonError>) -> Outcome<T> {
    result.map_err(|error| error.for_people().into())
}

#[async_trait]
impl snapshotter::Images for Mounted {
    async fn check(&self, image: &Image) -> Outcome {
        let request = self.request(image, Path::new("/"));
        outcome(self.images.check(&request, login(image).as_ref()).await)
    }

    async fn data_layers(&self, image: &Image) -> Outcome<Vec<String>> {
        let request = self.request(image, Path::new("/"));
        let layers = self.images.data_layers(&request, login(image).as_ref()).await;
        outcome(layers.map(|layers| layers.iter().map(Digest::to_string).collect()))
    }

    async fn bootstrap_layer(&self, image: &Image) -> Outcome<String> {
        let request = self.request(image, Path::new("/"));
        let layer = self.images.bootstrap_layer(&request, login(image).as_ref()).await;
        outcome(layer.map(|layer| layer.to_string()))
    }

    async fn mount(&self, image: &Image, at: &Path) -> Outcome {
        outcome(self.images.mount(self.request(image, at), login(image).as_ref()).await)
    }

    async fn unmount(&self, at: &Path) -> Outcome {
        outcome(self.images.unmount(at).await)
    }
}

impl Mounted {
    fn request(&self, image: &Image, at: &Path) -> MountRequest {
        MountRequest {
            image: pinned(image),
            mountpoint: at.to_owned(),
            driver: self.driver,
            platform: None,
            plain_http: false,
            base: true,
        }
    }
}

fn login(image: &Image) -> Option<Login> {
    image.login.as_ref().map(|login| Login::new(&*login.user, &*login.secret))
}

/// The image's name with the digest that it meant when it was pulled: a tag may mean something else by now.
fn pinned(image: &Image) -> String {
    let Image { reference, manifest_digest, .. } = image;
    match manifest_digest {
        // A digest in the reference may be that of an index.
        Some(digest) => {
            let name = reference.split_once('@').map_or(&**reference, |(name, _)| name);
            format!("{name}@{digest}")
        }
        None => reference.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_pinned() {
        for (reference, digest, expected) in [
            ("r.example/a:1", Some("sha256:2"), "r.example/a:1@sha256:2"),
            ("r.example/a@sha256:1", Some("sha256:2"), "r.example/a@sha256:2"),
            ("r.example/a:1", None, "r.example/a:1"),
        ] {
            let manifest_digest = digest.map(str::to_owned);
            let image = Image { reference: reference.to_owned(), manifest_digest, login: None };
            assert_eq!(pinned(&image), expected);
        }
    }
}
