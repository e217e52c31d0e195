//! Names under which the keeper holds descriptors.
//!
//! Versions that take over from each other go by these names, so they never change.

/// The journal of fanotify events. A worker gets it before it opens anything, see
/// [`Link::enter`](super::Link::enter).
pub(crate) const JOURNAL: &str = "journal";

/// The common fanotify group. The names of images' own groups begin with it.
pub(crate) const GROUP: &str = "fanotify";

/// Prefix of files that are marked in a fanotify group.
pub(crate) const BLOB: &str = "blob-";

/// The control socket.
pub(crate) const CONTROL: &str = "control";

/// The socket of the snapshot service.
pub(crate) const SNAPSHOTS: &str = "snapshots";

/// The mirror's socket; systemd passes its own under the same name.
pub(crate) const MIRROR: &str = "mirror";

/// The lock of the root directory.
pub(super) const LOCK: &str = "lock";

/// The keeper's own socket.
pub(super) const LISTENER: &str = "keeper";

/// Standard error of keeper and workers.
pub(super) const LOG: &str = "log";

/// The connection to the previous keeper, which resumes if a worker on trial fails.
pub(super) const PREDECESSOR: &str = "predecessor";
