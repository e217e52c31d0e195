//! Where blobs come from.
//!
//! A [`BlobSource`] is one immutable blob somewhere. [`Memory`] and [`RepositorySource`] are places;
//! [`Retry`] is a source around another one. Everything above sees the trait alone.

mod memory;
mod repository;
mod retry;

#[cfg(test)]
pub(crate) mod contract;
#[cfg(test)]
pub(crate) mod faulty;

use std::{error::Error, fmt, ops::Range, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::Stored;

pub use self::{memory::Memory, repository::RepositorySource, retry::Retry};

/// Random access to one immutable blob.
///
/// - The same range always yields the same bytes.
/// - Exactly the requested bytes or an error; there are no short reads.
/// - An empty range yields no bytes, without asking anybody.
/// - A range that ends behind the blob is an error that is not [transient](SourceError::is_transient).
/// - Any number of reads may be under way at once.
/// - Dropping the future abandons the transfer.
///
/// Nothing is said about the bytes being right: whoever asks checks their digest.
#[async_trait]
pub trait BlobSource: fmt::Debug + Send + Sync {
    /// Reads the stored bytes in `range`.
    async fn read(&self, range: Range<Stored>) -> Result<Bytes, SourceError>;
}

/// Why a source did not deliver.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SourceError {
    /// The blob ends before the range does.
    #[error("the blob has {size} bytes, asked for {} to {}", range.start, range.end)]
    OutOfRange {
        /// What was asked for.
        range: Range<Stored>,
        /// Bytes in the blob.
        size: u64,
    },
    /// The place that holds the blob failed.
    #[error("{source}")]
    Failed {
        /// Whether the same read may succeed a little later.
        transient: bool,
        /// How long the place asked to be left alone.
        retry_after: Option<Duration>,
        /// What it said.
        #[source]
        source: Arc<dyn Error + Send + Sync>,
    },
    /// Nothing was delivered in the time that the operator allows.
    #[error("gave up after {} s", deadline.as_secs_f32())]
    TimedOut {
        /// The time allowed.
        deadline: Duration,
        /// Why the last attempt failed; `None` when the first one was still under way.
        #[source]
        last: Option<Arc<SourceError>>,
    },
}

impl SourceError {
    /// Whether the same read may succeed a little later.
    pub fn is_transient(&self) -> bool {
        matches!(self, SourceError::Failed { transient: true, .. })
    }

    /// How long the place asked to be left alone.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            SourceError::Failed { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}
