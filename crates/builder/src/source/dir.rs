//! A directory tree as a layer. Symbolic links are never followed; holes read as zeros.
//!
//! The upper directory of an overlayfs is one with marks: see [`marks`](super::marks).

use std::{
    collections::HashMap,
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read},
    os::unix::{
        ffi::{OsStrExt as _, OsStringExt as _},
        fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
};

use lazuli_image::{Metadata, Mtime, tree::Device};

use super::{ReadError, TOO_MANY_CHUNKS, marks, tar::check_xattr};
use crate::{
    chunk::{CutError, Cutter},
    entry::{Entry, EntryKind, EntryPath},
    error::SourceError,
};

/// The role of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// An ordinary file tree.
    Tree,
    /// The upper directory of an overlayfs, whose marks hide entries of lower layers.
    Upper,
}

/// Reads everything below `root`: all entries of a directory in byte order of their names, then
/// each subdirectory the same way, so that files that lie together are fetched together.
pub(crate) fn read(
    root: &Path,
    role: Role,
    cutter: &mut Cutter<'_>,
    on_read: &dyn Fn(u64),
) -> Result<Vec<Entry>, ReadError> {
    let (links, entries) = (HashMap::new(), Vec::new());
    let mut walk = Walk { root, role, cutter, on_read, links, entries };
    let metadata = fs::symlink_metadata(root).map_err(walk.failed(root))?;
    if !metadata.is_dir() {
        return Err(walk.failed(root)(io::ErrorKind::NotADirectory.into()).into());
    }
    walk.entry(EntryPath::default(), root, &metadata)?;
    // Directories that are still to be listed, the next one last.
    let mut todo = vec![EntryPath::default()];
    while let Some(directory) = todo.pop() {
        let mut subdirectories = walk.list(&directory)?;
        subdirectories.reverse();
        todo.append(&mut subdirectories);
    }
    Ok(walk.entries)
}

struct Walk<'a, 'b> {
    root: &'a Path,
    role: Role,
    cutter: &'a mut Cutter<'b>,
    on_read: &'a dyn Fn(u64),
    /// First path of every file with several names, by device and inode number.
    links: HashMap<(u64, u64), EntryPath>,
    entries: Vec<Entry>,
}

impl Walk<'_, '_> {
    fn failed(&self, path: &Path) -> impl FnOnce(io::Error) -> SourceError + use<> {
        let path = path.to_owned();
        |problem| SourceError::File { path, problem }
    }

    fn on_disk(&self, path: &EntryPath) -> PathBuf {
        self.root.join(OsStr::from_bytes(path.as_bytes()))
    }

    /// Reads the entries of one directory and returns its subdirectories, both in order.
    fn list(&mut self, directory: &EntryPath) -> Result<Vec<EntryPath>, ReadError> {
        let on_disk = self.on_disk(directory);
        let names = fs::read_dir(&on_disk).and_then(|entries| {
            entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()
        });
        let mut names = names.map_err(self.failed(&on_disk))?;
        names.sort_unstable();
        let mut subdirectories = Vec::new();
        for name in names {
            let on_disk = on_disk.join(&name);
            let path = directory.join(name.as_bytes()).map_err(|problem| {
                self.failed(&on_disk)(io::Error::new(io::ErrorKind::InvalidInput, problem))
            })?;
            let metadata = fs::symlink_metadata(&on_disk).map_err(self.failed(&on_disk))?;
            if metadata.is_dir() {
                subdirectories.push(path.clone());
            }
            self.entry(path, &on_disk, &metadata)?;
        }
        Ok(subdirectories)
    }

    fn entry(
        &mut self,
        path: EntryPath,
        on_disk: &Path,
        found: &fs::Metadata,
    ) -> Result<(), ReadError> {
        let metadata = Metadata {
            permissions: (found.mode() & 0o7777) as u16,
            uid: found.uid(),
            gid: found.gid(),
            mtime: Mtime { seconds: found.mtime(), nanoseconds: found.mtime_nsec() as u32 },
            xattrs: Default::default(),
        };
        let mut entry = Entry { path, offset: 0, metadata, kind: EntryKind::Directory };
        if self.role == Role::Upper && found.file_type().is_char_device() && found.rdev() == 0 {
            // Overlayfs makes one such device and many names for it.
            entry.metadata = Metadata::default();
            entry.kind = EntryKind::Whiteout;
            self.entries.push(entry);
            return Ok(());
        }
        if !found.is_dir() && found.nlink() > 1 {
            let first =
                self.links.entry((found.dev(), found.ino())).or_insert_with(|| entry.path.clone());
            if *first != entry.path {
                entry.kind = EntryKind::HardLink(first.clone());
                self.entries.push(entry);
                return Ok(());
            }
        }
        self.xattrs(on_disk, &mut entry.metadata)?;
        if self.role == Role::Upper {
            let marks = marks::take(&mut entry.metadata.xattrs);
            let marks = marks.map_err(|problem| self.failed(on_disk)(io::Error::other(problem)))?;
            if marks.opaque {
                // Hide the lower entry, whether it is a directory or not.
                let (path, metadata) = (entry.path.clone(), Metadata::default());
                self.entries.push(Entry { path, offset: 0, metadata, kind: EntryKind::Whiteout });
            }
        }
        entry.kind = self.kind(on_disk, found)?;
        self.entries.push(entry);
        Ok(())
    }

    fn kind(&mut self, on_disk: &Path, found: &fs::Metadata) -> Result<EntryKind, ReadError> {
        let kind = found.file_type();
        let device = Device { major: libc::major(found.rdev()), minor: libc::minor(found.rdev()) };
        Ok(if kind.is_dir() {
            EntryKind::Directory
        } else if kind.is_symlink() {
            let target = fs::read_link(on_disk).map_err(self.failed(on_disk))?;
            EntryKind::Symlink(target.into_os_string().into_vec().into())
        } else if kind.is_file() {
            self.regular(on_disk)?
        } else if kind.is_char_device() {
            EntryKind::CharDevice(device)
        } else if kind.is_block_device() {
            EntryKind::BlockDevice(device)
        } else if kind.is_fifo() {
            EntryKind::Fifo
        } else {
            EntryKind::Socket
        })
    }

    fn regular(&mut self, on_disk: &Path) -> Result<EntryKind, ReadError> {
        let mut open = fs::OpenOptions::new();
        open.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = open.open(on_disk).map_err(self.failed(on_disk))?;
        let size = file.metadata().map_err(self.failed(on_disk))?.len();
        let mut content = Counted { file: &file, on_read: self.on_read };
        let chunks = self.cutter.cut(size, &mut content).map_err(|error| match error {
            CutError::Read(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let problem = format!("became shorter than {size} bytes while it was read");
                self.failed(on_disk)(io::Error::new(error.kind(), problem)).into()
            }
            CutError::Read(error) => self.failed(on_disk)(error).into(),
            CutError::TooMany => self.failed(on_disk)(io::Error::other(TOO_MANY_CHUNKS)).into(),
            CutError::Stopped => ReadError::Stopped,
        })?;
        Ok(EntryKind::Regular { size, chunks })
    }

    fn xattrs(&self, on_disk: &Path, metadata: &mut Metadata) -> Result<(), SourceError> {
        let names = match xattr::list(on_disk) {
            Ok(names) => names,
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => return Ok(()),
            Err(error) => return Err(self.failed(on_disk)(error)),
        };
        for name in names {
            let value = xattr::get(on_disk, &name).map_err(self.failed(on_disk))?;
            // `None`: removed since the attributes were listed.
            let Some(value) = value else { continue };
            check_xattr(name.as_bytes(), &value)
                .map_err(|problem| self.failed(on_disk)(io::Error::other(problem)))?;
            metadata.xattrs.insert(name.as_bytes().into(), value.into());
        }
        Ok(())
    }
}

/// A file that counts bytes as they are read.
struct Counted<'a> {
    file: &'a File,
    on_read: &'a dyn Fn(u64),
}

impl Read for Counted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        (self.on_read)(count as u64);
        Ok(count)
    }
}
