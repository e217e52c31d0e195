//! Probes this driver with a real mount.

use std::{fmt::Display, fs, io, os::fd::AsFd as _, path::Path, slice, sync::Arc};

use super::{Disk, Session, mount};
use crate::{
    cache::{Cache, Settings},
    kernel::{
        mount::ImageMount,
        tiny_image::{CONTENT, TinyImage},
    },
    source::Memory,
};

/// Mounts a small image from a cache of its own in `directory`, reads it through the session, and
/// switches it to the cache files. Blocks.
///
/// # Errors
/// The step that doesn't work, in words.
pub fn run(session: &Session, directory: &Path) -> Result<(), String> {
    try_on_disks(session, directory, |image, scratch, disk| {
        let bootstrap = scratch.join("bootstrap");
        fs::write(&bootstrap, &image.bootstrap)
            .map_err(|error| format!("writing a trial image: {error}"))?;
        mount(session, &bootstrap, slice::from_ref(disk)).map_err(|_| {
            "the kernel does not mount EROFS from several disks (Linux 5.16)".to_owned()
        })
    })
}

/// The same for any way to mount images on these disks.
pub(in crate::kernel) fn try_on_disks(
    session: &Session,
    directory: &Path,
    mount: impl FnOnce(&TinyImage, &Path, &Arc<Disk>) -> Result<ImageMount, String>,
) -> Result<(), String> {
    let image = TinyImage::new()?;
    let in_cache = |error: &dyn Display| format!("{}: {error}", directory.display());
    let scratch = directory.join(format!("probe-loop-{}", std::process::id()));
    fs::create_dir_all(&scratch).map_err(|error| in_cache(&error))?;
    let tried = try_image(session, &scratch, &image, mount);
    fs::remove_dir_all(&scratch).map_err(|error| in_cache(&error))?;
    tried
}

fn try_image(
    session: &Session,
    scratch: &Path,
    image: &TinyImage,
    mount: impl FnOnce(&TinyImage, &Path, &Arc<Disk>) -> Result<ImageMount, String>,
) -> Result<(), String> {
    let failed = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    let cache = Cache::open(&scratch.join("cache"), Settings::default());
    let cache = cache.map_err(|error| format!("a trial cache: {error}"))?;
    let blob = cache.blob(&image.blob, Arc::new(Memory::new(CONTENT)));
    let blob = blob.map_err(|error| format!("a trial blob: {error}"))?;
    let disk = session.disk(blob.clone()).map_err(failed("a trial blob"))?;
    disk.attach().map_err(failed("a loop device on a file of the daemon"))?;
    let mounted = mount(image, scratch, &disk)?;
    match session.read(mounted.as_fd(), "file") {
        Ok(content) if content == CONTENT => {}
        Ok(_) => return Err("a trial image shows wrong bytes".to_owned()),
        Err(error) => return Err(format!("reading a trial image fails: {error}")),
    }
    blob.flush().map_err(failed("writing the trial blob"))?;
    disk.hand_over().map_err(failed("the file behind a loop device cannot be changed"))?;
    if !disk.is_handed_over() {
        return Err("a trial blob is not complete".to_owned());
    }
    Ok(())
}
