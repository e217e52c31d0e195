//! What of this process is in memory.

use std::{fs, io};

use rustix::mm::{Advice, madvise};

/// Gives the pages of program code back that this process has mapped. They stay in the page cache, where other
/// processes of the same program need them anyway, and come back one by one when they are run. For a process that
/// did much at its start and does next to nothing afterwards.
pub fn forget_code() -> io::Result<()> {
    for line in fs::read_to_string("/proc/self/maps")?.lines() {
        // 55d0c2a00000-55d0c2b00000 r-xp 00029000 fe:00 123  /usr/bin/lazuli
        let mut fields = line.split_ascii_whitespace();
        let (Some(range), Some("r-xp"), Some(path)) = (fields.next(), fields.next(), fields.nth(3))
        else {
            continue;
        };
        let address = |text: &str| usize::from_str_radix(text, 16).ok();
        let Some((start, end)) =
            range.split_once('-').and_then(|(a, b)| Some((address(a)?, address(b)?)))
        else {
            continue;
        };
        if !path.starts_with('/') {
            continue;
        }
        // SAFETY: needed because advice about memory goes by address. Sound because the range is a private mapping
        // of a file that cannot be written to, so its pages are equal to the file's and the next access maps
        // them again.
        unsafe {
            madvise(std::ptr::without_provenance_mut(start), end - start, Advice::LinuxDontNeed)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_still_runs_afterwards() {
        forget_code().unwrap();
        let text = format!("{:?}", "still here".to_uppercase());
        assert_eq!(text, "\"STILL HERE\"");
    }
}
