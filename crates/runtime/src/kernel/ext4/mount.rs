//! Mounting an image on a joined disk.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use lazuli_image::{Algorithm, BLOCK_SIZE, ext4, rafs::Bootstrap};
use lazuli_sys::device_mapper::JoinedDisk;
use rustix::fs::{Mode, OFlags, open};

use super::super::{
    loop_devices::{Disk, Session, metadata_disk},
    mount::{ImageMount, MountError},
};

/// A new random number at each read.
const RANDOM: &str = "/proc/sys/kernel/random/uuid";

/// Mounts an image on the disks of its blobs, in the order of its blob table. Names and attributes
/// are written to a file in `directory` that has no name there. Blocks.
///
/// # Errors
/// [`ext4::Refused`] inside, if ext4 cannot hold the image; else the kernel refuses a device or the
/// mount.
pub fn mount<B: AsRef<[u8]>>(
    session: &Session,
    bootstrap: &Bootstrap<B>,
    directory: &Path,
    disks: &[Arc<Disk>],
) -> io::Result<ImageMount> {
    let failed = |action| move |source: io::Error| MountError::new(action, directory, source);
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = open(directory, flags, Mode::RUSR | Mode::WUSR);
    let file = File::from(file.map_err(|error| failed("create a file in")(error.into()))?);
    let uuid = fs::read_to_string(RANDOM)?.trim_end().replace('-', "");
    let number = u128::from_str_radix(&uuid, 16).map_err(io::Error::other)?;
    let plan = ext4::plan(bootstrap).map_err(io::Error::other)?;
    let mut out = BufWriter::new(&file);
    plan.write(number.to_be_bytes(), &mut out)
        .and_then(|()| out.flush())
        .map_err(failed("fill"))?;
    let metadata = plan.layout().metadata * BLOCK_SIZE;
    let device = metadata_disk(&file, directory).map_err(failed("show as a disk"))?;
    let paths: Option<Vec<PathBuf>> = disks.iter().map(|disk| disk.path()).collect();
    let paths = paths.ok_or(io::ErrorKind::NotConnected)?;
    let of_blobs = disks.iter().map(|disk| disk.blob().file_size());
    let mut parts = vec![(device.path(), metadata)];
    parts.extend(paths.into_iter().zip(of_blobs));
    let parts: Vec<_> = parts.iter().map(|(path, size)| (path.as_path(), *size)).collect();
    let hash = Algorithm::Blake3.digest(directory.as_os_str().as_encoded_bytes()).hex();
    let joined = JoinedDisk::create(&format!("lazuli-{}", &hash[..32]), &uuid, &parts);
    let joined = joined.map_err(failed("join the disks of"))?;
    let mount = session.keep(ImageMount::mount_joined(&joined, metadata)?)?;
    disks.iter().for_each(|disk| disk.mounted());
    Ok(mount)
}
