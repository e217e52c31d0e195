//! What readers see of whatever goes wrong.

mod forge;
mod processes;
mod trust;

use lazuli_testkit::kernel::{Feature, require};

/// Whether this machine can run `driver`.
pub(crate) fn able(driver: &str) -> bool {
    let features: &[Feature] = match driver {
        "fanotify" => &[Feature::Root, Feature::Fanotify, Feature::ErofsFileBacked],
        _ => &[Feature::Root, Feature::Fuse],
    };
    features.iter().all(|feature| require(*feature))
}
