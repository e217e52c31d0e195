//! Nodes that have blobs from each other, through a Dragonfly daemon on each: what that saves, and
//! what readers see of its misfortunes.
//!
//! The daemons are those of [`lazuli_testkit::dragonfly`].

mod chart;
mod faults;
mod preheat;
mod scene;
mod sharing;
