//! The command, end to end: the real binary, private state directories, images of the test kit and
//! of the corpus.
#![allow(clippy::print_stderr, reason = "what was skipped, and what a failed test's daemon logged")]

mod access;
mod bad_input;
mod bake;
mod batches;
mod budget;
mod commit;
mod containerd;
mod convert;
mod copy;
mod daemon;
mod diff;
mod disks;
mod drivers;
mod faults;
mod full_disk;
mod guests;
mod index;
mod keep;
mod keeper;
mod lazuli;
mod lessons;
mod loop_devices;
mod merge;
mod metrics;
mod mirror;
mod mount;
mod nodes;
mod numbered;
mod nydus_image;
mod p2p;
mod policy;
mod prefetch;
mod referrer;
mod registry;
mod reliability;
mod reuse;
mod run;
mod scrub;
mod seekable;
mod sign;
mod stream;
mod trees;
mod unpack;
mod v5;
