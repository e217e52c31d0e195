//! Probes this driver with a real mount.

use std::{path::Path, slice};

use lazuli_image::rafs::Bootstrap;

use super::mount;
use crate::kernel::loop_devices::{Session, probe::try_on_disks};

/// Mounts a small image from a cache of its own in `directory`, reads it through the session, and
/// switches it to the cache files. Blocks.
///
/// # Errors
/// The step that doesn't work, in words.
pub fn run(session: &Session, directory: &Path) -> Result<(), String> {
    try_on_disks(session, directory, |image, scratch, disk| {
        let bootstrap = Bootstrap::open(image.bootstrap.as_slice())
            .map_err(|error| format!("a trial image: {error}"))?;
        mount(session, &bootstrap, scratch, slice::from_ref(disk))
            .map_err(|error| format!("the kernel does not mount ext4 on joined disks: {error}"))
    })
}
