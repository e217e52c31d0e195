//! Disk usage of a snapshot's files.

use std::{
    collections::HashSet,
    ffi::OsStr,
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use lazuli_sys::path_error::At as _;
use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, open, openat2, statat},
    io::Errno,
};

use crate::{SnapshotError, directories::is_gone, store::Usage};

/// Adds up the tree at `root`, hard links once. The container may change it meanwhile: symbolic
/// links are not followed, and files that disappear or lie deeper than the maximum path length are
/// skipped.
pub(crate) fn of(root: &Path) -> Result<Usage, SnapshotError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = open(root, flags, Mode::empty()).at(root)?;
    let mut tally = Tally::default();
    tally.add(&fstat(&top).at(root)?);
    let mut directories = vec![PathBuf::from(".")];
    while let Some(path) = directories.pop() {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let directory = match openat2(&top, &path, flags, Mode::empty(), resolve) {
            Err(Errno::LOOP | Errno::NAMETOOLONG) => continue,
            Err(error) if is_gone(&error.into()) => continue,
            other => other.at(root.join(&path))?,
        };
        let entries = Dir::read_from(&directory).map_err(io::Error::from);
        for entry in entries.at(root.join(&path))? {
            let entry = entry.at(root.join(&path))?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let inner = path.join(OsStr::from_bytes(name.to_bytes()));
            let stat = match statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(error) if is_gone(&error.into()) => continue,
                other => other.at(root.join(&inner))?,
            };
            if tally.add(&stat) && FileType::from_raw_mode(stat.st_mode).is_dir() {
                directories.push(inner);
            }
        }
    }
    Ok(tally.usage)
}

#[derive(Default)]
struct Tally {
    usage: Usage,
    /// Devices and inodes.
    seen: HashSet<(u64, u64)>,
}

impl Tally {
    /// Records a file. Returns whether it was not seen before.
    fn add(&mut self, stat: &Stat) -> bool {
        let new = self.seen.insert((stat.st_dev, stat.st_ino));
        if new {
            self.usage.inodes += 1;
            // stat(2) counts in units of 512 bytes, whatever the file system's block is.
            self.usage.size += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn every_kind_of_file_is_counted() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        fs::write(root.join("file"), [0; 10_000]).unwrap();
        fs::hard_link(root.join("file"), root.join("again")).unwrap();
        symlink("/", root.join("everything")).unwrap();
        fs::create_dir_all(root.join("a/b")).unwrap();
        let usage = of(root).unwrap();
        assert_eq!(usage.inodes, 5);
        assert!((10_000..1_000_000).contains(&usage.size), "{usage:?}");
    }
}
