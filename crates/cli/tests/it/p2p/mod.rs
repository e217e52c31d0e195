//! Nodes that share blobs through a Dragonfly daemon on each: the savings, and readers' results
//! when daemons fail.
//!
//! The daemons are those of [`lazuli_testkit::dragonfly`].

mod chart;
mod faults;
mod preheat;
mod scene;
mod sharing;
