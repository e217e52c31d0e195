//! Errors of requests, and their gRPC codes.

use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
};

use lazuli_sys::path_error::PathError;
use tonic::{Code, Status};

/// Why a request was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The name is taken. Also how containerd is told that a layer need not be fetched.
    #[error("snapshot {0} already exists")]
    AlreadyExists(String),
    /// No such snapshot.
    #[error("snapshot {0} does not exist")]
    NotFound(String),
    /// containerd knows a snapshot that doesn't exist here.
    #[error(
        "snapshot {0} is not in Lazuli's state directory any more, though containerd knows it: remove its container and \
         its image from containerd, and pull the image again"
    )]
    Lost(String),
    /// It is committed, or a view, and the request is about active ones.
    #[error("snapshot {0} is not active")]
    NotActive(String),
    /// It is not committed and cannot have children.
    #[error("parent {0} is not a committed snapshot")]
    ParentNotCommitted(String),
    /// Others are based on it.
    #[error("cannot remove snapshot {0}: it has children")]
    HasChildren(String),
    /// Only labels can be changed.
    #[error("{field} of snapshot {name} cannot be changed")]
    Immutable {
        /// The field to change.
        field: String,
        /// Its snapshot.
        name: String,
    },
    /// The request lacks something or cannot be understood.
    #[error("{0}")]
    Invalid(String),
    /// The image cannot be used on this node now.
    #[error("image {reference} cannot be used: {source}")]
    Image {
        /// The image.
        reference: String,
        /// Why.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The configuration of an image lists a layer that is not the image's own.
    #[error(
        "image {reference} is refused: its configuration calls a layer {asked}, but by its content the layer is \
         {expected}; rootfs.diff_ids must list the digests of its own layers"
    )]
    NotItsLayer {
        /// The image.
        reference: String,
        /// The chain id that was asked for.
        asked: String,
        /// The allowed values.
        expected: String,
    },
    /// The name of a layer belongs to a snapshot of another kind.
    #[error(
        "image {reference} is refused: the name of its layer {layer} is that of a snapshot which holds something else, \
         from {owner}; remove that image first"
    )]
    LayerTaken {
        /// The image.
        reference: String,
        /// The chain id of the layer.
        layer: String,
        /// The image that has the layer.
        owner: String,
    },
    /// The lower layer is data of a lazy image, so it has no files to show.
    #[error(
        "snapshot {name} cannot be used: layer {layer} below it is listed as data of the lazy image {owner}, and has no files; \
         remove that image and this one, and pull this one again"
    )]
    NoFiles {
        /// The requested snapshot.
        name: String,
        /// The chain id of the data layer.
        layer: String,
        /// The image that lists it.
        owner: String,
    },
    /// The image is served by FUSE, and a container in a user namespace needs it with mapped
    /// owners.
    #[error(
        "image {0} is served by FUSE here, whose files the kernel cannot show to a user namespace as its own: take \
         `remap-ids` out of the capabilities of the snapshotter in containerd's configuration, so that containerd copies \
         the image instead"
    )]
    NotMappable(String),
    /// A snapshot of a virtual machine is based on more than an image.
    #[error(
        "{name}: the layer {layer} lies on top of a lazy image and has files, which no disk shows: convert the whole \
         image, or run it without a virtual machine"
    )]
    FilesOnDisk {
        /// The snapshot.
        name: String,
        /// The layer.
        layer: String,
    },
    /// The metadata cannot be read or written.
    #[error("the records of snapshots in {path}: {source}{}", advice(.source, .path))]
    Store {
        /// The file; empty until it is known.
        path: PathBuf,
        /// The database's error.
        source: Box<redb::Error>,
    },
    /// The state directory's name cannot be an option of overlayfs.
    #[error(
        "{0}: the name of a state directory with snapshots must be UTF-8 without colons, commas, backslashes and quotes, \
         which mean something in the options of overlayfs"
    )]
    Root(PathBuf),
    /// A record in the metadata is damaged.
    #[error("the record of snapshot {name} cannot be read: {source}")]
    Record {
        /// The snapshot.
        name: String,
        /// The problem.
        source: serde_json::Error,
    },
    /// The node's disk.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Connections cannot be served.
    #[error("the socket of the snapshot service: {0}")]
    Server(tonic::transport::Error),
    /// A request panicked; the log has the place.
    #[error("the request failed half way; the daemon's log says more")]
    Panicked,
}

impl From<PathError> for SnapshotError {
    fn from(PathError { path, source }: PathError) -> Self {
        SnapshotError::Io { path, source }
    }
}

/// redb has a type of errors for each step.
macro_rules! from_redb {
    ($($error:ty),+) => {$(
        impl From<$error> for SnapshotError {
            fn from(error: $error) -> Self {
                SnapshotError::Store { path: PathBuf::new(), source: Box::new(error.into()) }
            }
        }
    )+};
}

from_redb!(
    redb::Error,
    redb::TransactionError,
    redb::TableError,
    redb::StorageError,
    redb::CommitError
);

/// Advice for a file that is no valid database.
fn advice(error: &redb::Error, path: &Path) -> String {
    let damaged = match error {
        redb::Error::Corrupted(_) | redb::Error::UpgradeRequired(_) => true,
        redb::Error::Io(error) => matches!(
            error.kind(),
            io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidInput
        ),
        _ => false,
    };
    if !damaged {
        return String::new();
    }
    let directory = path.parent().unwrap_or(path).display();
    format!(
        ". The database held the names of all snapshots: stop containers that use them, delete \
         {directory}, start the daemon again, remove the images from containerd and pull them \
         again"
    )
}

impl From<SnapshotError> for Status {
    fn from(error: SnapshotError) -> Self {
        let code = match &error {
            SnapshotError::AlreadyExists(_) => Code::AlreadyExists,
            SnapshotError::NotFound(_) | SnapshotError::Lost(_) => Code::NotFound,
            SnapshotError::NotActive(_)
            | SnapshotError::HasChildren(_)
            | SnapshotError::NotItsLayer { .. }
            | SnapshotError::LayerTaken { .. }
            | SnapshotError::NoFiles { .. }
            | SnapshotError::NotMappable(_)
            | SnapshotError::FilesOnDisk { .. } => Code::FailedPrecondition,
            SnapshotError::ParentNotCommitted(_)
            | SnapshotError::Immutable { .. }
            | SnapshotError::Invalid(_) => Code::InvalidArgument,
            SnapshotError::Image { .. } => Code::Unavailable,
            _ => Code::Internal,
        };
        Status::new(code, error.to_string())
    }
}
