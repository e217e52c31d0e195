//! Errors of requests to the daemon.

use std::{io, path::PathBuf, sync::Arc};

use lazuli_image::Digest;
use lazuli_sys::path_error::PathError;
use rustix::io::Errno;

use crate::{cache::CacheError, error::ReadError, image::ImageError};

/// Why a request was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The name of the image or its platform cannot be parsed, or a registry cannot be asked.
    #[error(transparent)]
    Registry(#[from] lazuli_registry::RegistryError),
    /// Not the name of an image.
    #[error(transparent)]
    Name(#[from] lazuli_registry::InvalidName),
    /// Not a platform.
    #[error(transparent)]
    Platform(#[from] lazuli_image::oci::InvalidPlatform),
    /// The image cannot be used.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The image may not run here.
    #[error(transparent)]
    Gate(#[from] lazuli_policy::GateError),
    /// No statement or proof of the layers' content exists any more.
    #[error(
        "{image}: its layers are neither signed by a trusted key nor hashed by this node; \
         remove the image from containerd, and pull it again"
    )]
    NotVouched {
        /// The image.
        image: String,
    },
    /// Its metadata leads to another file than a layer.
    #[error(
        "its metadata leads to bytes that are not those of layer {layer}, as was found when all of \
         them were here: make it again, with `lazuli index` or `lazuli convert`"
    )]
    WrongFile {
        /// The layer.
        layer: Digest,
    },
    /// Its layers cannot be shown.
    #[error("{image}: its layers cannot be shown by their indexes: {source}")]
    Prefix {
        /// The image.
        image: String,
        /// The problem with the indexes.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An image without an index cannot be pulled whole.
    #[error("{image} has no index, and its layer {layer} cannot be pulled by this node: {why}")]
    NotPulled {
        /// The image.
        image: String,
        /// The layer.
        layer: Digest,
        /// The reason.
        why: String,
    },
    /// A layer cannot be delivered with a node.
    #[error("layer {layer}: {source}")]
    BundledLayer {
        /// The layer.
        layer: Digest,
        /// The problem with it.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Another image was admitted.
    #[error("{image} is served only once it is verified")]
    Unverified {
        /// Its manifest.
        image: Digest,
    },
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Data of the image is missing.
    #[error("{image}: blob {blob} is not there")]
    NoBlob {
        /// The image.
        image: String,
        /// The blob.
        blob: Digest,
    },
    /// The cache has the blob of a private image, and the registry does not have it.
    #[error(
        "{image}: the registry does not deliver blob {blob}, which this node has from a private \
         image of another repository; push the image with all of its blobs"
    )]
    NotProven {
        /// The image.
        image: String,
        /// The blob.
        blob: Digest,
        /// Why.
        source: ReadError,
    },
    /// The name has no digest, so it may mean different images.
    #[error("{image}: expected a name with the digest of a manifest, as in r.example/a@sha256:…")]
    NoDigest {
        /// The name.
        image: String,
    },
    /// The digest is that of an index.
    #[error("{image} is an index: expected the digest of a manifest in it, such as {manifest}")]
    NotItsManifest {
        /// The name, with the digest.
        image: String,
        /// The manifest in the index for this node.
        manifest: Digest,
    },
    /// The mount point is taken.
    #[error("{mountpoint} already has a mount; `lazuli umount` it first")]
    Taken {
        /// The mount point.
        mountpoint: PathBuf,
    },
    /// No such mount.
    #[error("{mountpoint} is not mounted by this daemon")]
    NotMounted {
        /// The mount point.
        mountpoint: PathBuf,
    },
    /// A process uses it.
    #[error("{mountpoint} is in use{holders}")]
    Busy {
        /// The mount point.
        mountpoint: PathBuf,
        /// ` by NAME (pid N), …`, or nothing when unknown.
        holders: String,
    },
    /// Images are mounted.
    #[error("images are mounted, {mounts}: unmount them first, or use `stop --force`")]
    Mounted {
        /// The mounts and their users, separated by commas.
        mounts: String,
    },
    /// Nothing is mounted any more, but file systems of images are still in use.
    #[error(
        "still in use after their unmount, by an overlay, an open file or another mount namespace: {}; \
             end the users, or use `stop --force`",
        list(images)
    )]
    StillUsed {
        /// Digests of the images' manifests, and their users: ` by NAME (pid N)`, or nothing when
        /// unknown.
        images: Vec<(Digest, String)>,
    },
    /// A takeover would break the users of these mounts.
    #[error(
        "processes that use {} would get errors from then on: these mounts were made by a version whose FUSE mounts \
             only Linux 6.9 and later can hand over. End the processes and unmount first, or accept it \
             with `daemon --takeover --force`",
        mountpoints.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    WouldEnd {
        /// Their mountpoints.
        mountpoints: Vec<PathBuf>,
    },
    /// Something else is mounted on top.
    #[error("something else is mounted over the image at {mountpoint}: unmount that first")]
    Covered {
        /// The mount point.
        mountpoint: PathBuf,
    },
    /// The daemon is about to end, or the client went away.
    #[error("given up: the daemon is ending")]
    Stopping,
    /// The requested driver does not work here.
    #[error("the driver {driver} does not work here: {reason}")]
    Driver {
        /// Which.
        driver: &'static str,
        /// Why.
        reason: String,
    },
    /// The kernel did not mount.
    #[error("cannot mount {image} at {mountpoint}: {source}")]
    Mount {
        /// The image.
        image: String,
        /// Where.
        mountpoint: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A part of an image cannot be fetched.
    #[error("cannot fetch all of {image}")]
    Prefetch {
        /// The image.
        image: String,
        /// The part, and why.
        source: ReadError,
    },
    /// Why something failed that several have asked for.
    #[error(transparent)]
    Shared(Arc<DaemonError>),
    /// The state directory.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
}

impl From<PathError> for DaemonError {
    fn from(PathError { path, source }: PathError) -> Self {
        DaemonError::Io { path, source }
    }
}

fn list(images: &[(Digest, String)]) -> String {
    images.iter().map(|(image, by)| format!("{image}{by}")).collect::<Vec<_>>().join(", ")
}

impl DaemonError {
    /// Returns whether the request may succeed a little later or in another process: a resource is
    /// exhausted, or the disk failed.
    pub(super) fn is_passing(&self) -> bool {
        let mut error: Option<&(dyn std::error::Error + 'static)> = Some(self);
        while let Some(this) = error {
            let errno = this.downcast_ref().and_then(Errno::from_io_error);
            if matches!(
                errno,
                // The last one: no more threads.
                Some(
                    Errno::MFILE
                        | Errno::NFILE
                        | Errno::NOMEM
                        | Errno::NOSPC
                        | Errno::DQUOT
                        | Errno::AGAIN
                )
            ) {
                return true;
            }
            error = this.source();
        }
        false
    }

    /// Returns whether it is an ordinary image or an artifact that was asked for, and no index of
    /// it is trusted.
    pub(super) fn is_not_lazy(&self) -> bool {
        match self {
            DaemonError::Image(error) => matches!(error, ImageError::NotLazy { .. }),
            DaemonError::Shared(error) => error.is_not_lazy(),
            _ => false,
        }
    }

    /// The message with its causes.
    pub fn for_people(&self) -> String {
        let mut message = self.to_string();
        let mut error: &dyn std::error::Error = self;
        while let Some(source) = error.source() {
            let text = source.to_string();
            if !message.contains(&text) {
                message.push_str(": ");
                message.push_str(&text);
            }
            error = source;
        }
        message
    }
}
