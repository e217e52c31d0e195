//! The driver `loop`: EROFS on loop devices, on files of the daemon, and in the end on the files of
//! the cache.
//!
//! Needs Linux 5.16 or later (EROFS with several devices), loop devices, FUSE, and CAP_SYS_ADMIN.
//!
//! ```text
//! EROFS ─┬─ loop device ── bootstrap
//!        └─ loop device ─┬─ while data arrives: file of this driver's FUSE file system ── ensure
//!                        └─ LOOP_CHANGE_FD when everything is here: file in the cache
//! ```
//!
//! The driver promises: a reader gets checked bytes, waits, or gets EIO. When a blob is complete,
//! its readers and the kernel are alone. Nothing of it fails open: without a daemon every read that
//! would need one fails, nothing of that is remembered, and the next daemon serves the same mounts
//! again.
//!
//! One loop device of a blob serves all images that have it. Every device is free when the last
//! mount of it is gone: the kernel sees to that, whatever happened to the daemon.

pub mod abi;
mod answer;
mod disk;
mod helper;
pub mod probe;
mod session;

use std::{
    fs::File,
    io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use lazuli_image::Algorithm;
use lazuli_sys::loop_device::LoopDevice;

pub use self::{
    disk::Disk,
    helper::run as help,
    session::{Left, Session},
};
use super::mount::{Erofs, MountError};

/// Mounts the image `bootstrap` on the disks of its blobs, in the order of its device table.
/// Blocks.
///
/// # Errors
/// The bootstrap does not consist of whole blocks, or the kernel refuses a device or the mount.
pub fn mount(session: &Session, bootstrap: &Path, disks: &[Arc<Disk>]) -> io::Result<Erofs> {
    let failed = |source: io::Error| MountError::new("show as a disk", bootstrap, source);
    let file = File::open(bootstrap).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    if !size.is_multiple_of(helper::BLOCK.into()) {
        let problem = format!("{size} bytes are no whole blocks of {}", helper::BLOCK);
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, problem)).into());
    }
    let hash = Algorithm::Blake3.digest(bootstrap.as_os_str().as_encoded_bytes()).hex();
    let label = format!("lazuli-image-{}", &hash[..32]);
    let device = LoopDevice::attach(file.as_fd(), &label, helper::BLOCK).map_err(failed)?;
    let devices: Option<Vec<PathBuf>> = disks.iter().map(|disk| disk.path()).collect();
    let devices = devices.ok_or(io::ErrorKind::NotConnected)?;
    let erofs = Erofs::mount_disks(&device, &devices)?;
    let erofs = session.keep(erofs)?;
    disks.iter().for_each(|disk| disk.mounted());
    Ok(erofs)
}
