//! What is mounted, by `/proc/self/mountinfo` and by statx(2).

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStringExt as _,
    path::{Path, PathBuf},
};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};

/// One mount of this process's namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Number of the mount; no two mounts at a time have the same.
    pub id: u64,
    /// The mountpoint.
    pub target: PathBuf,
    /// `erofs`, `fuse.lazuli`, ….
    pub kind: String,
    /// The mounted device or file: for EROFS the bootstrap.
    pub source: PathBuf,
}

/// Lists all mounts in mounting order: the last mount on a target covers the others.
pub fn list() -> io::Result<Vec<MountEntry>> {
    let text = fs::read("/proc/self/mountinfo")?;
    Ok(text.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

/// The number of the mount that is seen at a place, the last one made there, if the place is one.
/// Neither its file system nor the list of all mounts is asked.
pub fn id_at(path: &Path) -> io::Result<Option<u64>> {
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::MNT_ID)?;
    Ok(found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT).then_some(found.stx_mnt_id))
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`; the fields after the sixth
/// vary in number up to the dash.
fn parse(line: &[u8]) -> Option<MountEntry> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let dash = fields.iter().position(|field| *field == b"-")?;
    let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    let path = |field: &[u8]| PathBuf::from(OsString::from_vec(unescape(field)));
    Some(MountEntry {
        id: text(fields.first()?).parse().ok()?,
        target: path(fields.get(4)?),
        kind: text(fields.get(dash + 1)?),
        source: path(fields.get(dash + 2)?),
    })
}

/// Decodes a path of a kernel list, which writes space, tab, newline and backslash as a backslash
/// and three octal digits.
pub fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        let digits = tail.get(..3).filter(|digits| digits.iter().all(|d| (b'0'..b'8').contains(d)));
        match (first, digits) {
            (b'\\', Some(digits)) => {
                let value = digits.iter().fold(0_u32, |value, d| value * 8 + u32::from(d - b'0'));
                bytes.push(value as u8);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_parsed_and_malformed_lines_are_skipped() {
        let line =
            b"36 35 0:42 / /a\\040b\\134c\\9 rw,noatime master:1 shared:2 - erofs /x\\012y ro";
        let expected = MountEntry {
            id: 36,
            target: "/a b\\c\\9".into(),
            kind: "erofs".into(),
            source: "/x\ny".into(),
        };
        assert_eq!(parse(line), Some(expected));
        for line in [&b""[..], b"36 35", b"36 35 0:42 / /a rw -", b"x 35 0:42 / /a rw - a b c"] {
            assert_eq!(parse(line), None, "{}", line.escape_ascii());
        }
    }

    #[test]
    fn a_mount_is_found_by_its_place_alone() {
        let root = Path::new("/");
        let listed = list().unwrap().into_iter().rfind(|mount| mount.target == root).unwrap();
        assert_eq!(id_at(root).unwrap(), Some(listed.id));
        assert_eq!(id_at(Path::new("/proc/self")).unwrap(), None);
        assert!(id_at(Path::new("/proc/self/missing")).is_err());
    }
}
