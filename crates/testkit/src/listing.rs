//! A directory tree as text, to compare the contents of two file systems.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::CStr,
    fmt::{self, Write as _},
    fs::{self, File},
    io::{self, Read},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use lazuli_image::Algorithm;
use rustix::{
    fs::{FileType, Stat, lgetxattr, llistxattr, lstat, major, minor},
    io::Errno,
};

/// Differences that [`diff`] shows before it only counts.
const SHOWN: usize = 20;

/// Everything that a reader can see of a tree: one line per entry, sorted by path.
///
/// A line holds type, mode, owner, time to the nanosecond and extended attributes, and depending on
/// the type also size and SHA-256, link target, or device number. Entries that are hard links of
/// each other name the first path of their group. Sizes of directories are left out, since each
/// file system has its own, and so is `security.selinux`, which the machine adds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    entries: BTreeMap<Vec<u8>, String>,
}

impl Listing {
    /// The description of one path (`/` for the root, `/a/b` below).
    pub fn get(&self, path: &[u8]) -> Option<&str> {
        self.entries.get(path).map(String::as_str)
    }

    /// Paths in order, `/` first.
    pub fn paths(&self) -> impl Iterator<Item = &[u8]> {
        self.entries.keys().map(Vec::as_slice)
    }

    /// Number of entries, the root included.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True only for a listing that no directory made.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl fmt::Display for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.entries
            .iter()
            .try_for_each(|(path, entry)| writeln!(f, "{} {entry}", path.escape_ascii()))
    }
}

/// Lists the directory `root`, reading every file in it. Errors name the path.
pub fn list(root: &Path) -> io::Result<Listing> {
    let mut listing = Listing::default();
    let mut groups = HashMap::new();
    // Children are pushed in reverse order, so that the walk is in order of path and the first path
    // of a hard-link group is the same on every file system.
    let mut pending = vec![(b"/".to_vec(), root.to_path_buf())];
    while let Some((path, at)) = pending.pop() {
        let named =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", at.display()));
        let stat = lstat(&at).map_err(|error| named(error.into()))?;
        let entry = describe(&path, &at, &stat, &mut groups).map_err(named)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            let mut names = fs::read_dir(&at)
                .and_then(|found| {
                    found.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()
                })
                .map_err(named)?;
            names.sort_unstable_by(|a, b| b.cmp(a));
            let parent = if path == b"/" { &[][..] } else { &path };
            pending.extend(
                names.iter().map(|name| ([parent, b"/", name.as_bytes()].concat(), at.join(name))),
            );
        }
        listing.entries.insert(path, entry);
    }
    Ok(listing)
}

/// First path seen of each file that has several, by device and inode number.
type Groups = HashMap<(u64, u64), Vec<u8>>;

fn describe(path: &[u8], at: &Path, stat: &Stat, groups: &mut Groups) -> io::Result<String> {
    let kind = FileType::from_raw_mode(stat.st_mode);
    let name = match kind {
        FileType::Directory => "dir",
        FileType::RegularFile => "file",
        FileType::Symlink => "symlink",
        FileType::CharacterDevice => "char",
        FileType::BlockDevice => "block",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
        FileType::Unknown => "unknown",
    };
    let mut line = format!(
        "{name} {:04o} {}:{} {}.{:09}",
        stat.st_mode & 0o7777,
        stat.st_uid,
        stat.st_gid,
        stat.st_mtime,
        stat.st_mtime_nsec
    );
    match kind {
        FileType::RegularFile => {
            let _ = write!(line, " size={} {}", stat.st_size, content(at)?);
        }
        FileType::Symlink => {
            let target = fs::read_link(at)?;
            let target = target.as_os_str().as_bytes();
            let _ = write!(line, " size={} -> {}", stat.st_size, target.escape_ascii());
        }
        FileType::CharacterDevice | FileType::BlockDevice => {
            let _ = write!(line, " {}:{}", major(stat.st_rdev), minor(stat.st_rdev));
        }
        _ => {}
    }
    for (name, value) in xattrs(at)? {
        let _ = write!(line, " {}=", name.escape_ascii());
        for byte in value {
            let _ = write!(line, "{byte:02x}");
        }
    }
    if kind != FileType::Directory && stat.st_nlink > 1 {
        let first = groups.entry((stat.st_dev, stat.st_ino)).or_insert_with(|| path.to_vec());
        let _ = write!(line, " links={} of {}", stat.st_nlink, first.escape_ascii());
    }
    Ok(line)
}

fn content(at: &Path) -> io::Result<lazuli_image::Digest> {
    let mut file = File::open(at)?;
    let mut hasher = Algorithm::Sha256.hasher();
    let mut buffer = vec![0; 1 << 18];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finish()),
            length => hasher.update(&buffer[..length]),
        }
    }
}

/// Extended attributes of `at` itself, even if it is a symbolic link; empty where they don't exist.
pub(crate) fn xattrs(at: &Path) -> io::Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    // XATTR_LIST_MAX and XATTR_SIZE_MAX.
    let mut buffer = vec![0_u8; 1 << 16];
    let names = match llistxattr(at, &mut buffer) {
        Ok(length) => buffer[..length].to_vec(),
        Err(Errno::OPNOTSUPP) => return Ok(BTreeMap::new()),
        Err(error) => return Err(error.into()),
    };
    let mut found = BTreeMap::new();
    for name in names.split_inclusive(|byte| *byte == 0) {
        let name = CStr::from_bytes_with_nul(name).map_err(io::Error::other)?;
        if name.to_bytes() != b"security.selinux" {
            let length = lgetxattr(at, name, &mut buffer)?;
            found.insert(name.to_bytes().to_vec(), buffer[..length].to_vec());
        }
    }
    Ok(found)
}

/// Compares two listings; the error shows the first differences, `-` for `a` and `+` for `b`.
pub fn diff(a: &Listing, b: &Listing) -> Result<(), String> {
    let mut paths: Vec<_> = a.paths().chain(b.paths()).collect();
    paths.sort_unstable();
    paths.dedup();
    paths.retain(|path| a.get(path) != b.get(path));
    if paths.is_empty() {
        return Ok(());
    }
    let mut report = format!("{} of {} entries differ:\n", paths.len(), a.len().max(b.len()));
    for path in paths.iter().take(SHOWN) {
        for (sign, side) in [('-', a), ('+', b)] {
            if let Some(entry) = side.get(path) {
                let _ = writeln!(report, "{sign} {} {entry}", path.escape_ascii());
            }
        }
    }
    if paths.len() > SHOWN {
        let _ = writeln!(report, "… and {} more", paths.len() - SHOWN);
    }
    Err(report)
}

/// Lists both directories and compares them, see [`diff`].
///
/// # Panics
/// When they differ or cannot be read.
pub fn assert_equal(a: impl Into<PathBuf>, b: impl Into<PathBuf>) {
    let [a, b] = [a.into(), b.into()].map(|root| list(&root).expect("a readable tree"));
    if let Err(report) = diff(&a, &b) {
        panic!("{report}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_trees_are_equal_and_each_change_shows() {
        let make = || {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("d")).unwrap();
            fs::write(dir.path().join("d/file"), "content").unwrap();
            fs::hard_link(dir.path().join("d/file"), dir.path().join("d/again")).unwrap();
            std::os::unix::fs::symlink("file", dir.path().join("d/link")).unwrap();
            for path in ["d/file", "d/link", "d", "."] {
                let time = rustix::fs::Timespec { tv_sec: -5, tv_nsec: 7 };
                let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
                let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
                rustix::fs::utimensat(rustix::fs::CWD, dir.path().join(path), &times, flags)
                    .unwrap();
            }
            dir
        };
        let (one, other) = (make(), make());
        let listing = list(one.path()).unwrap();
        assert_eq!(diff(&listing, &list(other.path()).unwrap()), Ok(()));
        let again = listing.get(b"/d/again").unwrap();
        assert!(
            again.contains(" -5.000000007 ") && again.ends_with(" links=2 of /d/again"),
            "{again}"
        );
        assert_eq!(listing.get(b"/d/file").unwrap(), again);

        fs::write(other.path().join("d/file"), "CONTENT").unwrap();
        let report = diff(&listing, &list(other.path()).unwrap()).unwrap_err();
        assert!(report.starts_with("2 of 5 entries differ"), "{report}");
        fs::remove_file(other.path().join("d/link")).unwrap();
        let report = diff(&listing, &list(other.path()).unwrap()).unwrap_err();
        assert!(report.contains("- /d/link symlink"), "{report}");
    }
}
