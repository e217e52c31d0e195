//! The kernel's page cache: what it has of files, and how it drops that.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    ops::Range,
    os::fd::AsFd as _,
    path::Path,
    time::Duration,
};

use rustix::fs::Advice;

/// A start counts as over when no reader has had to wait for this long. Readers of a complete image
/// never wait; few such starts take longer. Until then the page cache has most of what is read, and
/// a direct read would go to the disk all the same.
pub const START: Duration = Duration::from_secs(30);

/// Drops the pages of `range`, except those that a program has mapped.
pub fn forget(file: &File, range: &Range<u64>) -> io::Result<()> {
    let len = std::num::NonZeroU64::new(range.end - range.start);
    Ok(rustix::fs::fadvise(file, range.start, len, Advice::DontNeed)?)
}

/// Returns the number of pages of `range` that are in memory and can be read there; not those that
/// are just being read from the file below.
pub fn visible(file: &File, range: &Range<u64>) -> io::Result<u64> {
    lazuli_sys::resident::visible_pages(file.as_fd(), range.clone())
}

/// Returns the number of pages of `range` that are in memory, including those that are just being
/// read.
pub fn count(file: &File, range: &Range<u64>) -> io::Result<u64> {
    lazuli_sys::resident::cached_pages(file.as_fd(), range.clone())
}

/// Drops the clean pages of all files of the machine, except those that a program has mapped.
pub fn forget_all() -> io::Result<()> {
    fs::write("/proc/sys/vm/drop_caches", "1")
}

/// Makes the kernel reclaim all of its page cache, even pages that programs have mapped; they fault
/// in again on access. Linux 6.17 and later; earlier kernels lack the file, and nothing happens.
pub fn reclaim_all() -> io::Result<()> {
    // The kernel does nothing while less than this share of the memory is page cache that no
    // process has mapped.
    let threshold = Path::new("/proc/sys/vm/min_unmapped_ratio");
    let before = fs::read(threshold).ok();
    if before.is_some() {
        write(threshold, "0")?;
    }
    let result = reclaim_nodes();
    if let Some(before) = before {
        fs::write(threshold, before)?;
    }
    result
}

fn reclaim_nodes() -> io::Result<()> {
    // As much as there is now: on a busy machine, reclaimed pages come back as fast.
    let memory = fs::read_to_string("/proc/meminfo")?;
    let of_files = |line: &str| {
        let (name, size) = line.split_once(':')?;
        let kilobytes = size.trim().strip_suffix(" kB")?.parse::<u64>().ok()?;
        name.ends_with("(file)").then_some(kilobytes)
    };
    let total: u64 = memory.lines().filter_map(of_files).sum();
    for node in fs::read_dir("/sys/devices/system/node")? {
        // The condition "less" fails if there is no page cache at all: reading this program
        // provides some.
        fs::read("/proc/self/exe")?;
        // Swap would only make memory of programs slow. EAGAIN: less could be reclaimed than was
        // asked for.
        match write(&node?.path().join("reclaim"), &format!("{total}K swappiness=0")) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {}
            result => result?,
        }
    }
    Ok(())
}

/// Writes to an existing file: sysfs answers O_CREAT with EACCES for a missing one.
fn write(path: &Path, text: &str) -> io::Result<()> {
    File::options().write(true).open(path)?.write_all(text.as_bytes())
}
