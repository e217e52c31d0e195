//! Attributes of a mount that is attached nowhere yet: mount_setattr(2), Linux 5.12.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
};

/// Disables set-user-id bits and file capabilities in `tree`.
///
/// # Errors
/// `tree` is no mount, or this process may not change it.
pub fn ignore_suid(tree: BorrowedFd<'_>) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_NOSUID,
        attr_clr: 0,
        propagation: 0,
        userns_fd: 0,
    };
    // SAFETY: needed because rustix has no mount_setattr. Sound because the path is an empty C
    // string, and the kernel reads as many bytes of `attributes` as it is said to have, during the
    // call only.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
