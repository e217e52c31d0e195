//! Work without a reader: whole images, cached chunks of others, scrubs, and what removed
//! images leave.

pub(super) mod leftovers;
pub(super) mod prefetch;
pub(super) mod prefetch_jobs;
pub(super) mod remember;
pub(super) mod scrub;
