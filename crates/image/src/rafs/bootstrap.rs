//! Reads bootstraps.

use std::collections::{HashMap, VecDeque};

use super::{BlobRecord, TailInfo, layout::Origin, tables, tables::Tables};
use crate::{
    Algorithm, BLOCK_SIZE, Blob, BlobIndex, Chunk, ChunkRef, Decoded, FormatError, Inode, InodeId,
    Kind, Metadata, Name, Points, Problem, Tree,
    erofs::{
        DirEntry, FileType, InodeView, Nid, ReadDir, Xattr, dir,
        layout::{CHUNK_BITS_MASK, ChunkIndex},
        reader::View,
    },
    tree::Device,
};

/// An image's metadata, with superblocks and tables validated.
///
/// `B` holds the bytes of the file: a `Vec<u8>`, a mapping, `&[u8]`. Nothing is copied out of it
/// but the tables. Inodes are validated when they are read.
#[derive(Debug)]
pub struct Bootstrap<B> {
    bytes: B,
    tables: Tables,
}

/// A piece of a file in a decoded blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The blob.
    pub blob: BlobIndex,
    /// First byte.
    pub start: Decoded,
    /// Number of bytes, up to the end of the chunk or of the file; at least 1.
    pub len: u64,
}

impl<B: AsRef<[u8]>> Bootstrap<B> {
    /// Validates superblocks, blob table and chunk table. Takes time in the number of chunks, not
    /// of files.
    pub fn open(bytes: B) -> Result<Self, FormatError> {
        let tables = tables::parse(bytes.as_ref())?;
        Ok(Bootstrap { bytes, tables })
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_ref()
    }

    /// The version of RAFS in which the image was made: 6, or 5 before it was
    /// [translated](super::v5).
    pub fn version(&self) -> u8 {
        if self.origin() == Origin::V5 { 5 } else { 6 }
    }

    /// The source of the bootstrap.
    pub fn origin(&self) -> Origin {
        self.tables.origin
    }

    /// Bytes per chunk, a power of two from 4 KiB to 16 MiB. Chunks of [seekable
    /// layers](Origin::Seekable) may be larger: multiples of this, or up to the end of a file.
    pub fn chunk_size(&self) -> u32 {
        self.tables.geometry.chunk_size
    }

    /// The algorithm of the chunk digests, if all blobs have the same.
    pub fn digest_algorithm(&self) -> Algorithm {
        self.tables.digest
    }

    /// Number of names in the image, as it claims.
    pub fn inode_count(&self) -> u64 {
        self.tables.inode_count
    }

    /// The blobs with the chunks that the chunk table lists. Checked: chunks ascend in number and
    /// in both offsets, do not overlap, lie inside the sizes of the blob, start on block borders
    /// once decoded, and have 1 to `chunk_size` bytes, in [seekable layers](Origin::Seekable) up to
    /// 16 MiB.
    pub fn blobs(&self) -> &[Blob] {
        &self.tables.blobs
    }

    /// The tails in the blob table, in the order of [`Bootstrap::blobs`].
    pub fn tails(&self) -> &[TailInfo] {
        &self.tables.tails
    }

    /// Blobs with chunks missing from [`Bootstrap::blobs`], because only the CI tables name their
    /// units: see [`super::place_chunks`]. Indexes of gzip layers are such blobs, and batched blobs
    /// by other writers.
    pub fn unplaced(&self) -> &[BlobIndex] {
        &self.tables.unplaced
    }

    /// Sets the points of a blob that is a gzip layer.
    ///
    /// # Errors
    /// The blob has a chunk in a unit that begins at none of the points, or does not exist.
    pub fn set_points(&mut self, blob: BlobIndex, points: Points) -> Result<(), FormatError> {
        let error = |problem: String| FormatError::new(("blob", u64::from(blob.0)), 0, problem);
        let found = self.tables.blobs.get_mut(usize::from(blob.0));
        let found = found.ok_or_else(|| error("it does not exist".to_owned()))?;
        let in_units = found.chunks.iter().filter(|chunk| chunk.part.is_some());
        let is_lost = |chunk: &&Chunk| points.at(chunk.stored).is_none();
        if let Some(chunk) = in_units.into_iter().find(is_lost) {
            return Err(error(format!("no point at {}: {chunk:?}", chunk.stored)));
        }
        found.points = points;
        Ok(())
    }

    /// [`Bootstrap::blobs`] and [`Bootstrap::tails`] together, copied.
    pub fn blob_records(&self) -> Vec<BlobRecord> {
        let rows = self.tables.blobs.iter().zip(&self.tables.tails);
        rows.map(|(blob, tail)| BlobRecord { blob: blob.clone(), tail: *tail }).collect()
    }

    /// Files and directories that the image asks to fetch first; empty in images whose starts
    /// were not recorded.
    pub fn prefetch(&self) -> &[Nid] {
        &self.tables.prefetch
    }

    /// The root directory.
    pub fn root(&self) -> Nid {
        self.tables.root
    }

    pub(crate) fn view(&self) -> View<'_> {
        View { bytes: self.bytes.as_ref(), geometry: self.tables.geometry }
    }

    /// Reads an inode.
    pub fn inode(&self, nid: Nid) -> Result<InodeView, FormatError> {
        self.view().inode(nid)
    }

    /// Finds a name in a directory, also `.` and `..`. Errors when `dir` is not a directory.
    pub fn lookup(&self, dir: Nid, name: &[u8]) -> Result<Option<Nid>, FormatError> {
        let view = self.view();
        Ok(dir::lookup(&view, &view.inode(dir)?, name)?.map(|entry| entry.nid))
    }

    /// Lists a directory from `offset` on: 0, or [`DirEntry::next_offset`] of an earlier entry.
    /// `.` and `..` are listed where they sort. Ends after the first error.
    pub fn read_dir(&self, dir: Nid, offset: u64) -> Result<ReadDir<'_>, FormatError> {
        let view = self.view();
        ReadDir::new(view, view.inode(dir)?, offset)
    }

    /// The target of a symbolic link.
    pub fn read_link(&self, link: Nid) -> Result<&[u8], FormatError> {
        let view = self.view();
        view.target(&view.inode(link)?)
    }

    /// Extended attributes with their full names, in the order of the image.
    pub fn xattrs(&self, nid: Nid) -> Result<Vec<Xattr<'_>>, FormatError> {
        let view = self.view();
        view.xattrs(&view.inode(nid)?)
    }

    /// The chunks of a regular file in file order, with where each lies in its decoded blob. One
    /// that is larger than the chunk size comes once for each chunk size, with where that part of
    /// it lies.
    pub fn chunks(&self, file: Nid) -> Result<Chunks<'_>, FormatError> {
        let view = self.view();
        self.chunks_of(&view.inode(file)?)
    }

    pub(super) fn chunks_of(&self, inode: &InodeView) -> Result<Chunks<'_>, FormatError> {
        let indexes = self.view().chunk_indexes(inode)?;
        Ok(Chunks { inode: *inode, blobs: self.blobs(), indexes: indexes.iter() })
    }

    /// Returns whether a reference to `chunk` with this place is to the chunk's begin. References
    /// to later parts follow it.
    fn begins(&self, chunk: ChunkRef, at: Decoded) -> bool {
        let found = || self.blobs()[usize::from(chunk.blob.0)].chunk(chunk.number);
        self.origin() != Origin::Seekable || found().is_none_or(|chunk| chunk.decoded == at)
    }

    /// Returns the place of the byte at `offset` of a regular file, and how many bytes follow it in
    /// the same chunk; `None` at and after the end of the file.
    pub fn extent(&self, file: Nid, offset: u64) -> Result<Option<Extent>, FormatError> {
        let view = self.view();
        let inode = view.inode(file)?;
        let indexes = view.chunk_indexes(&inode)?;
        if offset >= inode.size {
            return Ok(None);
        }
        let chunk_size = u64::from(self.chunk_size());
        let (number, within) = (offset / chunk_size, offset % chunk_size);
        let (chunk, decoded) = resolve(&inode, self.blobs(), &indexes[number as usize])?;
        let start = decoded.0 + within;
        let len = (chunk_size - within).min(inode.size - offset);
        if start + len > self.blobs()[usize::from(chunk.blob.0)].decoded_size {
            return Err(inode.error(format!("chunk {number} ends after its blob")));
        }
        Ok(Some(Extent { blob: chunk.blob, start: Decoded(start), len }))
    }

    /// The whole tree. Hard links stay hard links. Takes memory in the size of the bootstrap, also
    /// for hostile ones.
    pub fn tree(&self) -> Result<Tree, FormatError> {
        let mut builder = TreeBuilder {
            bootstrap: self,
            budget: Budget::new(self.bytes()),
            known: HashMap::new(),
            pending: VecDeque::new(),
        };
        let root = self.inode(self.root())?;
        let inode = builder.inode(&root)?;
        let mut tree = Tree::new(inode.metadata);
        if root.file_type != FileType::Directory {
            return Err(root.error("the root is not a directory"));
        }
        builder.known.insert(root.nid, Tree::ROOT);
        builder.pending.push_back((root.nid, Tree::ROOT));
        while let Some((nid, id)) = builder.pending.pop_front() {
            builder.fill(&mut tree, nid, id)?;
        }
        Ok(tree)
    }
}

/// See [`Bootstrap::chunks`].
#[derive(Clone, Debug)]
pub struct Chunks<'a> {
    inode: InodeView,
    blobs: &'a [Blob],
    indexes: std::slice::Iter<'a, ChunkIndex>,
}

impl Iterator for Chunks<'_> {
    type Item = Result<(ChunkRef, Decoded), FormatError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.indexes.next().map(|index| resolve(&self.inode, self.blobs, index))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.indexes.size_hint()
    }
}

impl ExactSizeIterator for Chunks<'_> {}

fn resolve(
    inode: &InodeView,
    blobs: &[Blob],
    index: &ChunkIndex,
) -> Result<(ChunkRef, Decoded), FormatError> {
    let decoded = Decoded(u64::from(index.block.get()) * BLOCK_SIZE);
    let blob = index.device.checked_sub(1).filter(|blob| {
        blobs.get(usize::from(*blob)).is_some_and(|blob| decoded.0 < blob.decoded_size)
    });
    let blob = blob.ok_or_else(|| {
        let problem = format!("a chunk at {decoded} of device {}: no such place", index.device);
        inode.error(problem)
    })?;
    let number = u32::from(index.number_high) << 16 | u32::from(index.number_low.get());
    Ok((ChunkRef { blob: BlobIndex(blob), number }, decoded))
}

/// Limits a walk over all inodes. In a sound image, inodes and their data do not overlap, so
/// together they are no bigger than the file. Without a limit, a few KiB of overlapping inodes
/// could expand to gigabytes.
#[derive(Debug)]
pub(crate) struct Budget(u64);

impl Budget {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        Budget(bytes.len() as u64)
    }

    /// Charges the size of `inode` with its metadata.
    pub(crate) fn charge(&mut self, inode: &InodeView, chunk_size: u32) -> Result<(), FormatError> {
        let content = match inode.file_type {
            FileType::Regular => {
                inode.size.div_ceil(chunk_size.into()) * size_of::<ChunkIndex>() as u64
            }
            FileType::Directory | FileType::Symlink => inode.size,
            _ => 0,
        };
        let size = (inode.tail() - inode.offset).saturating_add(content);
        self.0 = self
            .0
            .checked_sub(size)
            .ok_or_else(|| inode.error(Problem::Overlap("the image's inodes".into())))?;
        Ok(())
    }
}

struct TreeBuilder<'a, B> {
    bootstrap: &'a Bootstrap<B>,
    budget: Budget,
    known: HashMap<Nid, InodeId>,
    pending: VecDeque<(Nid, InodeId)>,
}

impl<B: AsRef<[u8]>> TreeBuilder<'_, B> {
    /// Adds the children of the directory `nid`.
    fn fill(&mut self, tree: &mut Tree, nid: Nid, id: InodeId) -> Result<(), FormatError> {
        for entry in self.bootstrap.read_dir(nid, 0)? {
            let entry = entry?;
            if entry.is_dot() {
                continue;
            }
            let child = self.child(tree, &entry)?;
            let error = |problem: String| FormatError::new(nid, 0, problem);
            let name = Name::new(entry.name).map_err(|invalid| error(invalid.to_string()))?;
            let shown = name.to_string();
            if let Some(children) = tree.children_mut(id)
                && children.insert(name, child).is_some()
            {
                return Err(error(format!("the name `{shown}` twice")));
            }
        }
        Ok(())
    }

    fn child(&mut self, tree: &mut Tree, entry: &DirEntry<'_>) -> Result<InodeId, FormatError> {
        let inode = self.bootstrap.inode(entry.nid)?;
        let is_directory = inode.file_type == FileType::Directory;
        if let Some(&known) = self.known.get(&inode.nid) {
            return if is_directory {
                Err(inode.error("a directory with more than one parent"))
            } else {
                Ok(known)
            };
        }
        let id = tree.add(self.inode(&inode)?);
        self.known.insert(inode.nid, id);
        if is_directory {
            self.pending.push_back((inode.nid, id));
        }
        Ok(id)
    }

    fn inode(&mut self, inode: &InodeView) -> Result<Inode, FormatError> {
        self.budget.charge(inode, self.bootstrap.chunk_size())?;
        let device = Device::decode(inode.data);
        let kind = match inode.file_type {
            FileType::Directory => Kind::Directory(Default::default()),
            FileType::Regular => {
                let chunks = self.bootstrap.chunks_of(inode)?;
                let chunks = chunks.filter_map(|chunk| match chunk {
                    Ok((chunk, at)) => self.bootstrap.begins(chunk, at).then_some(Ok(chunk)),
                    Err(error) => Some(Err(error)),
                });
                Kind::Regular { size: inode.size, chunks: chunks.collect::<Result<_, _>>()? }
            }
            FileType::Symlink => Kind::Symlink(self.bootstrap.view().target(inode)?.into()),
            FileType::CharDevice => Kind::CharDevice(device),
            FileType::BlockDevice => Kind::BlockDevice(device),
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => Kind::Socket,
        };
        let xattrs = self.bootstrap.view().xattrs(inode)?;
        let metadata = Metadata {
            permissions: inode.permissions,
            uid: inode.uid,
            gid: inode.gid,
            mtime: inode.mtime,
            xattrs: xattrs.into_iter().map(|(name, value)| (name.into(), value.into())).collect(),
        };
        Ok(Inode { metadata, kind })
    }
}

/// Returns whether the kernel, which maps the whole file in chunks of the size in `inode`, sees the
/// same bytes as a reader that uses each index entry.
pub(super) fn kernel_agrees(
    inode: &InodeView,
    chunk_size: u32,
    chunks: &[(ChunkRef, Decoded)],
) -> bool {
    let kernel_chunk = BLOCK_SIZE << (inode.data & CHUNK_BITS_MASK);
    let per_kernel_chunk = (kernel_chunk / u64::from(chunk_size)).max(1) as usize;
    chunks.chunks(per_kernel_chunk).all(|group| {
        group.windows(2).all(|pair| {
            let ((a, a_start), (b, b_start)) = (pair[0], pair[1]);
            a.blob == b.blob && a_start.0 + u64::from(chunk_size) == b_start.0
        })
    })
}
