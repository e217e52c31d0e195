//! Answers file system requests from a bootstrap and the cache.

use std::{
    ffi::CStr,
    fs::File,
    io,
    ops::Range,
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

use fuse_backend_rs::{
    abi::fuse_abi::{Attr, stat64, statvfs64},
    api::filesystem::{
        Context, DirEntry, Entry, FileSystem, FsOptions, GetxattrReply, ListxattrReply,
        OpenOptions, ROOT_ID, ZeroCopyWriter,
    },
};
use lazuli_image::{
    BLOCK_SIZE, BlobIndex, Decoded, FormatError,
    erofs::{self, InodeView, Nid, Xattr},
    rafs::{Bootstrap, Extent},
};
use rustix::io::Errno;
use tracing::{debug, error, warn};

use super::xattr_names::{ACLS, XattrNames};

/// How long the kernel may keep names and attributes, absent names included. The image never
/// changes under a mount, so this only has to be longer than any mount lives.
pub(in crate::kernel) const FOREVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Decoded blobs, from any source.
///
/// Blocks the calling thread. Blobs are those of the bootstrap's blob table.
pub trait BlobReader: Send + Sync {
    /// Returns when every byte of `range` is in [`BlobReader::file`] and checked. An error that is
    /// not of the operating system reaches the reader as EIO. `reader` is the reading process, 0 if
    /// the kernel does not name it.
    fn ensure(&self, blob: BlobIndex, range: Range<Decoded>, reader: i32) -> io::Result<()>;

    /// The file with the decoded bytes of `blob` at their decoded addresses.
    fn file(&self, blob: BlobIndex) -> io::Result<&File>;
}

/// An image as a read-only file system.
#[derive(Debug)]
pub struct ImageFilesystem<B, R> {
    bootstrap: Arc<Bootstrap<B>>,
    blobs: R,
    /// Set when every inode has been examined.
    names: Arc<OnceLock<XattrNames>>,
    /// Whether the kernel checks ACLs, and so asks for them even where there are none. It must not
    /// get an error then.
    acls_checked: bool,
}

impl<B, R> ImageFilesystem<B, R>
where
    B: AsRef<[u8]> + Send + Sync + 'static,
{
    /// Serves `bootstrap` with file content from `blobs`. Errors when there is no root directory.
    pub fn new(bootstrap: Arc<Bootstrap<B>>, blobs: R) -> Result<Self, FormatError> {
        bootstrap.read_dir(bootstrap.root(), 0)?;
        let names = Arc::<OnceLock<_>>::default();
        let (image, found) = (bootstrap.clone(), names.clone());
        // Takes more than half a microsecond per file. The format has a flag for this, but images
        // without the flag may have attributes.
        let search = move || drop(found.set(XattrNames::of(&image)));
        if let Err(error) = thread::Builder::new().name("fuse-xattrs".to_owned()).spawn(search) {
            warn!("the kernel will ask for attributes that do not exist: {error}");
            let _ = names.set(XattrNames::default());
        }
        Ok(ImageFilesystem { bootstrap, blobs, names, acls_checked: false })
    }

    /// For a mount of a version that had the kernel check ACLs of every image.
    #[must_use]
    pub fn with_acls_checked(self) -> Self {
        ImageFilesystem { acls_checked: true, ..self }
    }
}

impl<B: AsRef<[u8]>, R: BlobReader> ImageFilesystem<B, R> {
    /// The inode with the kernel's number `node`.
    fn inode(&self, node: u64) -> io::Result<InodeView> {
        let nid = match node {
            ROOT_ID => self.bootstrap.root(),
            _ => Nid(node.wrapping_sub(NODE_BASE)),
        };
        self.bootstrap.inode(nid).map_err(damaged)
    }

    /// The kernel's number for `nid`, also shown as its inode number.
    fn node(&self, nid: Nid) -> u64 {
        if nid == self.bootstrap.root() { ROOT_ID } else { nid.0.wrapping_add(NODE_BASE) }
    }

    /// Returns whether all names of attributes are known, and there are none.
    fn has_no_xattrs(&self) -> bool {
        self.names.get().is_some_and(XattrNames::is_empty)
    }

    fn xattrs(&self, node: u64) -> io::Result<Vec<Xattr<'_>>> {
        self.bootstrap.xattrs(self.inode(node)?.nid).map_err(damaged)
    }

    fn attributes(&self, inode: &InodeView) -> stat64 {
        let seconds = inode.mtime.seconds.cast_unsigned();
        let nanoseconds = inode.mtime.nanoseconds;
        let attributes = Attr {
            ino: self.node(inode.nid),
            size: inode.size,
            blocks: inode.size.div_ceil(BLOCK_SIZE) * (BLOCK_SIZE / 512),
            atime: seconds,
            mtime: seconds,
            ctime: seconds,
            atimensec: nanoseconds,
            mtimensec: nanoseconds,
            ctimensec: nanoseconds,
            mode: inode.mode(),
            nlink: inode.nlink,
            uid: inode.uid,
            gid: inode.gid,
            rdev: inode.rdev().map_or(0, |device| device.encode()),
            blksize: BLOCK_SIZE as u32,
            flags: 0,
        };
        attributes.into()
    }

    fn entry(&self, nid: Nid) -> io::Result<Entry> {
        let inode = self.bootstrap.inode(nid).map_err(damaged)?;
        Ok(Entry {
            inode: self.node(nid),
            attr: self.attributes(&inode),
            attr_timeout: FOREVER,
            entry_timeout: FOREVER,
            ..Entry::default()
        })
    }

    /// The longest piece of the file from `offset` on that is contiguous in one blob, cut to
    /// `limit` bytes.
    fn piece(&self, file: Nid, offset: u64, limit: u64) -> Result<Option<Extent>, FormatError> {
        let Some(mut piece) = self.bootstrap.extent(file, offset)? else { return Ok(None) };
        while piece.len < limit {
            match self.bootstrap.extent(file, offset + piece.len)? {
                Some(next)
                    if next.blob == piece.blob && next.start.0 == piece.start.0 + piece.len =>
                {
                    piece.len += next.len;
                }
                _ => break,
            }
        }
        piece.len = piece.len.min(limit);
        Ok(Some(piece))
    }

    fn copy(&self, piece: Extent, writer: &mut dyn ZeroCopyWriter, reader: i32) -> io::Result<()> {
        let range = piece.start..Decoded(piece.start.0 + piece.len);
        self.blobs.ensure(piece.blob, range, reader)?;
        // The writer needs a file of its own. Duplicating the descriptor costs less than a
        // microsecond and, unlike a lock around the file, makes no reader wait for another one's
        // disk.
        let mut file = self.blobs.file(piece.blob)?.try_clone()?;
        writer.write_all_from(&mut file, piece.len as usize, piece.start.0)
    }
}

/// The first number of an inode other than the root: to the kernel, 0 means none and 1 the root.
const NODE_BASE: u64 = 2;

/// The error that a damaged bootstrap causes for readers.
fn damaged(error: FormatError) -> io::Error {
    error!("damaged bootstrap: {error}");
    Errno::IO.into()
}

/// The value when it fits, or its size when the caller asks only for that.
fn sized<T>(
    value: Vec<u8>,
    capacity: u32,
    found: fn(Vec<u8>) -> T,
    count: fn(u32) -> T,
) -> io::Result<T> {
    match value.len() {
        len if capacity == 0 => Ok(count(len as u32)),
        len if len > capacity as usize => Err(Errno::RANGE.into()),
        _ => Ok(found(value)),
    }
}

impl<B: AsRef<[u8]>, R: BlobReader> FileSystem for ImageFilesystem<B, R> {
    type Inode = u64;
    type Handle = u64;

    fn init(&self, capable: FsOptions) -> io::Result<FsOptions> {
        // open and opendir are answered with ENOSYS: with these two the kernel then stops asking
        // and keeps data and listings cached, as if each open had said so.
        let no_open = FsOptions::ZERO_MESSAGE_OPEN | FsOptions::ZERO_MESSAGE_OPENDIR;
        let cache = FsOptions::CACHE_SYMLINKS | FsOptions::EXPLICIT_INVAL_DATA;
        // Reads of up to 1 MiB, several at once for one file; look-ups in one directory in
        // parallel.
        let parallel = FsOptions::ASYNC_READ | FsOptions::PARALLEL_DIROPS | FsOptions::MAX_PAGES;
        let wanted = no_open | cache | parallel | FsOptions::DO_READDIRPLUS;
        // Permission checks look at ACLs, which makes a request of each file.
        let names = self.names.wait();
        let acls = if ACLS.iter().all(|name| names.lack(name)) {
            FsOptions::empty()
        } else {
            FsOptions::POSIX_ACL
        };
        Ok((wanted | acls) & capable)
    }

    fn lookup(&self, _: &Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        let parent = self.inode(parent)?;
        match self.bootstrap.lookup(parent.nid, name.to_bytes()).map_err(damaged)? {
            Some(nid) => self.entry(nid),
            // Inode 0 with a timeout: the kernel remembers that there is no such name.
            None => Ok(Entry { entry_timeout: FOREVER, ..Entry::default() }),
        }
    }

    /// Node numbers follow from the image, so there is nothing to forget.
    fn batch_forget(&self, _: &Context, _: Vec<(u64, u64)>) {}

    fn getattr(&self, _: &Context, node: u64, _: Option<u64>) -> io::Result<(stat64, Duration)> {
        Ok((self.attributes(&self.inode(node)?), FOREVER))
    }

    fn readlink(&self, _: &Context, node: u64) -> io::Result<Vec<u8>> {
        let inode = self.inode(node)?;
        Ok(self.bootstrap.read_link(inode.nid).map_err(damaged)?.to_vec())
    }

    fn open(
        &self,
        _: &Context,
        _: u64,
        _: u32,
        _: u32,
    ) -> io::Result<(Option<u64>, OpenOptions, Option<u32>)> {
        Err(Errno::NOSYS.into())
    }

    fn opendir(&self, _: &Context, _: u64, _: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        Err(Errno::NOSYS.into())
    }

    fn read(
        &self,
        context: &Context,
        node: u64,
        _: u64,
        writer: &mut dyn ZeroCopyWriter,
        size: u32,
        offset: u64,
        _: Option<u64>,
        _: u32,
    ) -> io::Result<usize> {
        let file = self.inode(node)?.nid;
        let size = u64::from(size).min(writer.available_bytes() as u64);
        let mut done = 0;
        while done < size {
            let Some(piece) = self.piece(file, offset + done, size - done).map_err(damaged)? else {
                break;
            };
            self.copy(piece, writer, context.pid).map_err(|failure| {
                debug!("cannot read {file} at {}: {failure}", offset + done);
                io::Error::from_raw_os_error(
                    failure.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
                )
            })?;
            done += piece.len;
        }
        Ok(done as usize)
    }

    fn readdir(
        &self,
        _: &Context,
        node: u64,
        _: u64,
        _: u32,
        offset: u64,
        add: &mut dyn FnMut(DirEntry<'_>) -> io::Result<usize>,
    ) -> io::Result<()> {
        let dir = self.inode(node)?;
        for entry in self.bootstrap.read_dir(dir.nid, offset).map_err(damaged)? {
            if add(self.listed(&entry.map_err(damaged)?))? == 0 {
                break;
            }
        }
        Ok(())
    }

    fn readdirplus(
        &self,
        _: &Context,
        node: u64,
        _: u64,
        _: u32,
        offset: u64,
        add: &mut dyn FnMut(DirEntry<'_>, Entry) -> io::Result<usize>,
    ) -> io::Result<()> {
        let dir = self.inode(node)?;
        for entry in self.bootstrap.read_dir(dir.nid, offset).map_err(damaged)? {
            let entry = entry.map_err(damaged)?;
            // The kernel takes no attributes from `.` and `..`; node 0 marks entries without any.
            let child = if entry.is_dot() { Entry::default() } else { self.entry(entry.nid)? };
            if add(self.listed(&entry), child)? == 0 {
                break;
            }
        }
        Ok(())
    }

    fn getxattr(
        &self,
        _: &Context,
        node: u64,
        name: &CStr,
        capacity: u32,
    ) -> io::Result<GetxattrReply> {
        if self.has_no_xattrs() {
            // The kernel does not ask again, for any file: ls does twice for each, and every execve
            // once.
            return Err(Errno::NOSYS.into());
        }
        let attributes = self.xattrs(node)?;
        let name = name.to_bytes();
        let found = attributes.into_iter().find(|(known, _)| known == name);
        let Some((_, value)) = found else {
            // As file systems without support for such attributes answer: ls then asks for no other
            // file.
            let unknown = self.names.get().is_some_and(|names| names.lack(name));
            let checked = self.acls_checked && ACLS.contains(&name);
            return Err(if unknown && !checked { Errno::OPNOTSUPP } else { Errno::NODATA }.into());
        };
        sized(value.to_vec(), capacity, GetxattrReply::Value, GetxattrReply::Count)
    }

    fn listxattr(&self, context: &Context, node: u64, capacity: u32) -> io::Result<ListxattrReply> {
        // An empty list, as of any file system: programs would see the error that keeps the kernel
        // from asking.
        let attributes = if self.has_no_xattrs() { Vec::new() } else { self.xattrs(node)? };
        let mut names = Vec::new();
        for (name, _) in attributes {
            // Disk file systems hide these from all but the administrator.
            if context.uid == 0 || !name.starts_with(b"trusted.") {
                names.extend_from_slice(&name);
                names.push(0);
            }
        }
        sized(names, capacity, ListxattrReply::Names, ListxattrReply::Count)
    }

    fn statfs(&self, context: &Context, node: u64) -> io::Result<statvfs64> {
        /// The crate's default reply: an otherwise empty structure that cannot be made without it.
        struct Defaults;
        impl FileSystem for Defaults {
            type Inode = u64;
            type Handle = u64;
        }
        let mut statistics = Defaults.statfs(context, node)?;
        let data: u64 = self.bootstrap.blobs().iter().map(|blob| blob.decoded_size).sum();
        statistics.f_bsize = BLOCK_SIZE;
        statistics.f_frsize = BLOCK_SIZE;
        statistics.f_blocks = (data + self.bootstrap.bytes().len() as u64).div_ceil(BLOCK_SIZE);
        statistics.f_files = self.bootstrap.inode_count();
        Ok(statistics)
    }
}

impl<B: AsRef<[u8]>, R: BlobReader> ImageFilesystem<B, R> {
    fn listed<'a>(&self, entry: &erofs::DirEntry<'a>) -> DirEntry<'a> {
        DirEntry {
            ino: self.node(entry.nid),
            offset: entry.next_offset,
            // DT_*: the type bits of the mode, shifted.
            type_: u32::from(entry.file_type.mode() >> 12),
            name: entry.name,
        }
    }
}
