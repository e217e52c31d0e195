//! The `User` of an image config, looked up in the image's own `/etc/passwd` and `/etc/group`.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use anyhow::{Context, Result, bail};
use rustix::{
    fs::{CWD, Mode, OFlags, ResolveFlags},
    io::Errno,
};

/// The user of the container's process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
    pub(crate) home: String,
}

/// `/etc/passwd` may be this long; the rest is not read.
const DATABASE_LIMIT: u64 = 4 << 20;

impl User {
    /// Resolves `user`, `uid`, `user:group`, `uid:gid` or nothing (root) in the tree at `rootfs`.
    pub(crate) fn resolve(spec: &str, rootfs: &Path) -> Result<Self> {
        let passwd = database(rootfs, "etc/passwd")?;
        let group = database(rootfs, "etc/group")?;
        Self::parse(spec, &passwd, &group)
    }

    fn parse(spec: &str, passwd: &str, group: &str) -> Result<Self> {
        let (name, group_name) = match spec.split_once(':') {
            Some((name, group_name)) => (name, Some(group_name)),
            None => (spec, None),
        };
        let name = if name.is_empty() { "0" } else { name };
        let number = name.parse::<u32>().ok();
        let entry = records(passwd).find(|fields| {
            fields[0] == name || number.is_some_and(|uid| field(fields, 2) == Some(uid))
        });
        let uid = match (&entry, number) {
            (Some(fields), _) => field(fields, 2).with_context(|| {
                format!("the entry of user `{name}` in the image's /etc/passwd is damaged")
            })?,
            (None, Some(uid)) => uid,
            (None, None) => {
                bail!("the image runs as user `{name}`, but its /etc/passwd has no such user")
            }
        };
        let login = entry.as_ref().map(|fields| fields[0]);
        let (gid, groups) = match group_name {
            Some(group_name) => (find_group(group_name, group)?, Vec::new()),
            None => {
                let gid = entry.as_ref().and_then(|fields| field(fields, 3)).unwrap_or(0);
                let member = |fields: &Vec<&str>| {
                    let members = fields.get(3).copied().unwrap_or_default();
                    login.is_some_and(|login| members.split(',').any(|m| m == login))
                };
                (
                    gid,
                    records(group).filter(member).filter_map(|fields| field(&fields, 2)).collect(),
                )
            }
        };
        let home = entry.as_ref().and_then(|fields| fields.get(5)).copied().unwrap_or_default();
        let home = if home.is_empty() { "/" } else { home }.to_owned();
        Ok(User { uid, gid, groups, home })
    }
}

fn find_group(name: &str, group: &str) -> Result<u32> {
    let number = name.parse::<u32>().ok();
    match records(group).find(|fields| fields[0] == name) {
        Some(fields) => field(&fields, 2).with_context(|| {
            format!("the entry of group `{name}` in the image's /etc/group is damaged")
        }),
        None => number.with_context(|| {
            format!("the image runs as group `{name}`, but its /etc/group has no such group")
        }),
    }
}

fn records(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().map(|line| line.split(':').collect())
}

fn field(fields: &[&str], index: usize) -> Option<u32> {
    fields.get(index)?.parse().ok()
}

/// Reads a file of the image without leaving `rootfs`, whatever its symbolic links are.
fn database(rootfs: &Path, path: &str) -> Result<String> {
    let context = || format!("cannot read /{path} of the image");
    let root = rustix::fs::openat(CWD, rootfs, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .with_context(context)?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = match rustix::fs::openat2(root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(String::new()),
        Err(error) => return Err(io::Error::from(error)).with_context(context),
    };
    let mut bytes = Vec::new();
    file.take(DATABASE_LIMIT).read_to_end(&mut bytes).with_context(context)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\npostgres:x:101:102::/var/lib/pg:/bin/sh\n";
    const GROUP: &str = "root:x:0:\nssl:x:103:other,postgres\npostgres:x:102:\n";

    #[test]
    fn every_form_of_a_user_is_understood() {
        let cases: [(&str, u32, u32, &[u32], &str); 7] = [
            ("", 0, 0, &[], "/root"),
            ("postgres", 101, 102, &[103], "/var/lib/pg"),
            ("101", 101, 102, &[103], "/var/lib/pg"),
            ("postgres:ssl", 101, 103, &[], "/var/lib/pg"),
            ("1234", 1234, 0, &[], "/"),
            ("1234:5678", 1234, 5678, &[], "/"),
            ("0:102", 0, 102, &[], "/root"),
        ];
        for (spec, uid, gid, groups, home) in cases {
            let expected = User { uid, gid, groups: groups.to_vec(), home: home.to_owned() };
            assert_eq!(User::parse(spec, PASSWD, GROUP).unwrap(), expected, "{spec}");
        }
        for spec in ["nobody", "root:nogroup", "-1"] {
            assert!(User::parse(spec, PASSWD, GROUP).is_err(), "{spec}");
        }
    }

    #[test]
    fn never_reads_outside_the_image() {
        let rootfs = tempfile::tempdir().unwrap();
        std::fs::create_dir(rootfs.path().join("etc")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", rootfs.path().join("etc/group")).unwrap();
        std::os::unix::fs::symlink("../../../../etc/hostname", rootfs.path().join("etc/passwd"))
            .unwrap();
        assert_eq!(database(rootfs.path(), "etc/passwd").unwrap(), "");
    }
}
