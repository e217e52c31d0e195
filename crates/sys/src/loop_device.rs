//! Loop devices: files that the kernel reads as disks, see `include/uapi/linux/loop.h`.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd},
    path::PathBuf,
};

const CTL_GET_FREE: libc::Ioctl = 0x4c82;
const GET_STATUS64: libc::Ioctl = 0x4c05;
const CHANGE_FD: libc::Ioctl = 0x4c06;
const SET_DIRECT_IO: libc::Ioctl = 0x4c08;
const CONFIGURE: libc::Ioctl = 0x4c0a;

const READ_ONLY: u32 = 1;
/// The kernel detaches the file when the last user closes the device.
const AUTOCLEAR: u32 = 4;
const DIRECT_IO: u32 = 16;

/// Bytes of the longest label.
pub const LABEL_SIZE: usize = 63;

/// Attempts to attach a free device: other programs may take each one first.
const ATTEMPTS: usize = 64;

/// `struct loop_info64`.
#[repr(C)]
struct Info {
    device: u64,
    inode: u64,
    real_device: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encryption: [u32; 2],
    flags: u32,
    file_name: [u8; LABEL_SIZE + 1],
    crypt_name: [u8; 64],
    key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct Config {
    file: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

impl Info {
    const EMPTY: Info = Info {
        device: 0,
        inode: 0,
        real_device: 0,
        offset: 0,
        size_limit: 0,
        number: 0,
        encryption: [0; 2],
        flags: 0,
        file_name: [0; LABEL_SIZE + 1],
        crypt_name: [0; 64],
        key: [0; 32],
        init: [0; 2],
    };
}

/// A loop device in use. The kernel frees it when nothing has it open any more: no descriptor and
/// no mount.
#[derive(Debug)]
pub struct LoopDevice {
    device: File,
    number: u32,
}

/// The backing file of a loop device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// The device number of the file's file system, as stat(2) shows it.
    pub device: u64,
    /// The file's inode number.
    pub inode: u64,
    /// The label that the device's creator has set.
    pub label: Vec<u8>,
    /// Whether the device reads past the page cache of the file.
    pub is_direct: bool,
}

impl LoopDevice {
    /// Attaches `file` as a read-only disk with logical blocks of `block_size` bytes, with direct
    /// I/O where the file system of `file` supports it. The disk has whole blocks only, so the size
    /// of the file should be a multiple.
    ///
    /// The kernel may call into the file's file system, and this call blocks until it answers.
    ///
    /// # Errors
    /// No loop devices here, or none is free. [`io::ErrorKind::InvalidInput`] for a label that is
    /// too long.
    pub fn attach(file: BorrowedFd<'_>, label: &str, block_size: u32) -> io::Result<Self> {
        let mut info = Info { flags: READ_ONLY | AUTOCLEAR | DIRECT_IO, ..Info::EMPTY };
        let name = info.file_name[..LABEL_SIZE].get_mut(..label.len());
        name.ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(label.as_bytes());
        let file = file.as_raw_fd().cast_unsigned();
        let config = Config { file, block_size, info, reserved: [0; 8] };
        let control = File::options().read(true).write(true).open("/dev/loop-control")?;
        let mut attempts = 0;
        loop {
            let number = ioctl(control.as_fd(), CTL_GET_FREE, 0)?.cast_unsigned();
            let device = File::open(path(number))?;
            // SAFETY: needed because the kernel reads a structure. Sound because it is laid out as
            // the kernel declares it, and is read during the call only.
            let configured =
                unsafe { libc::ioctl(device.as_raw_fd(), CONFIGURE, &raw const config) };
            if configured == 0 {
                return Ok(LoopDevice { device, number });
            }
            let error = io::Error::last_os_error();
            attempts += 1;
            // Another program was faster.
            if error.raw_os_error() != Some(libc::EBUSY) || attempts == ATTEMPTS {
                return Err(error);
            }
        }
    }

    /// The device of this number, which another process may have attached.
    pub fn open(number: u32) -> io::Result<Self> {
        Ok(LoopDevice { device: File::open(path(number))?, number })
    }

    /// A device that another process has opened.
    pub fn from_file(device: File, number: u32) -> Self {
        LoopDevice { device, number }
    }

    /// The number in the device's name.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The path of the device.
    pub fn path(&self) -> PathBuf {
        path(self.number)
    }

    /// Returns the backing file. Fails with `ENXIO` when there is none.
    pub fn backing(&self) -> io::Result<Backing> {
        let mut info = Info::EMPTY;
        // SAFETY: needed because the kernel writes a structure. Sound because it is laid out as the
        // kernel declares it, and every bit pattern is a value of its fields.
        let result = unsafe { libc::ioctl(self.device.as_raw_fd(), GET_STATUS64, &raw mut info) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        let end = info.file_name.iter().position(|byte| *byte == 0).unwrap_or(LABEL_SIZE);
        Ok(Backing {
            device: decode(info.device),
            inode: info.inode,
            label: info.file_name[..end].to_vec(),
            is_direct: info.flags & DIRECT_IO != 0,
        })
    }

    /// Replaces the backing file by another one of the same size while the device is in use. Waits,
    /// uninterruptibly, for reads that have begun.
    pub fn change(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        ioctl(self.device.as_fd(), CHANGE_FD, file.as_raw_fd().into())?;
        // The kernel switches direct I/O off when a backing file does not support it, and does not
        // switch it on again for the next file.
        if !self.backing()?.is_direct {
            // Fails where the file system cannot do it.
            let _ = self.read_directly(true);
        }
        Ok(())
    }

    /// Makes the device read past the page cache of the backing file, or through it. Waits for
    /// reads that have begun.
    pub fn read_directly(&self, is_direct: bool) -> io::Result<()> {
        ioctl(self.device.as_fd(), SET_DIRECT_IO, is_direct.into()).map(drop)
    }
}

impl AsFd for LoopDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

fn path(number: u32) -> PathBuf {
    format!("/dev/loop{number}").into()
}

/// Decodes a device number in the kernel's own form, as loop devices and the device mapper show it:
/// minor 0 to 7, major 8 to 19, the rest of minor.
pub(crate) fn decode(device: u64) -> u64 {
    let (major, minor) = ((device >> 8) & 0xfff, (device & 0xff) | ((device >> 12) & 0xfff_ff00));
    rustix::fs::makedev(major as u32, minor as u32)
}

fn ioctl(file: BorrowedFd<'_>, request: libc::Ioctl, argument: i64) -> io::Result<i32> {
    // SAFETY: needed because there is no safe form. Sound because the requests of this file that
    // come here take a number, and no address.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request, argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, os::unix::fs::MetadataExt as _, time::Duration};

    use super::*;

    fn disk(size: usize, byte: u8) -> File {
        let mut file = tempfile::tempfile_in("/var/tmp").unwrap();
        file.write_all(&vec![byte; size]).unwrap();
        file.sync_all().unwrap();
        file
    }

    #[expect(clippy::print_stderr, reason = "says what was skipped")]
    fn able() -> bool {
        let able = rustix::process::geteuid().is_root()
            && File::options().read(true).write(true).open("/dev/loop-control").is_ok();
        if !able {
            eprintln!("skipped: needs root and loop devices");
        }
        able
    }

    #[test]
    fn structures_have_the_sizes_of_the_kernels() {
        assert_eq!((size_of::<Info>(), size_of::<Config>()), (232, 304));
    }

    #[test]
    fn a_backing_file_is_replaced_only_by_one_of_the_same_size() {
        if !able() {
            return;
        }
        let (one, two, longer) = (disk(8192, 1), disk(8192, 2), disk(12288, 3));
        let device = LoopDevice::attach(one.as_fd(), "lazuli-test", 4096).unwrap();
        let again = LoopDevice::open(device.number()).unwrap();
        let shown = |file: &File| {
            let metadata = file.metadata().unwrap();
            let backing = again.backing().unwrap();
            assert_eq!(backing.label, b"lazuli-test");
            (backing.device, backing.inode) == (metadata.dev(), metadata.ino())
        };
        assert!(shown(&one));
        assert_eq!(std::fs::read(device.path()).unwrap(), [1; 8192]);
        assert!(device.change(longer.as_fd()).is_err());
        assert!(shown(&one));
        device.change(two.as_fd()).unwrap();
        assert!(shown(&two));
        drop(device);
        drop(again);
    }

    #[test]
    fn a_device_is_free_after_its_last_user_closes_it() {
        if !able() {
            return;
        }
        let file = disk(4096, 1);
        let device = LoopDevice::attach(file.as_fd(), "lazuli-test", 4096).unwrap();
        let (number, label) = (device.number(), "x".repeat(LABEL_SIZE + 1));
        assert!(LoopDevice::attach(file.as_fd(), &label, 4096).is_err());
        drop(device);
        let metadata = file.metadata().unwrap();
        let own =
            |backing: Backing| (backing.device, backing.inode) == (metadata.dev(), metadata.ino());
        // Other programs that look at new disks may have it open for a moment.
        for _ in 0..500 {
            let backing = LoopDevice::open(number).and_then(|device| device.backing());
            if !backing.is_ok_and(own) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("loop{number} is still in use");
    }
}
