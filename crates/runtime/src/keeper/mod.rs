//! Keeps readers waiting, instead of reading holes, when the process that serves them dies.
//!
//! ```text
//!             listens: keeper.sock ◀── successor: lazuli daemon --takeover
//!                │
//!   keeper ──────┴── socket pair ──────────── worker
//!   holds: fanotify group, journal,            everything else: registry, cache,
//!   blob files, FUSE connections,              readers, control socket
//!   control socket, lock
//! ```
//!
//! The keeper holds descriptors under names and starts workers, and does nothing else: no network,
//! no images, no threads. A worker hands every descriptor that must not close to the keeper before
//! anything depends on it ([`Link::hold`]). When it dies, the keeper starts the next one and gives
//! it all of them. When the keeper dies, the worker starts another keeper and hands over what the
//! old one held. When both are replaced by another version, the old keeper waits until the new pair
//! serves, and goes on with its own if that fails.
//!
//! No process has to end properly for any of this: a worker that gives way just exits.

mod descriptors;
mod error;
mod handover;
mod history;
mod info;
mod link;
pub(crate) mod names;
mod programs;
mod restarts;
mod service;
mod socket;
mod start;
mod supervisor;
mod takeover;
mod wire;
mod worker;
#[cfg(fuzzing)]
pub(crate) use wire::fuzz;

pub use self::{
    descriptors::Descriptors,
    error::{Ended, KeeperError},
    info::KeeperInfo,
    link::{Given, KeptDescriptor, Link, Order},
    programs::{Programs, Role},
    supervisor::Keeper,
    takeover::{TakeoverError, report},
};
