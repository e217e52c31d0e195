//! Plans an image before its layout: inodes in order, with everything that does not depend on their
//! places.

use std::collections::{HashMap, VecDeque};

use super::{
    FileType,
    layout::{
        CHUNK_BITS_MASK, CHUNK_INDEXES, ChunkIndex, DIRENT_SIZE, DataLayout, InodeExtended,
        XATTR_PREFIXES, XattrEntry, XattrHeader,
    },
    reader::MAX_TARGET,
};
use crate::{
    BLOCK_SIZE, Blob, ChunkRef, FormatError, Inode, InodeId, Kind, Metadata, Problem, Structure,
    Tree, tree::Device,
};
use zerocopy::IntoBytes;

/// Index of an inode in [`Plan::inodes`].
pub(crate) type Slot = usize;

/// The inodes of an image in the order in which they are written; the root is first.
pub(crate) struct Plan<'a> {
    pub(crate) inodes: Vec<PlannedInode<'a>>,
    /// The position in `inodes` of each inode of the tree.
    pub(crate) slots: HashMap<InodeId, Slot>,
    /// Number of names, the root counted as one.
    pub(crate) names: u64,
}

/// One inode.
pub(crate) struct PlannedInode<'a> {
    pub(crate) metadata: &'a Metadata,
    pub(crate) mode: u16,
    pub(crate) nlink: u32,
    pub(crate) size: u64,
    pub(crate) layout: DataLayout,
    /// The extended attribute area with its header; empty when there are none.
    pub(crate) xattrs: Vec<u8>,
    pub(crate) content: Content<'a>,
}

/// Data that the writer puts behind an inode or in blocks of its own.
pub(crate) enum Content<'a> {
    Directory(Vec<DirBlock<'a>>),
    Symlink(&'a [u8]),
    /// The chunk format word and the index entries.
    Chunks(u32, Vec<ChunkIndex>),
    /// Device number, 0 for fifos and sockets.
    Node(u32),
}

/// The entries of one block of a directory.
pub(crate) struct DirBlock<'a> {
    pub(crate) entries: Vec<(&'a [u8], Slot, FileType)>,
    /// Bytes used by entries and names.
    pub(crate) used: u64,
}

impl PlannedInode<'_> {
    /// Bytes at the end of the content that follow the inode and must share a block with it.
    pub(crate) fn inline_size(&self) -> u64 {
        match self.layout {
            DataLayout::FlatInline => self.size - self.block_count() * BLOCK_SIZE,
            _ => 0,
        }
    }

    /// Blocks of content that lie apart from the inode.
    pub(crate) fn block_count(&self) -> u64 {
        match self.layout {
            DataLayout::FlatPlain => self.size.div_ceil(BLOCK_SIZE),
            DataLayout::FlatInline => self.size / BLOCK_SIZE,
            DataLayout::ChunkBased => 0,
        }
    }
}

/// Orders the inodes of `tree`: all entries of a directory by name, then each of its
/// subdirectories in the same way. That is also the order in which a walk needs them.
pub(crate) fn plan<'a>(
    tree: &'a Tree,
    blobs: &[&Blob],
    chunk_size: u32,
) -> Result<Plan<'a>, FormatError> {
    let mut places = vec![NamedInode { id: Tree::ROOT, parent: 0, name: b"" }];
    let mut slots = HashMap::from([(Tree::ROOT, 0)]);
    let mut links: Vec<u32> = vec![1];
    let mut names = 1;
    // Depth first without recursion: a directory's subdirectories go to the front of the queue.
    let mut pending = VecDeque::from([0]);
    while let Some(parent) = pending.pop_front() {
        let mut subdirectories = Vec::new();
        for (name, &id) in tree.children(places[parent].id).into_iter().flatten() {
            names += 1;
            let is_directory = matches!(tree[id].kind, Kind::Directory(_));
            let place = NamedInode { id, parent, name: name.as_bytes() };
            if let Some(&slot) = slots.get(&id) {
                if is_directory {
                    places.push(place);
                    let problem = "a second name for a directory";
                    return Err(error(&places, places.len() - 1, problem));
                }
                links[slot] += 1;
                continue;
            }
            if is_directory {
                subdirectories.push(places.len());
            }
            slots.insert(id, places.len());
            places.push(place);
            links.push(1);
        }
        for slot in subdirectories.into_iter().rev() {
            pending.push_front(slot);
        }
    }
    let context = Context { tree, blobs, chunk_size, slots: &slots };
    let inodes = places.iter().zip(&links).enumerate().map(|(slot, (place, &links))| {
        context.inode(slot, place, links).map_err(|problem| error(&places, slot, problem))
    });
    let inodes = inodes.collect::<Result<_, _>>()?;
    Ok(Plan { inodes, slots, names })
}

/// An inode by its first name.
struct NamedInode<'a> {
    id: InodeId,
    parent: Slot,
    name: &'a [u8],
}

/// An error about the file at `slot`, with its path.
fn error(places: &[NamedInode<'_>], mut slot: Slot, problem: impl Into<Problem>) -> FormatError {
    let mut names = Vec::new();
    while slot != 0 {
        names.push(places[slot].name);
        slot = places[slot].parent;
    }
    names.push(b"");
    names.reverse();
    let path = match names.len() {
        1 => "/".to_owned(),
        _ => names.join(&b'/').escape_ascii().to_string(),
    };
    FormatError::new(Structure::File(path.to_string()), 0, problem)
}

struct Context<'a, 'b> {
    tree: &'a Tree,
    blobs: &'b [&'b Blob],
    chunk_size: u32,
    slots: &'b HashMap<InodeId, Slot>,
}

impl<'a> Context<'a, '_> {
    fn inode(
        &self,
        slot: Slot,
        place: &NamedInode<'_>,
        links: u32,
    ) -> Result<PlannedInode<'a>, String> {
        let Inode { metadata, kind } = &self.tree[place.id];
        if metadata.permissions > 0o7777 || metadata.mtime.nanoseconds >= 1_000_000_000 {
            return Err("permissions or nanoseconds out of range".into());
        }
        let xattrs = encode_xattrs(metadata)?;
        let (size, content) = match kind {
            Kind::Directory(children) => {
                let blocks = self.directory(slot, place.parent, children);
                let last = blocks.last().map_or(0, |block: &DirBlock<'_>| block.used);
                let size = (blocks.len().saturating_sub(1) as u64) * BLOCK_SIZE + last;
                (size, Content::Directory(blocks))
            }
            Kind::Symlink(target) => {
                let size = target.len() as u64;
                if !(1..=MAX_TARGET).contains(&size) || target.contains(&0) {
                    return Err(format!("a link target of {size} bytes, or with a NUL"));
                }
                (size, Content::Symlink(target))
            }
            Kind::Regular { size, chunks } => {
                let (format, indexes) = self.chunks(*size, chunks)?;
                (*size, Content::Chunks(format, indexes))
            }
            Kind::CharDevice(device) | Kind::BlockDevice(device) => {
                if Device::decode(device.encode()) != *device {
                    return Err(format!(
                        "device {}:{} is out of range",
                        device.major, device.minor
                    ));
                }
                (0, Content::Node(device.encode()))
            }
            Kind::Fifo | Kind::Socket => (0, Content::Node(0)),
        };
        let nlink = match &content {
            Content::Directory(blocks) => {
                let entries = blocks.iter().flat_map(|block| &block.entries);
                // Its name, its own `.`, and the `..` of every subdirectory: as many links as it
                // has entries of directories, since `.` and `..` are two of them.
                let directories = entries.filter(|(_, _, kind)| *kind == FileType::Directory);
                directories.count() as u32
            }
            _ => links,
        };
        let head = size_of::<InodeExtended>() as u64 + xattrs.len() as u64;
        let tail = size % BLOCK_SIZE;
        let layout = match content {
            Content::Chunks(..) => DataLayout::ChunkBased,
            Content::Directory(_) | Content::Symlink(_)
                if tail != 0 && head + tail <= BLOCK_SIZE =>
            {
                DataLayout::FlatInline
            }
            _ => DataLayout::FlatPlain,
        };
        let mode = kind.mode() | metadata.permissions;
        Ok(PlannedInode { metadata, mode, nlink, size, layout, xattrs, content })
    }

    /// Distributes a directory's names, `.` and `..` among them, over blocks.
    fn directory(
        &self,
        slot: Slot,
        parent: Slot,
        children: &'a std::collections::BTreeMap<crate::Name, InodeId>,
    ) -> Vec<DirBlock<'a>> {
        let mut entries: Vec<(&[u8], Slot, FileType)> =
            vec![(b".", slot, FileType::Directory), (b"..", parent, FileType::Directory)];
        entries.extend(children.iter().map(|(name, child)| {
            let file_type = file_type(&self.tree[*child].kind);
            (name.as_bytes(), self.slots[child], file_type)
        }));
        entries.sort_unstable_by_key(|(name, _, _)| *name);
        let mut blocks: Vec<DirBlock<'a>> = Vec::new();
        for entry in entries {
            let needed = (DIRENT_SIZE + entry.0.len()) as u64;
            match blocks.last_mut() {
                Some(block) if block.used + needed <= BLOCK_SIZE => {
                    block.used += needed;
                    block.entries.push(entry);
                }
                _ => blocks.push(DirBlock { entries: vec![entry], used: needed }),
            }
        }
        blocks
    }

    /// The chunk format word and indexes of a regular file.
    fn chunks(&self, size: u64, chunks: &[ChunkRef]) -> Result<(u32, Vec<ChunkIndex>), String> {
        let chunk_size = u64::from(self.chunk_size);
        let (count, mut left) = (chunks.len(), size);
        if size > i64::MAX as u64 || count as u64 > size.div_ceil(chunk_size) {
            return Err(format!("{count} chunks for {size} bytes"));
        }
        let mut indexes = Vec::with_capacity(chunks.len());
        let mut consecutive = true;
        let mut previous: Option<(ChunkRef, u64)> = None;
        for &chunk_ref in chunks {
            let blob = usize::from(chunk_ref.blob.0);
            let chunk = self.blobs.get(blob).and_then(|blob| blob.chunk(chunk_ref.number));
            let chunk = chunk.ok_or_else(|| {
                format!("chunk {} of blob {blob} does not exist", chunk_ref.number)
            })?;
            let (found, expected) = (u64::from(chunk.decoded_size), chunk_size.min(left));
            // Only the last one may end where no other could begin.
            let is_long = found > chunk_size && found.is_multiple_of(chunk_size);
            if found > left || found != expected && found != left && !is_long {
                return Err(format!(
                    "chunk {} of blob {blob} has {} bytes, the file needs {expected}",
                    chunk_ref.number, chunk.decoded_size
                ));
            }
            if let Some((before, decoded)) = previous {
                consecutive &=
                    before.blob == chunk_ref.blob && decoded + chunk_size == chunk.decoded.0;
            }
            // The last part of it.
            let parts = found.div_ceil(chunk_size).max(1);
            previous = Some((chunk_ref, chunk.decoded.0 + (parts - 1) * chunk_size));
            let number = chunk_ref.number.to_le_bytes();
            for part in (0..found).step_by(self.chunk_size as usize) {
                indexes.push(ChunkIndex {
                    number_low: (chunk_ref.number as u16).into(),
                    number_high: number[2],
                    device: chunk_ref.blob.0 + 1,
                    block: u32::try_from((chunk.decoded.0 + part) / BLOCK_SIZE)
                        .map_err(|_| format!("{} is beyond 16 TiB", chunk.decoded))?
                        .into(),
                });
            }
            left -= found;
        }
        if left > 0 {
            return Err(format!("{count} chunks for {size} bytes, {left} are in none"));
        }
        // The kernel reads up to a chunk at once: where the file lies in one piece, call it one
        // chunk.
        let image_bits = (chunk_size / BLOCK_SIZE).ilog2();
        let whole = size.next_power_of_two().max(chunk_size) / BLOCK_SIZE;
        let bits = match whole.ilog2() {
            bits if consecutive && bits <= CHUNK_BITS_MASK => bits,
            _ => image_bits,
        };
        Ok((CHUNK_INDEXES | bits, indexes))
    }
}

/// The type of a file with this content.
pub(crate) fn file_type(kind: &Kind) -> FileType {
    match kind {
        Kind::Directory(_) => FileType::Directory,
        Kind::Regular { .. } => FileType::Regular,
        Kind::Symlink(_) => FileType::Symlink,
        Kind::CharDevice(_) => FileType::CharDevice,
        Kind::BlockDevice(_) => FileType::BlockDevice,
        Kind::Fifo => FileType::Fifo,
        Kind::Socket => FileType::Socket,
    }
}

fn encode_xattrs(metadata: &Metadata) -> Result<Vec<u8>, String> {
    if metadata.xattrs.is_empty() {
        return Ok(Vec::new());
    }
    let mut area = XattrHeader::default().as_bytes().to_vec();
    for (name, value) in &metadata.xattrs {
        let shown = || name.escape_ascii().to_string();
        let known = XATTR_PREFIXES.iter().find_map(|&(number, prefix)| {
            let rest = name.strip_prefix(prefix)?;
            (rest.is_empty() != prefix.ends_with(b".")).then_some((number, rest))
        });
        let (prefix, rest) =
            known.ok_or_else(|| format!("extended attribute `{}` of an unknown kind", shown()))?;
        if name.len() > 255 || name.contains(&0) {
            return Err(format!("the extended attribute name `{}` is not allowed", shown()));
        }
        let value_size = u16::try_from(value.len())
            .map_err(|_| format!("extended attribute `{}`: {} bytes", shown(), value.len()))?;
        let entry =
            XattrEntry { name_len: rest.len() as u8, prefix, value_size: value_size.into() };
        area.extend_from_slice(entry.as_bytes());
        area.extend_from_slice(rest);
        area.extend_from_slice(value);
        area.resize(area.len().next_multiple_of(4), 0);
    }
    // i_xattr_icount has 16 bits and counts words after the header, plus one.
    if (area.len() - size_of::<XattrHeader>()) / 4 >= usize::from(u16::MAX) {
        return Err(format!("{} bytes of extended attributes", area.len()));
    }
    Ok(area)
}
