//! Sizes of a node's requests beside those of [`Planner::NODE`](lazuli_image::plan::Planner::NODE).

/// Prefetched bytes are spread evenly over the connections to a server, but in parts of at least
/// this many bytes: a new connection delivers them in two and a half round trips.
pub(crate) const LEAST_PART: u64 = 64 << 10;

/// Stored bytes that are requested once more although they are in flight: the rest of their answer
/// may arrive before them, but they are needed first. They hold `/etc/passwd` and `/etc/group`,
/// which a container's runtime reads before anything else.
pub(crate) const FIRST_NEEDED: u64 = 16 << 10;
