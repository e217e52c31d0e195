//! One read of a blob: its range, its reader, and its limits.

use std::{ops::Range, sync::Arc};

use lazuli_image::Stored;
use tokio::time::Instant;

use crate::sharing::priority_semaphore::{Claim, PrioritySemaphore};

/// A range to read, its reader, and its limits.
pub(crate) struct RangeRequest<'a> {
    pub(crate) range: Range<Stored>,
    /// Bytes that one connection is asked for at most.
    pub(crate) part: u64,
    /// Until when it is tried.
    pub(crate) deadline: Instant,
    /// Memory for answers.
    pub(crate) memory: &'a Arc<PrioritySemaphore>,
    /// The image that is charged, and whether a reader waits.
    pub(crate) claim: &'a Claim,
    /// Is told of requests and bytes.
    pub(crate) meter: &'a dyn Meter,
}

/// Counts network traffic.
pub(crate) trait Meter: Send + Sync {
    /// A request is sent.
    fn request(&self);
    /// `bytes` bytes arrived.
    fn arrived(&self, bytes: u64);
    /// `bytes` bytes were fetched before.
    fn was_held(&self, bytes: u64);
}
