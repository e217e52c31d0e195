//! Why a request was not carried out, and how containerd is told.

use std::{error::Error, io, path::PathBuf};

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
        /// What was to be changed.
        field: String,
        /// Of which snapshot.
        name: String,
    },
    /// The request lacks something or cannot be understood.
    #[error("{0}")]
    Invalid(String),
    /// The image cannot be used here and now.
    #[error("image {reference} cannot be used: {source}")]
    Image {
        /// The image.
        reference: String,
        /// Why.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The metadata cannot be read or written.
    #[error("the metadata of snapshots: {0}")]
    Store(Box<redb::Error>),
    /// A record in the metadata is damaged.
    #[error("the record of snapshot {name} cannot be read: {source}")]
    Record {
        /// The snapshot.
        name: String,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// The node's disk.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What happened.
        source: io::Error,
    },
    /// Connections cannot be served.
    #[error("the socket of the snapshot service: {0}")]
    Server(tonic::transport::Error),
    /// A request panicked; the log says where.
    #[error("the request failed half way; the daemon's log says more")]
    Panicked,
}

impl<E: Into<redb::Error>> From<E> for SnapshotError {
    fn from(error: E) -> Self {
        SnapshotError::Store(Box::new(error.into()))
    }
}

impl From<SnapshotError> for Status {
    fn from(error: SnapshotError) -> Self {
        let code = match &error {
            SnapshotError::AlreadyExists(_) => Code::AlreadyExists,
            SnapshotError::NotFound(_) => Code::NotFound,
            SnapshotError::NotActive(_) | SnapshotError::HasChildren(_) => Code::FailedPrecondition,
            SnapshotError::ParentNotCommitted(_)
            | SnapshotError::Immutable { .. }
            | SnapshotError::Invalid(_) => Code::InvalidArgument,
            SnapshotError::Image { .. } => Code::Unavailable,
            _ => Code::Internal,
        };
        Status::new(code, error.to_string())
    }
}
