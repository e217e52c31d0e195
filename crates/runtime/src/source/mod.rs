//! Sources of blobs.
//!
//! A [`BlobSource`] is one immutable blob somewhere, [`Memory`] or [`RepositorySource`]; all
//! callers see only the trait. `race` reads from several of them, and is the only one that retries.

pub(crate) mod early;
pub(crate) mod link_speed;
mod memory;
mod no_route;
pub(crate) mod race;
mod repository;
pub(crate) mod request;
pub(crate) mod sources;
pub(crate) mod tracked_source;

#[cfg(test)]
pub(crate) mod contract;
#[cfg(test)]
pub(crate) mod faulty;

use std::{error::Error, fmt, ops::Range, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::Stored;
use lazuli_registry::{Health, ServerTraffic, Urgency};

pub(crate) use self::no_route::NoRoute;
pub use self::{memory::Memory, repository::RepositorySource};
pub use lazuli_registry::Progress;

/// Random access to one immutable blob.
///
/// - The same range always yields the same bytes.
/// - Exactly the requested bytes or an error; there are no short reads.
/// - An empty range yields no bytes, without a request.
/// - A range that ends behind the blob is an error that is not
///   [transient](SourceError::is_transient).
/// - Any number of reads may be in progress at once.
/// - Dropping the future abandons the transfer.
///
/// The bytes need not be right: the caller checks their digest.
#[async_trait]
pub trait BlobSource: fmt::Debug + Send + Sync {
    /// Reads the stored bytes in `range`. `arrived` is called as bytes arrive: a silent source is
    /// taken for a hanging one.
    async fn read(&self, range: Range<Stored>, arrived: Progress<'_>)
    -> Result<Bytes, SourceError>;

    /// Its name, for messages.
    fn describe(&self) -> String;

    /// Announces that the whole blob will be read from here, sooner or later. Only advice: reads
    /// work in any case.
    fn expect_whole(&self) {}

    /// Returns whether to ask for `range` here. A peer-to-peer daemon fetches whole pieces, and
    /// takes longer, when no node has the range yet.
    async fn suits(&self, _range: &Range<Stored>, _urgency: Urgency) -> bool {
        true
    }

    /// Time without data after which others are asked as well, if it is not the usual one.
    fn hedge_after(&self) -> Option<Duration> {
        None
    }

    /// Counters of the server behind it, if there is one.
    fn traffic(&self) -> Option<&ServerTraffic> {
        None
    }

    /// The health of its server, if it has one. Sources of one server share it.
    fn server_health(&self) -> Option<&Arc<Health>> {
        None
    }
}

/// Why a source did not deliver.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SourceError {
    /// The blob ends before the range does.
    #[error("the blob has {size} bytes, asked for {} to {}", range.start, range.end)]
    OutOfRange {
        /// The requested range.
        range: Range<Stored>,
        /// Bytes in the blob.
        size: u64,
    },
    /// The source failed.
    #[error("{source}")]
    Failed {
        /// Whether the same read may succeed a little later.
        transient: bool,
        /// The pause that the server asked for.
        retry_after: Option<Duration>,
        /// Its message.
        #[source]
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The source delivered another number of bytes than it was asked for.
    #[error("{got} bytes came from {source_name} instead of {expected}")]
    WrongSize {
        /// The source, as [`BlobSource::describe`] names it.
        source_name: String,
        /// Bytes that were asked for.
        expected: u64,
        /// Bytes that came.
        got: u64,
    },
    /// The source would have to fetch the range from a server that can be asked directly as well.
    #[error("no node has it yet ({source_name})")]
    AskOthers {
        /// The source, as [`BlobSource::describe`] names it.
        source_name: String,
    },
    /// The source has not answered.
    #[error("nothing came from {source_name} within {:.1} s; is it overloaded, or a firewall in between?", waited.as_secs_f32())]
    Silent {
        /// The source, as [`BlobSource::describe`] names it.
        source_name: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The source delivers too slowly to be of use.
    #[error("next to nothing came from {source_name} within {:.1} s", period.as_secs_f32())]
    Slow {
        /// The source, as [`BlobSource::describe`] names it.
        source_name: String,
        /// The time in which it was looked at.
        period: Duration,
    },
    /// Every source failed for good.
    #[error("{}", failures.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Everywhere {
        /// The failures of all sources, the most preferred first.
        failures: Vec<Arc<SourceError>>,
    },
    /// There is no source to ask.
    #[error("the blob has no source")]
    NoSource,
    /// Nothing was delivered in the time that the operator allows.
    #[error("gave up after {:.1} s (fetch.deadline_seconds)", waited.as_secs_f32())]
    TimedOut {
        /// How long it was tried.
        waited: Duration,
        /// The error of the last attempts; `None` when none was sent.
        #[source]
        last: Option<Arc<SourceError>>,
    },
}

impl SourceError {
    /// Returns whether the same read may succeed a little later.
    pub fn is_transient(&self) -> bool {
        match self {
            SourceError::Failed { transient, .. } => *transient,
            SourceError::Silent { .. } | SourceError::Slow { .. } => true,
            _ => false,
        }
    }

    /// How long the source asked to be left alone.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            SourceError::Failed { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}
