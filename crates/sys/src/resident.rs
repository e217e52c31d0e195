//! What of this process is in memory.

use std::{fs, io};

use rustix::mm::{Advice, madvise};

/// Gives the pages of program files back that this process has mapped, code and constants. They stay in the page
/// cache, where other processes of the same program need them anyway, and come back one by one when they are used. For
/// a process that did much at its start and does next to nothing afterwards.
pub fn forget_program() -> io::Result<()> {
    let maps = fs::read_to_string("/proc/self/smaps")?;
    let mut mapping = None;
    for line in maps.lines() {
        if let Some(header) = header(line) {
            mapping = header;
            continue;
        }
        let Some(Ok(0)) = line.strip_prefix("Anonymous:").map(kilobytes) else { continue };
        let Some((start, end)) = mapping.take() else { continue };
        // SAFETY: needed because advice about memory goes by address. Sound because the range is a private mapping
        // of a file that cannot be written to and has no page of its own (relocated constants have), so its
        // pages are equal to the file's and the next access maps them again.
        unsafe {
            madvise(std::ptr::without_provenance_mut(start), end - start, Advice::LinuxDontNeed)?;
        }
    }
    Ok(())
}

/// The first line of a mapping; its addresses if it is of a file and nobody can write to it:
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
    fn knows_what_it_can_map_again() {
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

    #[test]
    fn code_still_runs_afterwards() {
        forget_program().unwrap();
        let text = format!("{:?}", "still here".to_uppercase());
        assert_eq!(text, "\"STILL HERE\"");
    }
}
