//! Pages in memory, of this process and of files.

use std::{
    fs, io,
    ops::Range,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use rustix::mm::{Advice, madvise};

/// `__NR_cachestat`, the same on all architectures; Linux 6.5 and later.
const CACHESTAT: libc::c_long = 451;

/// Returns the number of pages of a part of `file` that the page cache holds, see cachestat(2).
pub fn cached_pages(file: BorrowedFd<'_>, range: Range<u64>) -> io::Result<u64> {
    if range.is_empty() {
        return Ok(0);
    }
    // struct cachestat_range { __u64 off, len; }
    let range = [range.start, range.end - range.start];
    // struct cachestat { __u64 nr_cache, nr_dirty, nr_writeback, nr_evicted, nr_recently_evicted; }
    let mut counts = [0_u64; 5];
    // SAFETY: needed because no crate wraps this call. Sound because the descriptor is open, and
    // both pointers are to memory of the size and alignment of the structures that the kernel reads
    // and writes.
    let result = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(counts[0]) }
}

/// Returns the number of pages of a part of `file` that the page cache holds and shows, see
/// mincore(2): not those that are being read at this moment. Needs to own the file, or CAP_FOWNER.
pub fn visible_pages(file: BorrowedFd<'_>, range: Range<u64>) -> io::Result<u64> {
    let (start, len) = (range.start, range.end.saturating_sub(range.start));
    let len = usize::try_from(len).map_err(io::Error::other)?;
    if len == 0 {
        return Ok(0);
    }
    let pages = len.div_ceil(rustix::param::page_size());
    let mut present = vec![0; pages];
    // SAFETY: needed because the kernel is asked by address. Sound because it chooses the address,
    // nothing is read or written through it (so it does not matter how long the file is), the
    // vector has a byte for each page, and the mapping is given back right away.
    let result = unsafe {
        let flags = rustix::mm::MapFlags::SHARED;
        let protection = rustix::mm::ProtFlags::READ;
        let map = rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, file, start)?;
        let result = libc::mincore(map, len, present.as_mut_ptr());
        let result = if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
        rustix::mm::munmap(map, len)?;
        result
    };
    result?;
    Ok(present.iter().filter(|page| **page & 1 != 0).count() as u64)
}

/// Unmaps the resident pages of this process's program files: code and constants. They stay in the
/// page cache, which other processes of the program use too, and fault in again on use. Meant for a
/// process that uses much code at its start and little afterwards.
///
/// # Errors
/// This process has several threads: another one might replace a mapping after it was read from
/// `/proc` and before it is dropped.
pub fn forget_program() -> io::Result<()> {
    if fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("this process has several threads"));
    }
    let maps = fs::read_to_string("/proc/self/smaps")?;
    let mut found = Vec::new();
    let mut mapping = None;
    for line in maps.lines() {
        if let Some(header) = header(line) {
            mapping = header;
        } else if line.strip_prefix("Anonymous:").map(kilobytes) == Some(Ok(0)) {
            found.extend(mapping.take());
        }
    }
    // Drop the ranges only after parsing, or the parser's code would fault in again.
    for (start, end) in found {
        // SAFETY: needed because advice about memory goes by address. Sound because the range is a
        // private mapping of a file that cannot be written to and has no page of its own (relocated
        // constants have), so its pages are equal to the file's and the next access maps them
        // again; and this thread, the only one as was checked above, mapped nothing since it was
        // found.
        unsafe {
            madvise(std::ptr::without_provenance_mut(start), end - start, Advice::LinuxDontNeed)?;
        }
    }
    Ok(())
}

/// The first line of a mapping; its addresses if it is of a file and cannot be written to:
/// `55d0c2a00000-55d0c2b00000 r-xp 00029000 fe:00 123  /usr/bin/lazuli`.
fn header(line: &str) -> Option<Option<(usize, usize)>> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let address = |text: &str| usize::from_str_radix(text, 16).ok();
    let range = (address(start)?, address(end)?);
    let private = matches!(fields.next()?, "r-xp" | "r--p");
    let is_file = fields.nth(3).is_some_and(|path| path.starts_with('/'));
    Some((private && is_file).then_some(range))
}

fn kilobytes(text: &str) -> Result<u64, std::num::ParseIntError> {
    text.trim().trim_end_matches(" kB").parse()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_in_a_range_of_a_file_are_counted() {
        use std::{io::Write as _, os::fd::AsFd as _};
        let mut file = tempfile::tempfile_in("/var/tmp").unwrap();
        file.write_all(&[1; 3 * 4096]).unwrap();
        for (range, expected) in
            [(0..3 * 4096, 3), (4096..4097, 1), (0..0, 0), (1 << 20..1 << 21, 0)]
        {
            assert_eq!(cached_pages(file.as_fd(), range.clone()).unwrap(), expected);
            if range.end <= 3 * 4096 {
                assert_eq!(visible_pages(file.as_fd(), range).unwrap(), expected);
            }
        }
    }

    #[test]
    fn forget_program_fails_in_a_process_of_several_threads() {
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || wait.recv());
        assert!(forget_program().unwrap_err().to_string().contains("threads"));
        drop(go);
        other.join().unwrap().unwrap_err();
    }

    #[test]
    fn only_private_read_only_file_mappings_are_dropped() {
        let line = |mode, path| format!("10-2f {mode} 00029000 fe:00 123 {path}");
        assert_eq!(header(&line("r-xp", "/bin/a b")), Some(Some((0x10, 0x2f))));
        assert_eq!(header(&line("r--p", "/bin/a")), Some(Some((0x10, 0x2f))));
        let others = ["[vdso]", ""].map(|path| line("r-xp", path));
        for other in [line("rw-p", "/bin/a"), line("r--s", "/bin/a")].into_iter().chain(others) {
            assert_eq!(header(&other), Some(None), "{other}");
        }
        assert_eq!(header("Private_Dirty:         0 kB"), None);
        assert_eq!(kilobytes("        12 kB"), Ok(12));
    }
}
