//! The drivers that show an image's tree, and which of them this machine can run.

use std::{
    io::{self, Write as _},
    path::Path,
};

use lazuli_testkit::kernel::{Feature, require};

/// Those that this machine can run, the best first.
pub(crate) fn here() -> impl Iterator<Item = &'static str> {
    ["fanotify", "loop", "ext4", "fuse"].into_iter().filter(|driver| able(driver))
}

/// Returns whether this machine can run `driver`; says why not.
///
/// A kernel without a device mapper cannot run `ext4`. `make test-kernels` has kernels that can,
/// and names it in `LAZULI_REQUIRE_DRIVERS`.
///
/// # Panics
/// When it must and cannot: see [`require`], and the variable.
pub(crate) fn able(driver: &str) -> bool {
    let features: &[Feature] = match driver {
        "fanotify" => &[Feature::Root, Feature::Fanotify, Feature::ErofsFileBacked],
        "loop" => &[Feature::Root, Feature::Loop, Feature::ErofsOnDisks],
        "ext4" if !Path::new("/dev/mapper/control").exists() => {
            let wanted = std::env::var("LAZULI_REQUIRE_DRIVERS").unwrap_or_default();
            assert!(!wanted.contains(driver), "the kernel has no device mapper");
            // Not eprintln: the test harness captures the output of passing tests.
            let why = "skipped: ext4 needs a device mapper; see `make test-kernels`";
            let _ = writeln!(io::stderr(), "{why}");
            return false;
        }
        "ext4" => &[Feature::Root, Feature::Loop, Feature::Filesystem("ext4")],
        _ => &[Feature::Root, Feature::Fuse],
    };
    features.iter().all(|feature| require(*feature))
}
