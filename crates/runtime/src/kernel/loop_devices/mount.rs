//! Mounting an image on loop devices.

use std::{
    fs::File,
    io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use lazuli_image::{Algorithm, rafs::Bootstrap};
use lazuli_sys::loop_device::LoopDevice;

use super::{
    super::mount::{ImageMount, MountError},
    disk::Disk,
    helper::BLOCK,
    session::Session,
};

/// The kernel would read a file wrongly, see [`Bootstrap::file_across_blobs`]. Newer kernels do not
/// (7.3.4 was tried), but they have the driver `fanotify`, so they are not told apart.
#[derive(Debug, thiserror::Error)]
#[error(
    "Linux would show wrong bytes in {}: a chunk of it ends in one blob where the next begins in another",
    .0.display()
)]
pub struct WrongReads(PathBuf);

/// Refuses an image that the kernel would show wrongly.
///
/// # Errors
/// [`WrongReads`] inside, or the bootstrap is broken.
pub fn must_be_read_right<B: AsRef<[u8]>>(bootstrap: &Bootstrap<B>) -> io::Result<()> {
    match bootstrap.file_across_blobs().map_err(io::Error::other)? {
        Some(file) => Err(io::Error::other(WrongReads(file))),
        None => Ok(()),
    }
}

/// Mounts the image `bootstrap` on the disks of its blobs, in the order of its device table.
/// Blocks.
///
/// # Errors
/// The bootstrap does not consist of whole blocks, or the kernel refuses a device or the mount.
pub fn mount(session: &Session, bootstrap: &Path, disks: &[Arc<Disk>]) -> io::Result<ImageMount> {
    let failed = |source: io::Error| MountError::new("show as a disk", bootstrap, source);
    let file = File::open(bootstrap).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    if !size.is_multiple_of(BLOCK.into()) {
        let problem = format!("{size} bytes are no whole blocks of {}", BLOCK);
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, problem)).into());
    }
    let device = metadata_disk(&file, bootstrap).map_err(failed)?;
    let devices: Option<Vec<PathBuf>> = disks.iter().map(|disk| disk.path()).collect();
    let devices = devices.ok_or(io::ErrorKind::NotConnected)?;
    let mount = session.keep(ImageMount::mount_disks(&device, &devices)?)?;
    disks.iter().for_each(|disk| disk.mounted());
    Ok(mount)
}

/// Shows metadata of an image as a disk. `path`, of the image or its bootstrap, is in its label.
pub(in crate::kernel) fn metadata_disk(file: &File, path: &Path) -> io::Result<LoopDevice> {
    let hash = Algorithm::Blake3.digest(path.as_os_str().as_encoded_bytes()).hex();
    LoopDevice::attach(file.as_fd(), &format!("lazuli-image-{}", &hash[..32]), BLOCK)
}
