//! What the daemon reports about itself: `status`, measurements, disk usage, failed reads.

pub(super) mod answer;
pub(super) mod container;
pub(super) mod failed_reads;
pub(super) mod latest_failures;
pub(super) mod measurements;
pub(super) mod occupied;
pub(super) mod parts;
