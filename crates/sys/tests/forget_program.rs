//! `forget_program` makes the process smaller, and its code still runs.

use std::fs;

fn main() {
    let before = resident_file_kilobytes();
    lazuli_sys::resident::forget_program().unwrap();
    let after = resident_file_kilobytes();
    assert!(after < before, "{after} kB of files are mapped, {before} kB were");
    assert_eq!(format!("{:?}", "still here".to_uppercase()), "\"STILL HERE\"");
}

fn resident_file_kilobytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssFile:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
