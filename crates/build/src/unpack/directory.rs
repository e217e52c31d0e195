//! A tree as files on this machine.
//!
//! The image is hostile, and somebody else may have the directory: every name is made in the descriptor of its parent, and parents
//! are opened by the kernel with a path that may neither leave the directory nor have a symbolic link in it.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::fs::FileExt as _,
    },
    path::Path,
};

use lazuli_image::{Inode, Kind, tree::Device};
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags,
    chmodat, chownat, linkat, makedev, mkdirat, mknodat, open, openat, openat2, setxattr,
    symlinkat, utimensat,
};

use super::{Content, Plan, UnpackError};

/// Nobody else is let in until a directory is whole.
const PRIVATE: Mode = Mode::RWXU;

/// Writes all entries into the directory `root`, which has to be empty or absent. What it has when this fails stays there.
///
/// # Errors
/// Those of `content`; an entry cannot be made.
pub fn directory<C: Content>(
    plan: &Plan<'_>,
    root: &Path,
    content: &mut C,
) -> Result<(), C::Error> {
    let mut writer = Writer { plan, root: prepare(plan, root)?, parent: None };
    for &at in &plan.bare {
        let inode = &plan.tree[plan.places[at].inode];
        if at > 0 {
            writer.at(at, |parent, name| bare(parent, name, &inode.kind))?;
        }
        if !matches!(inode.kind, Kind::Directory(_)) {
            writer.at(at, |parent, name| metadata(parent, name, inode))?;
        }
    }
    for &at in &plan.files {
        let inode = &plan.tree[plan.places[at].inode];
        let Kind::Regular { size, chunks } = &inode.kind else { continue };
        let file = writer.at(at, file)?;
        let mut offset = 0;
        for _ in chunks {
            let chunk = content.next()?;
            // What is not written is a hole.
            if chunk.iter().any(|byte| *byte != 0) {
                file.write_all_at(chunk, offset).map_err(|error| plan.error(at, error))?;
            }
            offset += chunk.len() as u64;
        }
        file.set_len(*size).map_err(|error| plan.error(at, error))?;
        writer.at(at, |parent, name| metadata(parent, name, inode))?;
    }
    for &(at, first) in &plan.links {
        let (from, name) = writer.open(first)?;
        let from = from.try_clone_to_owned().map_err(|error| plan.error(first, error))?;
        writer.at(at, |parent, new| Ok(linkat(&from, name, parent, new, AtFlags::empty())?))?;
    }
    // A directory's time changes with each entry, and its mode may forbid entries.
    for &at in plan.bare.iter().rev() {
        let inode = &plan.tree[plan.places[at].inode];
        if let Kind::Directory(_) = inode.kind {
            writer.at(at, |parent, name| metadata(parent, name, inode))?;
        }
    }
    Ok(())
}

/// Makes the directory, or makes sure that it is empty, and opens it.
fn prepare(plan: &Plan<'_>, root: &Path) -> Result<OwnedFd, UnpackError> {
    let failed = |problem: &dyn std::fmt::Display| UnpackError::Entry {
        path: root.display().to_string(),
        problem: problem.to_string(),
    };
    fs::create_dir_all(root).map_err(|error| failed(&error))?;
    if fs::read_dir(root).map_err(|error| failed(&error))?.next().is_some() {
        return Err(failed(&"is not empty; name a directory that is, or that does not exist"));
    }
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let opened = open(root, flags, Mode::empty()).map_err(|error| failed(&error))?;
    rustix::fs::fchmod(&opened, PRIVATE).map_err(|error| plan.error(0, error))?;
    Ok(opened)
}

struct Writer<'a> {
    plan: &'a Plan<'a>,
    root: OwnedFd,
    /// The directory that was used last.
    parent: Option<(usize, OwnedFd)>,
}

impl<'a> Writer<'a> {
    /// Opens the directory that holds an entry; also the entry's name there.
    fn open(&mut self, at: usize) -> Result<(BorrowedFd<'_>, &'a [u8]), UnpackError> {
        let plan = self.plan;
        let place = plan.places[at];
        // The root is `.` in itself.
        let Some(name) = place.name else { return Ok((self.root.as_fd(), b".")) };
        let known = self.parent.take().filter(|(parent, _)| *parent == place.parent);
        let parent = match known {
            Some(known) => known,
            None => {
                let path = [b"./", &plan.path(place.parent)[..]].concat();
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let resolve =
                    ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
                let opened = openat2(&self.root, path, flags, Mode::empty(), resolve);
                (place.parent, opened.map_err(|error| plan.error(place.parent, error))?)
            }
        };
        Ok((self.parent.insert(parent).1.as_fd(), name.as_bytes()))
    }

    /// Does something to an entry, in the directory that holds it.
    fn at<T>(
        &mut self,
        at: usize,
        work: impl FnOnce(BorrowedFd<'_>, &[u8]) -> io::Result<T>,
    ) -> Result<T, UnpackError> {
        let plan = self.plan;
        let (parent, name) = self.open(at)?;
        work(parent, name).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => {
                plan.error(at, format!("{error}; unpack as root, or to a tar"))
            }
            _ => plan.error(at, error),
        })
    }
}

/// Makes an entry without content.
fn bare(parent: BorrowedFd<'_>, name: &[u8], kind: &Kind) -> io::Result<()> {
    let own = Mode::RUSR | Mode::WUSR;
    let node =
        |kind, Device { major, minor }| mknodat(parent, name, kind, own, makedev(major, minor));
    let none = Device { major: 0, minor: 0 };
    match kind {
        Kind::Directory(_) => mkdirat(parent, name, PRIVATE)?,
        Kind::Regular { .. } => return file(parent, name).map(drop),
        Kind::Symlink(target) => symlinkat(&target[..], parent, name)?,
        Kind::CharDevice(device) => node(FileType::CharacterDevice, *device)?,
        Kind::BlockDevice(device) => node(FileType::BlockDevice, *device)?,
        Kind::Fifo => node(FileType::Fifo, none)?,
        Kind::Socket => node(FileType::Socket, none)?,
    }
    Ok(())
}

/// Makes an empty file.
fn file(parent: BorrowedFd<'_>, name: &[u8]) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(parent, name, flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// Owner, permissions, attributes and time, in an order in which none of them undoes another.
fn metadata(parent: BorrowedFd<'_>, name: &[u8], inode: &Inode) -> io::Result<()> {
    let metadata = &inode.metadata;
    let (user, group) = (Uid::from_raw(metadata.uid), Gid::from_raw(metadata.gid));
    chownat(parent, name, Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW)?;
    // The entry itself, whatever it is: nothing can be put in its place.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let entry = openat(parent, name, flags, Mode::empty())?;
    let entry_path = format!("/proc/self/fd/{}", entry.as_raw_fd());
    if !matches!(inode.kind, Kind::Symlink(_)) {
        let mode = Mode::from_raw_mode(metadata.permissions.into());
        chmodat(CWD, &*entry_path, mode, AtFlags::empty())?;
    }
    for (attribute, value) in &metadata.xattrs {
        setxattr(&*entry_path, &attribute[..], value, XattrFlags::empty()).map_err(|error| {
            let error = io::Error::from(error);
            let attribute = attribute.escape_ascii();
            io::Error::new(error.kind(), format!("extended attribute {attribute}: {error}"))
        })?;
    }
    let time =
        Timespec { tv_sec: metadata.mtime.seconds, tv_nsec: metadata.mtime.nanoseconds.into() };
    let times = Timestamps { last_access: time, last_modification: time };
    Ok(utimensat(parent, name, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}
