//! The tuning of a node's request planner, see [`lazuli_image::plan`].

use lazuli_image::plan::Planner;

/// At 100 Mbit/s and 10 ms a round trip costs what 128 KiB do. Bigger needs than 4 MiB are split,
/// since several streams fill a link better than one, and a failure costs less.
pub(crate) const PLANNER: Planner = Planner { gap: 128 << 10, max_request: 4 << 20 };

/// Prefetched bytes are spread evenly over the connections to a server, but in parts of at least so
/// many bytes: through a new connection they come in two and a half round trips.
pub(crate) const LEAST_PART: u64 = 64 << 10;

/// Stored bytes that are requested once more although they are on their way: behind what came with
/// them they may arrive last, when they are needed first. `/etc/passwd` and `/etc/group`, which a
/// container's runtime reads before anything else.
pub(crate) const FIRST_NEEDED: u64 = 16 << 10;
