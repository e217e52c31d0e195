//! Answers file system requests with what [`Layers`] knows.

use std::{ffi::CStr, io, sync::Arc, time::Duration};

use fuse_backend_rs::{
    abi::fuse_abi::{Attr, CreateIn, stat64},
    api::filesystem::{
        Context, DirEntry, Entry, FileSystem, FsOptions, ListxattrReply, OpenOptions, ROOT_ID,
        ZeroCopyWriter,
    },
};
use lazuli_image::{BLOCK_SIZE, erofs::FileType};
use rustix::io::Errno;

use super::{
    Layers,
    names::{self, LayerFile, LayerName, Node, Numbers},
};

/// Name of the file whose creation counts a user of the layer.
const USE: &[u8] = b"use";

/// The kernel keeps nothing: a layer that could not be shown a moment ago may be now, and the other
/// way round.
const NEVER: Duration = Duration::ZERO;

/// See the module above.
pub(super) struct LayerFilesystem<L> {
    pub(super) layers: Arc<L>,
    pub(super) numbers: Numbers,
}

type Created = (Entry, Option<u64>, OpenOptions, Option<u32>);

impl<L: Layers> LayerFilesystem<L> {
    /// The node with the kernel's number, other than the root.
    fn node(&self, number: u64) -> io::Result<Node> {
        Ok(self.numbers.node(number).ok_or(Errno::STALE)?)
    }

    fn attributes(&self, number: u64, node: Option<&Node>) -> io::Result<stat64> {
        let size = |size: Option<u64>| size.ok_or(Errno::NOENT);
        let (kind, permissions, size) = match node {
            Some(Node::File(layer, LayerFile::Blob)) => {
                (FileType::Regular, 0o400, size(self.layers.stored_size(layer))?)
            }
            Some(Node::File(layer, LayerFile::Info)) => {
                let info = self.layers.info(layer).map(|info| info.len() as u64);
                (FileType::Regular, 0o400, size(info)?)
            }
            Some(Node::File(_, LayerFile::Diff)) => (FileType::Symlink, 0o777, 0),
            None | Some(Node::Image(_) | Node::Layer(_)) => (FileType::Directory, 0o700, 0),
        };
        let attributes = Attr {
            ino: number,
            size,
            blocks: size.div_ceil(512),
            mode: u32::from(kind.mode()) | permissions,
            nlink: 1,
            blksize: BLOCK_SIZE as u32,
            ..Attr::default()
        };
        Ok(attributes.into())
    }

    fn entry(&self, node: Node) -> io::Result<Entry> {
        let number = self.numbers.number(node.clone());
        let attr = self.attributes(number, Some(&node))?;
        let (attr_timeout, entry_timeout) = (NEVER, NEVER);
        Ok(Entry { inode: number, attr, attr_timeout, entry_timeout, ..Entry::default() })
    }

    /// The layer with this name in the directory of an image.
    fn layer_in(&self, parent: u64, name: &CStr) -> io::Result<LayerName> {
        let Node::Image(image) = self.node(parent)? else { return Err(Errno::NOENT.into()) };
        let layer = names::layer(name.to_bytes()).ok_or(Errno::NOENT)?;
        Ok(LayerName { image, layer })
    }

    fn file_in(&self, layer: LayerName, name: &CStr) -> io::Result<Entry> {
        let file = LayerFile::parse(name.to_bytes()).ok_or(Errno::NOENT)?;
        // Nothing is said of a layer that may not be shown any more.
        if self.layers.diff(&layer).is_none() {
            return Err(Errno::NOENT.into());
        }
        self.entry(Node::File(layer, file))
    }
}

impl<L: Layers> FileSystem for LayerFilesystem<L> {
    type Inode = u64;
    type Handle = u64;

    fn init(&self, capable: FsOptions) -> io::Result<FsOptions> {
        let no_open = FsOptions::ZERO_MESSAGE_OPEN | FsOptions::ZERO_MESSAGE_OPENDIR;
        let parallel = FsOptions::ASYNC_READ | FsOptions::PARALLEL_DIROPS | FsOptions::MAX_PAGES;
        Ok((no_open | parallel) & capable)
    }

    fn lookup(&self, _: &Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        if parent == ROOT_ID {
            let image = names::image(name.to_bytes()).ok_or(Errno::NOENT)?;
            return self.entry(Node::Image(image));
        }
        match self.node(parent)? {
            Node::Image(_) => {
                let layer = self.layer_in(parent, name)?;
                match self.layers.exists(&layer) {
                    true => self.entry(Node::Layer(layer)),
                    false => Err(Errno::NOENT.into()),
                }
            }
            Node::Layer(layer) => self.file_in(layer, name),
            Node::File(..) => Err(Errno::NOTDIR.into()),
        }
    }

    /// Numbers follow from names, so there is nothing to forget.
    fn batch_forget(&self, _: &Context, _: Vec<(u64, u64)>) {}

    fn getattr(&self, _: &Context, node: u64, _: Option<u64>) -> io::Result<(stat64, Duration)> {
        let known = match node {
            ROOT_ID => None,
            number => Some(self.node(number)?),
        };
        Ok((self.attributes(node, known.as_ref())?, NEVER))
    }

    fn readlink(&self, _: &Context, node: u64) -> io::Result<Vec<u8>> {
        let Node::File(layer, LayerFile::Diff) = self.node(node)? else {
            return Err(Errno::INVAL.into());
        };
        let target = self.layers.diff(&layer).ok_or(Errno::NOENT)?;
        Ok(target.into_os_string().into_encoded_bytes())
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
        _: &Context,
        node: u64,
        _: u64,
        writer: &mut dyn ZeroCopyWriter,
        size: u32,
        offset: u64,
        _: Option<u64>,
        _: u32,
    ) -> io::Result<usize> {
        let Node::File(layer, file) = self.node(node)? else { return Err(Errno::ISDIR.into()) };
        let size = u64::from(size).min(writer.available_bytes() as u64);
        let part = |whole: u64| offset.min(whole)..offset.saturating_add(size).min(whole);
        let bytes = match file {
            LayerFile::Diff => return Err(Errno::INVAL.into()),
            LayerFile::Info => {
                let info = self.layers.info(&layer).ok_or(Errno::IO)?;
                let part = part(info.len() as u64);
                info[part.start as usize..part.end as usize].to_vec().into()
            }
            LayerFile::Blob => {
                let whole = self.layers.stored_size(&layer).ok_or(Errno::IO)?;
                self.layers.read(&layer, part(whole))?
            }
        };
        writer.write_all(&bytes)?;
        Ok(bytes.len())
    }

    /// Nothing is listed: what exists is decided when it is asked for.
    fn readdir(
        &self,
        _: &Context,
        _: u64,
        _: u64,
        _: u32,
        _: u64,
        _: &mut dyn FnMut(DirEntry<'_>) -> io::Result<usize>,
    ) -> io::Result<()> {
        Ok(())
    }

    fn create(&self, _: &Context, parent: u64, name: &CStr, _: CreateIn) -> io::Result<Created> {
        match self.node(parent)? {
            Node::Layer(layer) if name.to_bytes() == USE => {
                self.layers.acquire(&layer);
                Err(Errno::NOENT.into())
            }
            _ => Err(Errno::ROFS.into()),
        }
    }

    fn rmdir(&self, _: &Context, parent: u64, name: &CStr) -> io::Result<()> {
        self.layers.release(&self.layer_in(parent, name)?);
        Err(Errno::NOENT.into())
    }

    fn listxattr(&self, _: &Context, _: u64, capacity: u32) -> io::Result<ListxattrReply> {
        Ok(match capacity {
            0 => ListxattrReply::Count(0),
            _ => ListxattrReply::Names(Vec::new()),
        })
    }
}
