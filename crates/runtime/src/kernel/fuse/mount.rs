//! Making and removing FUSE mounts, with and without privileges.

use std::{
    ffi::CString,
    fs::File,
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    process::Command,
};

use rustix::{
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, fsconfig_create, fsconfig_set_flag,
        fsconfig_set_string, fsmount, fsopen,
    },
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
};

use super::error::FuseError;
use crate::kernel::mount::{self, Suid};

/// The file system type in the mount table: `fuse.` and `SUBTYPE`.
pub const KIND: &str = "fuse.lazuli";

pub(super) const SUBTYPE: &str = "lazuli";

pub(super) fn mount_directly(
    device: &File,
    mountpoint: &Path,
    source: &str,
    suid: Suid,
) -> Result<(), FuseError> {
    let options = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions,allow_other",
        device.as_raw_fd(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    let options = CString::new(options).ok();
    let mut flags = MountFlags::RDONLY | MountFlags::NODEV;
    if suid == Suid::Ignore {
        flags |= MountFlags::NOSUID;
    }
    rustix::mount::mount(source, mountpoint, KIND, flags, options.as_deref()).map_err(|error| {
        FuseError::Mount { mountpoint: mountpoint.to_path_buf(), error: error.into() }
    })
}

/// Mounts over a mount whose connection is closed, and removes that one.
pub(super) fn replace_directly(
    device: &File,
    mountpoint: &Path,
    source: &str,
    suid: Suid,
) -> Result<(), FuseError> {
    let mut attributes = MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NODEV;
    if suid == Suid::Ignore {
        attributes |= MountAttrFlags::MOUNT_ATTR_NOSUID;
    }
    let replace = || {
        let context = create_filesystem(device, source, SUBTYPE, Writes::Refused)?;
        let mount = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        mount::replace(mountpoint, mount.as_fd())
    };
    match replace() {
        // No such calls, or not for this user.
        Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::NOSYS | Errno::PERM)) => {
            detach(mountpoint).map_err(|error| FuseError::Mount {
                mountpoint: mountpoint.to_path_buf(),
                error,
            })?;
            mount_directly(device, mountpoint, source, suid)
        }
        replaced => replaced
            .map_err(|error| FuseError::Mount { mountpoint: mountpoint.to_path_buf(), error }),
    }
}

/// How the kernel handles requests to change a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernel) enum Writes {
    /// It refuses them.
    Refused,
    /// It asks the server.
    Asked,
}

/// A file system behind `device`, as [`mount_directly`] makes it, that is not mounted yet.
pub(in crate::kernel) fn create_filesystem(
    device: &File,
    source: &str,
    subtype: &str,
    writes: Writes,
) -> io::Result<OwnedFd> {
    let context = fsopen(c"fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let options = [
        ("source", source),
        ("subtype", subtype),
        ("fd", &device.as_raw_fd().to_string()),
        ("rootmode", "40000"),
        ("user_id", &rustix::process::getuid().as_raw().to_string()),
        ("group_id", &rustix::process::getgid().as_raw().to_string()),
    ];
    for (name, value) in options {
        fsconfig_set_string(context.as_fd(), name, value)?;
    }
    if writes == Writes::Refused {
        fsconfig_set_flag(context.as_fd(), "ro")?;
    }
    for flag in ["default_permissions", "allow_other"] {
        fsconfig_set_flag(context.as_fd(), flag)?;
    }
    fsconfig_create(context.as_fd())?;
    Ok(context)
}

/// Mounts by `fusermount3`, which sends the connection back over a socket. The socket is its
/// standard input, so that no other process started meanwhile inherits it.
pub(super) fn mount_with_helper(mountpoint: &Path, source: &str) -> Result<File, FuseError> {
    let refused =
        |reason: String| FuseError::Helper { mountpoint: mountpoint.to_path_buf(), reason };
    let (ours, theirs) = UnixStream::pair().map_err(|error| refused(error.to_string()))?;
    // Commas separate options; `fusermount3` takes a backslash as quoting the next byte.
    let source = source.replace('\\', r"\\").replace(',', r"\,");
    let output = Command::new("fusermount3")
        .arg("-o")
        .arg(format!("ro,default_permissions,subtype={SUBTYPE},fsname={source}"))
        .arg("--")
        .arg(mountpoint)
        .env("_FUSE_COMMFD", "0")
        .stdin(OwnedFd::from(theirs))
        .output()
        .map_err(|error| refused(error.to_string()))?;
    if !output.status.success() {
        return Err(refused(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(&ours, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(|error| refused(error.to_string()))?;
    let received = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    received.map(File::from).ok_or_else(|| refused("it sent no connection".to_owned()))
}

/// Unmounts `mountpoint`, with the available privileges.
///
/// # Errors
/// [`io::ErrorKind::ResourceBusy`] while it is in use.
pub(super) fn unmount(mountpoint: &Path) -> io::Result<()> {
    match mount::unmount(mountpoint) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            remove_with_helper(mountpoint, &[])
        }
        result => result,
    }
}

/// Detaches the mount at `mountpoint`, with the available privileges.
pub fn detach(mountpoint: &Path) -> io::Result<()> {
    match mount::detach(mountpoint) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            remove_with_helper(mountpoint, &["-z"])
        }
        result => result,
    }
}

fn remove_with_helper(mountpoint: &Path, options: &[&str]) -> io::Result<()> {
    let mut command = Command::new("fusermount3");
    command.arg("-u").args(options).arg("--").arg(mountpoint).env("LC_ALL", "C");
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    // Only the helper's text tells: umount2 answers EPERM to this user before it looks whether the
    // mount is in use, and a mount that stays in the mount table may stay for another reason.
    Err(match said.contains("busy") {
        true => io::Error::new(io::ErrorKind::ResourceBusy, said),
        false => io::Error::other(said),
    })
}
