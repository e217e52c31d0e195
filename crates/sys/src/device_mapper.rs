//! Disks that are made of other disks, see `include/uapi/linux/dm-ioctl.h`.

use std::{
    fs::{self, File},
    io,
    mem::offset_of,
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use rustix::fs::{major, minor};

use crate::loop_device::decode;

/// `_IOWR(DM_IOCTL, n, struct dm_ioctl)` without `n`.
const REQUEST: libc::Ioctl = 0xc138_fd00_u32 as libc::Ioctl;

const DEVICE_CREATE: u8 = 3;
const DEVICE_REMOVE: u8 = 4;
/// Without [`SUSPEND`]: the table that was loaded last takes effect.
const DEVICE_SUSPEND: u8 = 6;
const TABLE_LOAD: u8 = 9;

const READ_ONLY: u32 = 1;
/// The kernel removes the device with its last user.
const DEFERRED_REMOVE: u32 = 1 << 17;

/// Bytes in a sector, whatever the blocks of a disk.
const SECTOR: u64 = 512;

/// Bytes of the longest name, with the zero at its end.
const NAME_SIZE: usize = 128;

/// Devices of the same name, with different numbers at their ends, that are tried.
const ATTEMPTS: usize = 1024;

/// `struct dm_ioctl`.
#[repr(C)]
struct Header {
    version: [u32; 3],
    data_size: u32,
    data_start: u32,
    target_count: u32,
    open_count: i32,
    flags: u32,
    event: u32,
    padding: u32,
    device: u64,
    name: [u8; NAME_SIZE],
    uuid: [u8; NAME_SIZE + 1],
    data: [u8; 7],
}

/// `struct dm_target_spec`, and the parameters of a linear target behind it.
#[repr(C)]
struct Target {
    first_sector: u64,
    sectors: u64,
    status: i32,
    /// Bytes from here to the next one.
    next: u32,
    kind: [u8; 16],
    parameters: [u8; PARAMETERS],
}

/// Bytes for the parameters of a target: two numbers of a device, and a zero. A multiple of 8.
const PARAMETERS: usize = 32;

/// A disk that joins other disks one after the other, read-only. The kernel removes it when nothing
/// has it open any more: no descriptor and no mount.
#[derive(Debug)]
pub struct JoinedDisk {
    _device: File,
    minor: u32,
    uuid: String,
}

impl JoinedDisk {
    /// Joins `parts`, block devices with their sizes in bytes. `name` is the beginning of the
    /// device's name: a number follows, as another device may have the name and still be in use.
    /// `uuid` identifies this device among all that there ever are.
    ///
    /// # Errors
    /// The kernel has no device mapper, or a part is not as large as stated.
    /// [`io::ErrorKind::InvalidInput`] for a name or `uuid` that is too long, and for a size that
    /// is not a multiple of 512.
    pub fn create(name: &str, uuid: &str, parts: &[(&Path, u64)]) -> io::Result<Self> {
        let table = table(parts)?;
        let control = File::options().read(true).write(true).open("/dev/mapper/control")?;
        let (name, minor) = create(&control, name, uuid)?;
        let open = || {
            let mut header = Header::of(&name, "", READ_ONLY)?;
            header.target_count = parts.len() as u32;
            request(&control, TABLE_LOAD, header, &table)?;
            request(&control, DEVICE_SUSPEND, Header::of(&name, "", READ_ONLY)?, &[])?;
            File::open(path(minor))
        };
        let device = open();
        // It goes with its last user, and now if it could not be opened.
        request(&control, DEVICE_REMOVE, Header::of(&name, "", DEFERRED_REMOVE)?, &[])?;
        Ok(JoinedDisk { _device: device?, minor, uuid: uuid.to_owned() })
    }

    /// The path of the device.
    pub fn path(&self) -> PathBuf {
        path(self.minor)
    }

    /// The name of the device, such as `dm-3`.
    pub fn name(&self) -> String {
        format!("dm-{}", self.minor)
    }

    /// Identifies it, see [`uuid_of`].
    pub fn uuid(&self) -> &str {
        &self.uuid
    }
}

/// Identifies the device with this name, such as `dm-3`; `None` if there is none.
pub fn uuid_of(name: &str) -> Option<String> {
    let uuid = fs::read_to_string(Path::new("/sys/block").join(name).join("dm/uuid")).ok()?;
    Some(uuid.trim_end().to_owned())
}

fn path(minor: u32) -> PathBuf {
    format!("/dev/dm-{minor}").into()
}

/// Creates a device without a table; returns its whole name, and its number.
fn create(control: &File, name: &str, uuid: &str) -> io::Result<(String, u32)> {
    for number in 0..ATTEMPTS {
        let name = format!("{name}-{number}");
        let create = || request(control, DEVICE_CREATE, Header::of(&name, uuid, READ_ONLY)?, &[]);
        let created = create().or_else(|error| {
            if error.raw_os_error() != Some(libc::EBUSY) {
                return Err(error);
            }
            // A process that was killed before it had opened its device has left it.
            request(control, DEVICE_REMOVE, Header::of(&name, "", 0)?, &[])?;
            create()
        });
        match created {
            Ok(device) => return Ok((name, minor(decode(device)))),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("{ATTEMPTS} devices named {name}")))
}

impl Header {
    fn of(name: &str, uuid: &str, flags: u32) -> io::Result<Self> {
        let mut header = Header {
            // Any 4.x kernel interface takes requests of 4.0.
            version: [4, 0, 0],
            data_size: 0,
            data_start: size_of::<Header>() as u32,
            target_count: 0,
            open_count: 0,
            flags,
            event: 0,
            padding: 0,
            device: 0,
            name: [0; NAME_SIZE],
            uuid: [0; NAME_SIZE + 1],
            data: [0; 7],
        };
        copy(name, &mut header.name)?;
        copy(uuid, &mut header.uuid)?;
        Ok(header)
    }
}

/// Copies a text into a field that ends with a zero.
fn copy(text: &str, field: &mut [u8]) -> io::Result<()> {
    let room = field.len() - 1;
    let to = field[..room].get_mut(..text.len()).ok_or(io::ErrorKind::InvalidInput)?;
    to.copy_from_slice(text.as_bytes());
    Ok(())
}

/// The linear targets that join `parts`.
fn table(parts: &[(&Path, u64)]) -> io::Result<Vec<Target>> {
    let mut first_sector = 0;
    let targets = parts.iter().map(|(path, size)| {
        let device = fs::metadata(path)?.rdev();
        if !size.is_multiple_of(SECTOR) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut target = Target {
            first_sector,
            sectors: size / SECTOR,
            status: 0,
            next: size_of::<Target>() as u32,
            kind: [0; 16],
            parameters: [0; PARAMETERS],
        };
        copy("linear", &mut target.kind)?;
        copy(&format!("{}:{} 0", major(device), minor(device)), &mut target.parameters)?;
        first_sector += target.sectors;
        Ok(target)
    });
    targets.collect()
}

/// Sends a request with the targets of a table. Returns the number of the device as the kernel
/// writes it.
fn request(control: &File, number: u8, mut header: Header, table: &[Target]) -> io::Result<u64> {
    let size = size_of::<Header>() + size_of_val(table);
    header.data_size = u32::try_from(size).map_err(io::Error::other)?;
    // Words, so that the kernel's structures are aligned in it.
    let mut buffer = vec![0_u64; size / size_of::<u64>()];
    let begin = buffer.as_mut_ptr().cast::<u8>();
    // SAFETY: needed because the kernel takes both structures in one buffer. Sound because the
    // buffer has room for both, both consist of integers without padding, and neither overlaps it.
    unsafe {
        begin.copy_from_nonoverlapping((&raw const header).cast(), size_of::<Header>());
        let behind = begin.add(size_of::<Header>());
        behind.copy_from_nonoverlapping(table.as_ptr().cast(), size_of_val(table));
    }
    let request = REQUEST | libc::Ioctl::from(number);
    // SAFETY: needed because there is no safe form. Sound because the kernel reads and writes only
    // the bytes of the buffer, whose number is in its header.
    if unsafe { libc::ioctl(control.as_raw_fd(), request, begin) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(buffer[offset_of!(Header, device) / size_of::<u64>()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_kernels() {
        assert_eq!(size_of::<Header>(), 312);
        assert_eq!(size_of::<Target>() - PARAMETERS, 40);
        assert_eq!(offset_of!(Header, device), 40);
    }

    #[test]
    fn a_table_joins_its_parts_one_after_the_other() {
        let null = Path::new("/dev/null");
        let targets = table(&[(null, 4096), (null, 8192)]).unwrap();
        let places: Vec<_> = targets.iter().map(|t| (t.first_sector, t.sectors)).collect();
        assert_eq!(places, [(0, 8), (8, 16)]);
        assert!(targets[1].parameters.starts_with(b"1:3 0\0"));
        assert!(targets[1].kind.starts_with(b"linear\0"));
        assert!(table(&[(null, 4097)]).is_err());
    }

    #[test]
    fn names_that_are_too_long_are_refused() {
        let error = |name: &str, uuid: &str| Header::of(name, uuid, 0).err().map(|e| e.kind());
        assert_eq!(error(&"x".repeat(NAME_SIZE - 1), &"x".repeat(NAME_SIZE)), None);
        assert_eq!(error(&"x".repeat(NAME_SIZE), ""), Some(io::ErrorKind::InvalidInput));
        assert_eq!(error("", &"x".repeat(NAME_SIZE + 1)), Some(io::ErrorKind::InvalidInput));
    }
}
