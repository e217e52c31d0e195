//! Descriptors that a process starts with.

use std::{
    env, io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

use rustix::io::{FdFlags, fcntl_setfd};

/// The first descriptor that systemd passes, see sd_listen_fds(3).
const FIRST_PASSED: i32 = 3;

/// Takes the descriptors that systemd passes to a service, with their names: the sockets it listens
/// on, and descriptors that an earlier process of the service stored. Empty when systemd did not
/// start this process.
///
/// # Errors
/// The environment names descriptors that are not open.
///
/// # Panics
/// When it is called twice: each descriptor has one owner.
pub fn descriptors() -> io::Result<Vec<(String, OwnedFd)>> {
    use std::sync::atomic::{AtomicBool, Ordering};
    static TAKEN: AtomicBool = AtomicBool::new(false);
    assert!(!TAKEN.swap(true, Ordering::Relaxed), "inherited descriptors were taken before");
    let number = |name: &str| env::var(name).ok()?.parse::<u32>().ok();
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Ok(Vec::new());
    }
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let count = number("LISTEN_FDS").and_then(|count| i32::try_from(count).ok()).unwrap_or(0);
    (FIRST_PASSED..FIRST_PASSED.saturating_add(count))
        .map(|number| {
            // Nothing is owned before it is known to be open.
            std::fs::symlink_metadata(format!("/proc/self/fd/{number}"))?;
            // SAFETY: needed to own a descriptor that the parent process opened. Sound because it
            // is open, the protocol of sd_listen_fds says that it is ours, and this code runs once.
            let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
            fcntl_setfd(&descriptor, FdFlags::CLOEXEC)?;
            debug_assert_eq!(descriptor.as_raw_fd(), number);
            Ok((names.next().unwrap_or("unknown").to_owned(), descriptor))
        })
        .collect()
}
