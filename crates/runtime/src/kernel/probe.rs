//! Probes which driver works on this machine.

use std::path::Path;

use super::{fanotify, fuse, release::Release};

/// The drivers that work here, and the reasons why others don't, in words.
#[derive(Clone, Debug)]
pub struct Probe {
    /// The fanotify driver, with a cache in the directory that was probed.
    pub fanotify: Result<(), String>,
    /// Direct reads with the fanotify driver, see
    /// [`ImageMount::read_directly`](super::mount::ImageMount::read_directly).
    pub direct_reads: Result<(), String>,
    /// The FUSE driver.
    pub fuse: Result<(), String>,
}

impl Probe {
    /// Tries both drivers, the first one with a small image in `cache`, which is created if
    /// necessary. Blocks for some milliseconds.
    pub fn run(cache: &Path) -> Self {
        let release = Release::of_this_machine();
        let fanotify = release.buffered_reads().and_then(|()| fanotify::probe::run(cache));
        Probe { fanotify, direct_reads: release.direct_reads(), fuse: fuse::probe::run() }
    }

    /// The result for a process whose predecessor left a fanotify group: that driver works.
    pub fn of_successor() -> Self {
        let direct_reads = Release::of_this_machine().direct_reads();
        Probe { fanotify: Ok(()), direct_reads, fuse: fuse::probe::run() }
    }
}
