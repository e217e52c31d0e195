//! Disks for virtual machines: the kernel that reads an image is a guest's.
//!
//! A FUSE file system shows an image as files that a machine monitor opens as disks. `disk` has
//! everything, `bootstrap` and `blob-N` are consecutive pieces of it, so a monitor can pass one
//! disk, several, or join them. Sessions, their connections and journals are those of the driver
//! [`fuse`](super::fuse).

use std::{
    ffi::CStr,
    io::{self, Read as _},
    ops::Range,
    sync::Arc,
    time::Duration,
};

use fuse_backend_rs::{
    abi::fuse_abi::{Attr, stat64},
    api::filesystem::{
        Context, DirEntry, Entry, FileSystem, FsOptions, ListxattrReply, OpenOptions, ROOT_ID,
        ZeroCopyWriter,
    },
};
use lazuli_image::{BLOCK_SIZE, BlobIndex, Decoded, FormatError, erofs::FileType, rafs::Bootstrap};
use rustix::io::Errno;
use tracing::debug;

use super::fuse::{BlobReader, FOREVER};

/// Unit of the size of `disk`: memory devices of guests (virtio-pmem) consist of pages of 2 MiB.
const DISK_ALIGN: u64 = 2 << 20;

/// The node of the first file. The root directory is 1.
const FIRST: u64 = ROOT_ID + 1;

/// An image as files that are disks.
#[derive(Debug)]
pub struct DiskFilesystem<B, R> {
    bootstrap: Arc<Bootstrap<B>>,
    blobs: R,
    /// Where each blob begins on the disk with everything.
    addresses: Vec<u64>,
    files: Vec<DiskFile>,
}

/// A file: a piece of the disk with everything.
#[derive(Debug, PartialEq, Eq)]
struct DiskFile {
    name: String,
    range: Range<u64>,
}

impl<B: AsRef<[u8]>, R> DiskFilesystem<B, R> {
    /// Serves `bootstrap` with content from `blobs`.
    ///
    /// # Errors
    /// Its device table has no place for the blobs on one disk.
    pub fn new(bootstrap: Arc<Bootstrap<B>>, blobs: R) -> Result<Self, FormatError> {
        let addresses = bootstrap.disk_addresses()?;
        let last = bootstrap.blobs().last().map(|blob| blob.decoded_size);
        let end = match (addresses.last(), last) {
            (Some(address), Some(size)) => address + size,
            _ => bootstrap.bytes().len() as u64,
        };
        let files = files(&addresses, end.next_multiple_of(DISK_ALIGN));
        Ok(DiskFilesystem { bootstrap, blobs, addresses, files })
    }
}

fn files(addresses: &[u64], end: u64) -> Vec<DiskFile> {
    let file = |name: String, range| DiskFile { name, range };
    let first = addresses.first().copied().unwrap_or(end);
    let mut files = vec![file("disk".to_owned(), 0..end), file("bootstrap".to_owned(), 0..first)];
    for (index, start) in addresses.iter().enumerate() {
        let next = addresses.get(index + 1).copied().unwrap_or(end);
        files.push(file(format!("blob-{}", index + 1), *start..next));
    }
    files
}

impl<B: AsRef<[u8]>, R: BlobReader> DiskFilesystem<B, R> {
    fn file(&self, node: u64) -> Option<&DiskFile> {
        self.files.get(usize::try_from(node.checked_sub(FIRST)?).ok()?)
    }

    fn attributes(&self, node: u64) -> io::Result<stat64> {
        let mode = |kind: FileType, permissions: u32| u32::from(kind.mode()) | permissions;
        let (mode, size) = match self.file(node) {
            Some(DiskFile { range, .. }) => {
                (mode(FileType::Regular, 0o400), range.end - range.start)
            }
            None if node == ROOT_ID => (mode(FileType::Directory, 0o500), 0),
            None => return Err(Errno::NOENT.into()),
        };
        let attributes = Attr {
            ino: node,
            size,
            blocks: size / 512,
            mode,
            nlink: 1,
            // Whoever may read a disk may read all files on it.
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            blksize: BLOCK_SIZE as u32,
            ..Attr::default()
        };
        Ok(attributes.into())
    }

    fn entry(&self, node: u64) -> io::Result<Entry> {
        Ok(Entry {
            inode: node,
            attr: self.attributes(node)?,
            attr_timeout: FOREVER,
            entry_timeout: FOREVER,
            ..Entry::default()
        })
    }

    /// The content at `address` of the disk with everything, and its length.
    fn piece(&self, address: u64) -> (Content, u64) {
        let after = self.addresses.partition_point(|start| *start <= address);
        let end = self.addresses.get(after).copied().unwrap_or(u64::MAX);
        let (content, rest) = match after.checked_sub(1) {
            None => (
                Content::Bootstrap(address),
                (self.bootstrap.bytes().len() as u64).saturating_sub(address),
            ),
            Some(index) => {
                let at = address - self.addresses[index];
                let size = self.bootstrap.blobs()[index].decoded_size;
                // A device table has 254 places.
                (Content::Blob(BlobIndex(index as u8), Decoded(at)), size.saturating_sub(at))
            }
        };
        if rest == 0 { (Content::Gap, end - address) } else { (content, rest) }
    }

    fn copy(
        &self,
        content: Content,
        len: u64,
        writer: &mut dyn ZeroCopyWriter,
        reader: i32,
    ) -> io::Result<()> {
        match content {
            Content::Bootstrap(at) => {
                writer.write_all(&self.bootstrap.bytes()[at as usize..(at + len) as usize])
            }
            Content::Blob(blob, at) => {
                self.blobs.ensure(blob, at..Decoded(at.0 + len), reader)?;
                // The writer needs a file of its own.
                let mut file = self.blobs.file(blob)?.try_clone()?;
                writer.write_all_from(&mut file, len as usize, at.0)
            }
            Content::Gap => io::copy(&mut io::repeat(0).take(len), writer).map(drop),
        }
    }
}

/// What is at an address of the disk with everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// From this byte on.
    Bootstrap(u64),
    /// From this byte on.
    Blob(BlobIndex, Decoded),
    /// Zeros.
    Gap,
}

impl<B, R> FileSystem for DiskFilesystem<B, R>
where
    B: AsRef<[u8]> + Send + Sync + 'static,
    R: BlobReader,
{
    type Inode = u64;
    type Handle = u64;

    fn init(&self, capable: FsOptions) -> io::Result<FsOptions> {
        let no_open = FsOptions::ZERO_MESSAGE_OPEN | FsOptions::ZERO_MESSAGE_OPENDIR;
        let wanted = no_open | FsOptions::EXPLICIT_INVAL_DATA | FsOptions::ASYNC_READ;
        Ok((wanted | FsOptions::MAX_PAGES) & capable)
    }

    fn lookup(&self, _: &Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        let is_it = |file: &DiskFile| file.name.as_bytes() == name.to_bytes();
        match self.files.iter().position(is_it).filter(|_| parent == ROOT_ID) {
            Some(index) => self.entry(FIRST + index as u64),
            None => Err(Errno::NOENT.into()),
        }
    }

    fn batch_forget(&self, _: &Context, _: Vec<(u64, u64)>) {}

    fn getattr(&self, _: &Context, node: u64, _: Option<u64>) -> io::Result<(stat64, Duration)> {
        Ok((self.attributes(node)?, FOREVER))
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
        let Range { start, end } = self.file(node).ok_or(Errno::ISDIR)?.range.clone();
        let size = u64::from(size).min(writer.available_bytes() as u64);
        let start = start.saturating_add(offset).min(end);
        let end = end.min(start + size);
        let mut address = start;
        while address < end {
            let (content, rest) = self.piece(address);
            let len = rest.min(end - address);
            self.copy(content, len, writer, context.pid).map_err(|failure| {
                debug!("cannot read {content:?}: {failure}");
                let number = failure.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
                io::Error::from_raw_os_error(number)
            })?;
            address += len;
        }
        Ok((end - start) as usize)
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
        if node != ROOT_ID {
            return Err(Errno::NOTDIR.into());
        }
        let dots = [".", ".."].map(|name| (ROOT_ID, name, FileType::Directory));
        let files = self.files.iter().zip(FIRST..);
        let files = files.map(|(file, node)| (node, file.name.as_str(), FileType::Regular));
        let all = dots.into_iter().chain(files).zip(1..).skip(offset as usize);
        for ((ino, name, kind), offset) in all {
            // DT_*: the type bits of the mode, shifted.
            let type_ = u32::from(kind.mode() >> 12);
            if add(DirEntry { ino, offset, type_, name: name.as_bytes() })? == 0 {
                break;
            }
        }
        Ok(())
    }

    fn listxattr(&self, _: &Context, _: u64, capacity: u32) -> io::Result<ListxattrReply> {
        Ok(match capacity {
            0 => ListxattrReply::Count(0),
            _ => ListxattrReply::Names(Vec::new()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_consecutive_pieces_of_one_disk() {
        let shown = |addresses: &[u64], end| {
            let files = files(addresses, end).into_iter();
            files.map(|file| (file.name, file.range)).collect::<Vec<_>>()
        };
        let file = |name: &str, range| (name.to_owned(), range);
        assert_eq!(shown(&[], 4), [file("disk", 0..4), file("bootstrap", 0..4)]);
        let expected = [
            file("disk", 0..9),
            file("bootstrap", 0..2),
            file("blob-1", 2..5),
            file("blob-2", 5..9),
        ];
        assert_eq!(shown(&[2, 5], 9), expected);
    }
}
