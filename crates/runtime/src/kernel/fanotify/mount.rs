//! Mounting an image on watched files.

use std::path::Path;

use super::{
    super::mount::{ImageMount, MountError},
    watch::Watch,
};

/// Mounts the image `bootstrap` on the watched files, one for each of its blobs in the same order.
pub fn mount(bootstrap: &Path, watches: &mut [Watch]) -> Result<ImageMount, MountError> {
    let devices: Vec<_> = watches.iter().map(Watch::file).collect();
    let erofs = ImageMount::mount(bootstrap, &devices)?;
    watches.iter_mut().for_each(Watch::mounted);
    Ok(erofs)
}
