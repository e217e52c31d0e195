//! One inode with all that belongs to it.

use super::{
    Refused, Unfit,
    dir::{Directory, Entry, MAX_BLOCKS, MAX_LINEAR},
    extents::{self, ExtentTree, Run},
    layout::{EXTRA_ISIZE, INODE_EXTENTS, INODE_INDEX, INODE_SIZE, Inode, MAX_LINKS},
    walk::Inodes,
    xattr::Attributes,
};
use crate::{
    BLOCK_SIZE, FormatError, Mtime,
    erofs::{FileType, InodeView, Nid},
    rafs::Bootstrap,
};
use zerocopy::IntoBytes;

/// Bytes of the longest link target in an inode.
const SHORT_TARGET: usize = 59;
/// Times from here on fit; seconds are 34 bits, signed around the first 32.
const FIRST_TIME: i64 = -(1 << 31);
const LAST_TIME: i64 = (1 << 34) - (1 << 31) - 1;

/// A bootstrap with its inodes numbered.
#[derive(Debug)]
pub(super) struct Source<'a, B> {
    bootstrap: &'a Bootstrap<B>,
    pub(super) inodes: Inodes,
    /// First block of each blob, counted from the first blob's.
    bases: Vec<u32>,
    /// Blocks of all blobs.
    pub(super) data_blocks: u64,
}

/// Why an inode has no form in ext4.
pub(super) enum Failure {
    Broken(FormatError),
    Unfit(Unfit),
}

/// Blocks of all blobs together, 1 TiB. Groups of blocks take room on the node's disk, an
/// 11,000th of what the blobs claim to have.
const MOST_DATA: u64 = 1 << 28;

impl From<FormatError> for Failure {
    fn from(error: FormatError) -> Self {
        Failure::Broken(error)
    }
}

impl From<Unfit> for Failure {
    fn from(why: Unfit) -> Self {
        Failure::Unfit(why)
    }
}

impl<'a, B: AsRef<[u8]>> Source<'a, B> {
    pub(super) fn new(bootstrap: &'a Bootstrap<B>) -> Result<Self, Refused> {
        let mut source =
            Source { bootstrap, inodes: Inodes::find(bootstrap)?, bases: vec![], data_blocks: 0 };
        for blocks in bootstrap.blobs().iter().map(|blob| blob.decoded_size.div_ceil(BLOCK_SIZE)) {
            let base = source.data_blocks;
            source.data_blocks = base.saturating_add(blocks);
            if source.data_blocks > MOST_DATA {
                return Err(Refused::TooLarge(source.data_blocks));
            }
            source.bases.push(base as u32);
        }
        Ok(source)
    }

    /// Blocks of each blob.
    pub(super) fn blob_blocks(&self) -> impl Iterator<Item = u64> + '_ {
        self.bootstrap.blobs().iter().map(|blob| blob.decoded_size.div_ceil(BLOCK_SIZE))
    }

    /// Reads the inode at `position` of [`Inodes`].
    pub(super) fn node(&self, position: usize) -> Result<Node<'_>, Failure> {
        let (nid, ino) = self.inodes.get(position).ok_or_else(lost)?;
        let inode = self.bootstrap.inode(nid)?;
        if !(FIRST_TIME..=LAST_TIME).contains(&inode.mtime.seconds) {
            return Err(Unfit::Time(inode.mtime.seconds).into());
        }
        let attributes = Attributes::encode(&self.bootstrap.xattrs(nid)?)?;
        let content = match inode.file_type {
            FileType::Directory => Content::Directory(self.directory(&inode, ino)?),
            FileType::Regular if inode.size.div_ceil(BLOCK_SIZE) > u32::MAX.into() => {
                return Err(Unfit::Size(inode.size).into());
            }
            FileType::Regular => {
                Content::File(extents::of_file(self.bootstrap, &inode, &self.bases)?)
            }
            FileType::Symlink => Content::Symlink(self.bootstrap.read_link(nid)?),
            FileType::CharDevice | FileType::BlockDevice => Content::Device(inode.data),
            FileType::Fifo | FileType::Socket => Content::None,
        };
        Ok(Node { inode, attributes, content })
    }

    fn directory(&self, inode: &InodeView, ino: u32) -> Result<Directory<'_>, Failure> {
        let parent = self.inodes.parent(inode.nid).and_then(|parent| self.inodes.number(parent));
        let mut entries = Vec::new();
        for entry in self.bootstrap.read_dir(inode.nid, 0)? {
            let entry = entry?;
            if !entry.is_dot() {
                let ino = self.inodes.number(entry.nid).ok_or_else(lost)?;
                entries.push(Entry { name: entry.name, ino, file_type: entry.file_type });
            }
        }
        let directory = Directory::new(ino, parent.ok_or_else(lost)?, entries);
        match directory.block_count() {
            blocks if blocks > MAX_BLOCKS => Err(Unfit::Directory(blocks).into()),
            _ => Ok(directory),
        }
    }

    /// Says why the image is refused because of the inode at `position`.
    pub(super) fn refused(&self, position: usize, failure: Failure) -> Refused {
        match failure {
            Failure::Broken(error) => Refused::Broken(error),
            Failure::Unfit(why) => {
                let nid = self.inodes.get(position).map(|(nid, _)| nid);
                let path = nid.and_then(|nid| self.path(nid)).unwrap_or_default();
                Refused::Unfit { path, why }
            }
        }
    }

    /// A path of the inode.
    fn path(&self, nid: Nid) -> Option<String> {
        let mut path = String::new();
        let mut at = nid;
        while at != self.bootstrap.root() {
            let (parent, name) = match self.inodes.parent(at) {
                Some(parent) => (parent, self.name(parent, at)?),
                None => self
                    .inodes
                    .directories()
                    .find_map(|parent| Some((parent, self.name(parent, at)?)))?,
            };
            path = format!("/{}{path}", name.escape_ascii());
            at = parent;
        }
        Some(if path.is_empty() { "/".to_owned() } else { path })
    }

    fn name(&self, directory: Nid, nid: Nid) -> Option<&[u8]> {
        let mut entries = self.bootstrap.read_dir(directory, 0).ok()?.filter_map(Result::ok);
        entries.find(|entry| entry.nid == nid && !entry.is_dot()).map(|entry| entry.name)
    }
}

/// The bytes of the bootstrap are others than when its inodes were numbered.
fn lost() -> Failure {
    Failure::Broken(FormatError::new("bootstrap", 0, "an inode that was not there before"))
}

/// One inode with all that belongs to it.
pub(super) struct Node<'a> {
    inode: InodeView,
    attributes: Attributes,
    content: Content<'a>,
}

enum Content<'a> {
    Directory(Directory<'a>),
    /// With starts counted from the first blob's first block.
    File(Vec<Run>),
    Symlink(&'a [u8]),
    /// The device number in Linux's encoding, which is also EROFS's.
    Device(u32),
    None,
}

impl Node<'_> {
    /// Blocks of blobs that it uses, counted from the first blob's.
    pub(super) fn runs(&self) -> &[Run] {
        match &self.content {
            Content::File(runs) => runs,
            _ => &[],
        }
    }

    /// Blocks of metadata: attributes, extent tree, and content that is not in blobs.
    pub(super) fn block_count(&self) -> u32 {
        self.attribute_blocks()
            + match &self.content {
                Content::File(runs) => extents::node_blocks(runs.len()),
                _ => self.content_blocks(),
            }
    }

    /// Returns whether it is a directory with an index.
    pub(super) fn is_indexed(&self) -> bool {
        matches!(self.content, Content::Directory(_)) && self.content_blocks() > MAX_LINEAR
    }

    fn attribute_blocks(&self) -> u32 {
        matches!(self.attributes, Attributes::Block(_)).into()
    }

    /// Blocks of content that is metadata. Directories have at most [`MAX_BLOCKS`].
    fn content_blocks(&self) -> u32 {
        match &self.content {
            Content::Directory(directory) => directory.block_count() as u32,
            Content::Symlink(target) => (target.len() > SHORT_TARGET).into(),
            _ => 0,
        }
    }

    /// The extent tree of an inode with blocks of metadata from `at` on, and blobs from `data` on.
    fn tree(&self, at: u32, data: u32) -> ExtentTree {
        let at = at + self.attribute_blocks();
        match &self.content {
            Content::File(runs) => {
                let place = |run: &Run| Run { start: data + run.start, ..*run };
                ExtentTree::build(&runs.iter().map(place).collect::<Vec<_>>(), at)
            }
            _ => ExtentTree::build(&extents::consecutive(at, self.content_blocks()), at),
        }
    }

    /// The inode in its [`INODE_SIZE`] bytes.
    pub(super) fn encode(&self, at: u32, data: u32) -> Vec<u8> {
        let InodeView { uid, gid, mtime, .. } = self.inode;
        let mut block = [0; 60];
        let mut flags = 0;
        match &self.content {
            Content::Symlink(target) if target.len() <= SHORT_TARGET => {
                block[..target.len()].copy_from_slice(target);
            }
            Content::Device(number) => block[4..8].copy_from_slice(&number.to_le_bytes()),
            Content::None => {}
            Content::Directory(_) | Content::File(_) | Content::Symlink(_) => {
                let root = self.tree(at, data).root;
                block[..root.len()].copy_from_slice(&root);
                flags = INODE_EXTENTS;
            }
        }
        if self.is_indexed() {
            flags |= INODE_INDEX;
        }
        let size = match &self.content {
            Content::Directory(_) => u64::from(self.content_blocks()) * BLOCK_SIZE,
            Content::File(_) | Content::Symlink(_) => self.inode.size,
            Content::Device(_) | Content::None => 0,
        };
        let data_blocks: u64 = self.runs().iter().map(|run| u64::from(run.len)).sum();
        let sectors = (data_blocks + u64::from(self.block_count())) * (BLOCK_SIZE / 512);
        let links = match self.inode.nlink {
            // The kernel's way to say that it does not count.
            links if links > MAX_LINKS && self.inode.file_type == FileType::Directory => 1,
            links => links.clamp(1, MAX_LINKS),
        };
        let (seconds, extra) = time(mtime);
        let inode = Inode {
            mode: (self.inode.mode() as u16).into(),
            uid_low: (uid as u16).into(),
            size_low: (size as u32).into(),
            atime: seconds.into(),
            ctime: seconds.into(),
            mtime: seconds.into(),
            dtime: 0.into(),
            gid_low: (gid as u16).into(),
            links: (links as u16).into(),
            blocks_low: (sectors as u32).into(),
            flags: flags.into(),
            version: 0.into(),
            block,
            generation: 0.into(),
            file_acl: if self.attribute_blocks() > 0 { at } else { 0 }.into(),
            size_high: ((size >> 32) as u32).into(),
            obsolete: 0.into(),
            blocks_high: ((sectors >> 32) as u16).into(),
            file_acl_high: 0.into(),
            uid_high: ((uid >> 16) as u16).into(),
            gid_high: ((gid >> 16) as u16).into(),
            checksum: 0.into(),
            reserved: 0.into(),
            extra_isize: EXTRA_ISIZE.into(),
            checksum_high: 0.into(),
            ctime_extra: extra.into(),
            mtime_extra: extra.into(),
            atime_extra: extra.into(),
            crtime: seconds.into(),
            crtime_extra: extra.into(),
            version_high: 0.into(),
            projid: 0.into(),
        };
        let mut bytes = inode.as_bytes().to_vec();
        if let Attributes::Inode(attributes) = &self.attributes {
            bytes.extend_from_slice(attributes);
        }
        bytes.resize(INODE_SIZE as usize, 0);
        bytes
    }

    /// The inode's blocks of metadata in order, each of at most [`BLOCK_SIZE`] bytes.
    pub(super) fn blocks(
        &self,
        at: u32,
        data: u32,
        mut write: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        if let Attributes::Block(block) = &self.attributes {
            write(block)?;
        }
        match &self.content {
            Content::Directory(directory) => directory.blocks().try_for_each(|block| write(&block)),
            Content::File(_) => self.tree(at, data).nodes.iter().try_for_each(|node| write(node)),
            Content::Symlink(target) if target.len() > SHORT_TARGET => write(target),
            Content::Symlink(_) | Content::Device(_) | Content::None => Ok(()),
        }
    }
}

/// Seconds modulo 2³², and the field with nanoseconds and the two bits of seconds that are left:
/// how many times 2³² to add to what the first 32 bits are as a signed number.
fn time(time: Mtime) -> (u32, u32) {
    let low = time.seconds as i32;
    let epoch = ((time.seconds - i64::from(low)) >> 32) as u32 & 3;
    (low.cast_unsigned(), time.nanoseconds << 2 | epoch)
}
