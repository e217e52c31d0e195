//! The tuning of a node's request planner, see [`lazuli_image::plan`].

use lazuli_image::plan::Planner;

/// At 100 Mbit/s and 10 ms, a round trip costs as much as 128 KiB. Requests beyond 4 MiB are split,
/// since several streams fill a link better than one, and a failure costs less.
pub(crate) const PLANNER: Planner = Planner { gap: 128 << 10, max_request: 4 << 20 };

/// Prefetched bytes are spread evenly over the connections to a server, but in parts of at least
/// this many bytes: a new connection delivers them in two and a half round trips.
pub(crate) const LEAST_PART: u64 = 64 << 10;

/// Stored bytes that are requested once more although they are in flight: the rest of their answer
/// may arrive before them, but they are needed first. They hold `/etc/passwd` and `/etc/group`,
/// which a container's runtime reads before anything else.
pub(crate) const FIRST_NEEDED: u64 = 16 << 10;
