//! Mounting an image on loop devices.

use std::{
    fs::File,
    io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use lazuli_image::Algorithm;
use lazuli_sys::loop_device::LoopDevice;

use super::{
    super::mount::{Erofs, MountError},
    disk::Disk,
    helper::BLOCK,
    session::Session,
};

/// Mounts the image `bootstrap` on the disks of its blobs, in the order of its device table.
/// Blocks.
///
/// # Errors
/// The bootstrap does not consist of whole blocks, or the kernel refuses a device or the mount.
pub fn mount(session: &Session, bootstrap: &Path, disks: &[Arc<Disk>]) -> io::Result<Erofs> {
    let failed = |source: io::Error| MountError::new("show as a disk", bootstrap, source);
    let file = File::open(bootstrap).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    if !size.is_multiple_of(BLOCK.into()) {
        let problem = format!("{size} bytes are no whole blocks of {}", BLOCK);
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, problem)).into());
    }
    let hash = Algorithm::Blake3.digest(bootstrap.as_os_str().as_encoded_bytes()).hex();
    let label = format!("lazuli-image-{}", &hash[..32]);
    let device = LoopDevice::attach(file.as_fd(), &label, BLOCK).map_err(failed)?;
    let devices: Option<Vec<PathBuf>> = disks.iter().map(|disk| disk.path()).collect();
    let devices = devices.ok_or(io::ErrorKind::NotConnected)?;
    let erofs = Erofs::mount_disks(&device, &devices)?;
    let erofs = session.keep(erofs)?;
    disks.iter().for_each(|disk| disk.mounted());
    Ok(erofs)
}
