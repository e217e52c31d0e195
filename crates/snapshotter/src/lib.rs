//! containerd's snapshot service on a Unix socket.
//!
//! Ordinary images are kept exactly as containerd's own overlayfs snapshotter keeps them. A lazy
//! image is one mount: its data layers are reported present without being fetched, its bootstrap
//! layer is the mountpoint of the image, and containers get an overlay on top of that.
//!
//! ```text
//! ROOT/snapshots/
//!   metadata.redb   names, parents, labels
//!   <number>/fs     a layer's files, or a container's writes
//!   <number>/work   for overlayfs
//!   trash/          what is being deleted
//! ROOT/lazy/
//!   <number>/fs     where an image is mounted
//! ```
//!
//! containerd names a lazy image's layers by the chain ids in its configuration, and gives a
//! snapshot to every image whose configuration claims its name. So a layer gets a name only if its
//! content proves it, and data layers, which have no files, are never shown without the image above
//! them.
//!
//! Layers of ordinary images are unpacked by containerd, unless [`Images`] can show them as they
//! are. Then each such snapshot has its own mount, which shows the layer and all below it. It is
//! mounted when the first snapshot is based on it.
//!
//! Images are mounted by the [`Images`] that this crate is given.
//!
//! Under the name `lazuli-vm` the same socket serves runtimes of virtual machines, which give the
//! disk of an image to their guests. Its snapshots are in `ROOT/vm`.
#![forbid(unsafe_code)]

mod directories;
mod error;
mod filter;
mod grpc;
mod keyed_lock;
mod label;
mod mapping;
mod mounted_layers;
mod mounts;
mod overview;
mod requests;
mod snapshotters;
mod storage;
mod store;
mod usage;

use std::{error::Error, fmt, path::Path, sync::Arc};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;

pub use error::SnapshotError;
pub use filter::Filter;
pub use overview::{Contents, ImageSnapshot, Overview};

/// containerd's protocol.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod api {
    /// `containerd.types`
    pub mod types {
        tonic::include_proto!("containerd.types");
    }
    /// `containerd.services.snapshots.v1`
    pub mod services {
        /// `containerd.services.snapshots`
        pub mod snapshots {
            /// `containerd.services.snapshots.v1`
            pub mod v1 {
                tonic::include_proto!("containerd.services.snapshots.v1");
            }
        }
    }
    pub use services::snapshots::v1 as snapshots;
}

/// A lazy image, as containerd names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Registry, repository and tag or digest, as the user requested it.
    pub reference: String,
    /// Digest of the manifest to which the reference resolved at the pull.
    pub manifest_digest: Option<String>,
    /// For an ordinary image that is shown as it is, the number of layers, from the lowest on;
    /// `None` for a lazy image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<u32>,
    /// Login of the latest pull; [`Images`] remembers it.
    #[serde(skip)]
    pub login: Option<Login>,
}

/// A user of a registry, and a password. Its `Debug` output does not show them.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// Empty: the other is a refresh token.
    pub user: String,
    /// The password.
    pub secret: String,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<login>")
    }
}

impl Image {
    /// The reference without tag and digest.
    fn repository(&self) -> &str {
        let name = self.reference.split_once('@').map_or(&*self.reference, |(name, _)| name);
        match name.rsplit_once(':') {
            Some((repository, tag)) if !tag.contains('/') => repository,
            _ => name,
        }
    }
}

/// The lowest layers of an ordinary image, which one chain id covers.
#[derive(Clone, Copy, Debug)]
pub struct CoveredLayers {
    /// How many they are.
    pub count: u32,
    /// Whether they are the whole image, and some of its data is fetched once it is mounted.
    pub is_lazy_image: bool,
}

/// Mounts lazy images.
#[async_trait]
pub trait Images: Send + Sync {
    /// Checks that the image and all of its data can be reached, perhaps while it is being mounted.
    /// The error names the unreachable part and the reason.
    async fn check(&self, image: &Image) -> Result<(), Box<dyn Error + Send + Sync>>;

    /// Finds out whether the image may run.
    async fn admit(&self, image: &Image) -> Result<(), Box<dyn Error + Send + Sync>>;

    /// Returns the chain ids of the image's data layers, lowest first, by the manifest with the
    /// image's digest. The image must be admitted.
    async fn data_layers(&self, image: &Image)
    -> Result<Vec<String>, Box<dyn Error + Send + Sync>>;

    /// Returns the chain id of the image's bootstrap layer, by that manifest and the layer's
    /// content.
    async fn bootstrap_layer(&self, image: &Image) -> Result<String, Box<dyn Error + Send + Sync>>;

    /// Returns the layers of an ordinary image that the chain id `layer` covers, if they can be
    /// shown without being unpacked: their content is proven, or a key vouches for it. `namespace`
    /// is containerd's.
    async fn ordinary_layer(
        &self,
        image: &Image,
        layer: &str,
        namespace: &str,
    ) -> Result<Option<CoveredLayers>, Box<dyn Error + Send + Sync>>;

    /// Mounts the image at the directory `at`, unless it is mounted there, if it may run. From then
    /// on until it is unmounted, the image's newest login counts.
    async fn mount(&self, image: &Image, at: &Path) -> Result<(), Box<dyn Error + Send + Sync>>;

    /// Removes the mount at `at`, if there is one. Readers that use it are served until they are
    /// done.
    async fn unmount(&self, at: &Path) -> Result<(), Box<dyn Error + Send + Sync>>;

    /// Bytes and files that the image mounted at `at` takes on the disk, except those counted with
    /// another image.
    async fn occupied(&self, at: &Path) -> (u64, u64);

    /// Called when the last snapshot of the image is removed: data that nothing else on the node
    /// uses may be deleted.
    async fn removed(&self, image: &Image);
}

/// The snapshot service for one state directory.
#[derive(Debug)]
pub struct Server(grpc::Service);

impl Server {
    /// Opens or creates the snapshots in `root`, and cleans up after an earlier process. Images for
    /// the snapshotter `lazuli-vm` are mounted by `machines`, each as a directory with the files
    /// `bootstrap`, `blob-1` and so on.
    pub async fn open(
        root: &Path,
        images: Arc<dyn Images>,
        machines: Arc<dyn Images>,
    ) -> Result<Self, SnapshotError> {
        Ok(Server(grpc::Service::open(root, images, machines).await?))
    }

    /// A view of the snapshots, also while they are served.
    pub fn overview(&self) -> Overview {
        self.0.overview()
    }

    /// Serves connections until `end`; requests in progress are finished then.
    pub async fn serve(
        self,
        listener: UnixListener,
        end: impl Future<Output = ()>,
    ) -> Result<(), SnapshotError> {
        let service = api::snapshots::snapshots_server::SnapshotsServer::new(self.0);
        let server = tonic::transport::Server::builder().add_service(service);
        let incoming = UnixListenerStream::new(listener);
        server.serve_with_incoming_shutdown(incoming, end).await.map_err(SnapshotError::Server)
    }
}
