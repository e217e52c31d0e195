//! A tree as files on this machine.
//!
//! The image is hostile, and other programs may change the directory: every entry is made in the
//! descriptor of its parent, and parents are opened by the kernel with a path that may neither
//! leave the directory nor have a symbolic link in it.

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

use super::{ChunkSource, EntryOrder, UnpackError};

/// Only the owner may enter a directory until it is complete.
const PRIVATE: Mode = Mode::RWXU;

/// Writes all entries into the directory `root`, which must be empty or absent. After an error,
/// entries already written remain.
///
/// # Errors
/// Those of `content`; an entry cannot be made.
pub fn directory<C: ChunkSource>(
    order: &EntryOrder<'_>,
    root: &Path,
    content: &mut C,
) -> Result<(), C::Error> {
    let mut writer = Writer { order, root: prepare(order, root)?, parent: None };
    for (at, place) in order.places.iter().enumerate().skip(1) {
        let inode = order.inode(at);
        if place.first != at {
            writer.link(at, place.first)?;
            continue;
        }
        match &inode.kind {
            Kind::Regular { size, chunks } => {
                let file = writer.at(at, file)?;
                let mut offset = 0;
                for _ in chunks {
                    let chunk = content.next()?;
                    // Skipped zeros become a hole.
                    if chunk.iter().any(|byte| *byte != 0) {
                        file.write_all_at(chunk, offset).map_err(|error| order.error(at, error))?;
                    }
                    offset += chunk.len() as u64;
                }
                file.set_len(*size).map_err(|error| order.error(at, error))?;
            }
            kind => writer.at(at, |parent, name| bare(parent, name, kind))?,
        }
        if !matches!(inode.kind, Kind::Directory(_)) {
            writer.at(at, |parent, name| metadata(parent, name, inode))?;
        }
    }
    // A directory's time changes with each entry, and its mode may forbid entries.
    for (at, inode) in order.inodes().rev() {
        if let Kind::Directory(_) = inode.kind {
            writer.at(at, |parent, name| metadata(parent, name, inode))?;
        }
    }
    Ok(())
}

/// Makes the directory, or makes sure that it is empty, and opens it.
fn prepare(order: &EntryOrder<'_>, root: &Path) -> Result<OwnedFd, UnpackError> {
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
    rustix::fs::fchmod(&opened, PRIVATE).map_err(|error| order.error(0, error))?;
    Ok(opened)
}

struct Writer<'a> {
    order: &'a EntryOrder<'a>,
    root: OwnedFd,
    /// The directory that was used last.
    parent: Option<(usize, OwnedFd)>,
}

impl<'a> Writer<'a> {
    /// Opens the directory that holds an entry; also the entry's name there.
    fn open(&mut self, at: usize) -> Result<(BorrowedFd<'_>, &'a [u8]), UnpackError> {
        let order = self.order;
        let place = order.places[at];
        // The root is `.` in itself.
        let Some(name) = place.name else { return Ok((self.root.as_fd(), b".")) };
        let known = self.parent.take().filter(|(parent, _)| *parent == place.parent);
        let parent = match known {
            Some(known) => known,
            None => {
                let path = [b"./", &order.path(place.parent)[..]].concat();
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let resolve =
                    ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
                let opened = openat2(&self.root, path, flags, Mode::empty(), resolve);
                (place.parent, opened.map_err(|error| order.error(place.parent, error))?)
            }
        };
        Ok((self.parent.insert(parent).1.as_fd(), name.as_bytes()))
    }

    /// Makes another name of the file at `first`.
    fn link(&mut self, at: usize, first: usize) -> Result<(), UnpackError> {
        let order = self.order;
        let (from, name) = self.open(first)?;
        let from = from.try_clone_to_owned().map_err(|error| order.error(first, error))?;
        self.at(at, |parent, new| Ok(linkat(&from, name, parent, new, AtFlags::empty())?))
    }

    /// Does something to an entry, in the directory that holds it.
    fn at<T>(
        &mut self,
        at: usize,
        work: impl FnOnce(BorrowedFd<'_>, &[u8]) -> io::Result<T>,
    ) -> Result<T, UnpackError> {
        let order = self.order;
        let (parent, name) = self.open(at)?;
        work(parent, name).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => {
                order.error(at, format!("{error}; unpack as root, or to a tar"))
            }
            _ => order.error(at, error),
        })
    }
}

/// Makes an entry that is no file.
fn bare(parent: BorrowedFd<'_>, name: &[u8], kind: &Kind) -> io::Result<()> {
    let own = Mode::RUSR | Mode::WUSR;
    let node =
        |kind, Device { major, minor }| mknodat(parent, name, kind, own, makedev(major, minor));
    let none = Device { major: 0, minor: 0 };
    match kind {
        Kind::Directory(_) => mkdirat(parent, name, PRIVATE)?,
        Kind::Regular { .. } => drop(file(parent, name)?),
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

/// Sets owner, permissions, attributes and time, in an order in which none resets another.
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

#[cfg(test)]
mod tests {
    use std::{
        fs::Permissions,
        os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    };

    use lazuli_image::{BlobIndex, ChunkRef, Metadata, Name, Tree};

    use super::*;

    /// Provides one chunk, and meanwhile replaces a directory by a symbolic link.
    struct Swap<'a>(&'a Path, &'a Path);

    impl ChunkSource for Swap<'_> {
        type Error = UnpackError;

        fn next(&mut self) -> Result<&[u8], UnpackError> {
            fs::rename(self.0.join("d"), self.0.join("away"))?;
            symlink(self.1, self.0.join("d"))?;
            Ok(b"x")
        }
    }

    #[test]
    fn symbolic_links_lead_nowhere() {
        let metadata = Metadata {
            permissions: 0o777,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            ..Metadata::default()
        };
        let mut tree = Tree::new(metadata.clone());
        let mut at = Tree::ROOT;
        let chunks = vec![ChunkRef { blob: BlobIndex(0), number: 0 }];
        let kinds = [
            ("d", Kind::Directory(Default::default())),
            ("n", Kind::Directory(Default::default())),
            ("f", Kind::Regular { size: 1, chunks }),
        ];
        for (name, kind) in kinds {
            let id = tree.add(Inode { metadata: metadata.clone(), kind });
            tree.children_mut(at).unwrap().insert(Name::new(name.as_bytes()).unwrap(), id);
            at = id;
        }
        let scratch = tempfile::tempdir().unwrap();
        let (root, outside) = (scratch.path().join("root"), scratch.path().join("outside"));
        fs::create_dir_all(outside.join("n")).unwrap();
        fs::set_permissions(outside.join("n"), Permissions::from_mode(0o700)).unwrap();
        let order = EntryOrder::new(&tree);
        let error = directory(&order, &root, &mut Swap(&root, &outside)).unwrap_err();
        assert!(error.to_string().contains("/d"), "{error}");
        assert_eq!(fs::read_dir(outside.join("n")).unwrap().count(), 0);
        assert_eq!(fs::metadata(outside.join("n")).unwrap().mode() & 0o777, 0o700);
        assert_eq!(fs::read(root.join("away/n/f")).unwrap(), b"x");
    }
}
