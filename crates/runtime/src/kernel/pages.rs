//! The kernel's page cache, as far as it may hold what it should not.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    ops::Range,
    os::fd::AsFd as _,
};

use rustix::fs::Advice;

/// Drops the pages of `range`, except those that a program has mapped.
pub fn forget(file: &File, range: &Range<u64>) -> io::Result<()> {
    let len = std::num::NonZeroU64::new(range.end - range.start);
    Ok(rustix::fs::fadvise(file, range.start, len, Advice::DontNeed)?)
}

/// How many pages of `range` are in memory.
pub fn count(file: &File, range: &Range<u64>) -> io::Result<u64> {
    lazuli_sys::resident::cached_pages(file.as_fd(), range.clone())
}

/// Drops the clean pages of all files of the machine, except those that a program has mapped.
pub fn forget_all() -> io::Result<()> {
    fs::write("/proc/sys/vm/drop_caches", "1")
}

/// Has the kernel reclaim all of its page cache, also what programs have mapped: they read it again when they
/// touch it. Linux 6.17 and later; earlier ones have no such file, and nothing happens.
pub fn reclaim_all() -> io::Result<()> {
    let memory = fs::read_to_string("/proc/meminfo")?;
    let total = memory.split_ascii_whitespace().nth(1).unwrap_or("0");
    for node in fs::read_dir("/sys/devices/system/node")? {
        let path = node?.path().join("reclaim");
        // Swap would only make memory of programs slow. EAGAIN: less could be reclaimed than was asked for,
        // which is all memory.
        let request = format!("{total}K swappiness=0");
        // Opened without O_CREAT, which sysfs answers with EACCES in directories that have no such file.
        let written = File::options().write(true).open(&path);
        match written.and_then(|mut file| file.write_all(request.as_bytes())) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {}
            result => result?,
        }
    }
    Ok(())
}
