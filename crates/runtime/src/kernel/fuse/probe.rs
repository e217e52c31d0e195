//! Probes FUSE on this machine.

use std::{
    fs::File,
    io,
    os::fd::{AsFd as _, BorrowedFd},
};

use rustix::io::Errno;

use super::mount::{SUBTYPE, Writes, create_filesystem};

/// Returns whether this driver works here.
pub(in crate::kernel) fn run() -> Result<(), String> {
    match File::options().read(true).write(true).open("/dev/fuse") {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("/dev/fuse does not open: {error}")),
    }
}

/// Makes the kernel send all requests again that were read from the connection and not answered.
/// The message is a `struct fuse_out_header` (length, code, 0) with code `FUSE_NOTIFY_RESEND`,
/// known to Linux 6.9 and later.
pub(super) fn resend(device: BorrowedFd<'_>) -> io::Result<()> {
    const FUSE_NOTIFY_RESEND: i32 = 7;
    let mut message = [0; 16];
    message[..4].copy_from_slice(&16_u32.to_ne_bytes());
    message[4..8].copy_from_slice(&FUSE_NOTIFY_RESEND.to_ne_bytes());
    rustix::io::write(device, &message)?;
    Ok(())
}

/// Returns whether this kernel can send requests again, see
/// [`Session::resume`](super::Session::resume). Tries it on a mount that is attached nowhere, which
/// needs root.
pub fn can_resend() -> io::Result<bool> {
    let device = File::options().read(true).write(true).open("/dev/fuse")?;
    let context = create_filesystem(&device, "trial", SUBTYPE, Writes::Refused)?;
    let resent = resend(device.as_fd());
    drop(context);
    match resent {
        Ok(()) => Ok(true),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => Ok(false),
        Err(error) => Err(error),
    }
}
