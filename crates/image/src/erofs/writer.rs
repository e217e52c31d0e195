//! Writes inodes and directory blocks.
//!
//! An image has forward references: the superblock names places in the file that are only known
//! once everything before them is written. So the image is written twice by the same straight-line
//! code. The first [`Output`] only counts and notes where marks are; the second has the notes and
//! emits bytes. The order of statements is the order of bytes.

use zerocopy::IntoBytes;

use super::{
    layout::{Dirent, INODE_EXTENDED, INODE_SLOT, InodeExtended, XattrHeader},
    plan::{Content, DirBlock, Plan, PlannedInode, Slot},
};
use crate::BLOCK_SIZE;

/// A place in the file that other parts refer to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mark {
    BlobTable,
    PrefetchTable,
    /// Start of the inode area: nid 0.
    Meta,
    Inode(Slot),
    /// Blocks of an inode's content.
    Blocks(Slot),
    ChunkTable,
    End,
}

/// Offsets of the marks, in bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    blob_table: u64,
    prefetch_table: u64,
    meta: u64,
    inodes: Vec<u64>,
    blocks: Vec<u64>,
    chunk_table: u64,
    end: u64,
}

/// Counts in the first pass, collects bytes in the second.
pub(crate) struct Output {
    places: Places,
    position: u64,
    /// `None` in the first pass.
    bytes: Option<Vec<u8>>,
}

impl Output {
    /// For the first pass over an image of `inodes` inodes.
    pub(crate) fn measure(inodes: usize) -> Self {
        let places =
            Places { inodes: vec![0; inodes], blocks: vec![0; inodes], ..Places::default() };
        Output { places, position: 0, bytes: None }
    }

    /// For the second pass.
    pub(crate) fn emit(measured: Output) -> Self {
        let bytes = Vec::with_capacity(measured.position as usize);
        Output { places: measured.places, position: 0, bytes: Some(bytes) }
    }

    /// The image, once the second pass has written it.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes.unwrap_or_default()
    }

    pub(crate) fn write(&mut self, data: &[u8]) {
        self.position += data.len() as u64;
        if let Some(bytes) = &mut self.bytes {
            bytes.extend_from_slice(data);
        }
    }

    /// Writes zeros up to the next multiple of `alignment`.
    pub(crate) fn pad(&mut self, alignment: u64) {
        self.position = self.position.next_multiple_of(alignment);
        if let Some(bytes) = &mut self.bytes {
            bytes.resize(self.position as usize, 0);
        }
    }

    pub(crate) fn mark(&mut self, mark: Mark) {
        let position = self.position;
        match mark {
            Mark::BlobTable => self.places.blob_table = position,
            Mark::PrefetchTable => self.places.prefetch_table = position,
            Mark::Meta => self.places.meta = position,
            Mark::Inode(slot) => self.places.inodes[slot] = position,
            Mark::Blocks(slot) => self.places.blocks[slot] = position,
            Mark::ChunkTable => self.places.chunk_table = position,
            Mark::End => self.places.end = position,
        }
    }

    /// Position of the mark; 0 for marks that the first pass has not reached.
    pub(crate) fn place(&self, mark: Mark) -> u64 {
        match mark {
            Mark::BlobTable => self.places.blob_table,
            Mark::PrefetchTable => self.places.prefetch_table,
            Mark::Meta => self.places.meta,
            Mark::Inode(slot) => self.places.inodes[slot],
            Mark::Blocks(slot) => self.places.blocks[slot],
            Mark::ChunkTable => self.places.chunk_table,
            Mark::End => self.places.end,
        }
    }

    pub(crate) fn nid(&self, slot: Slot) -> u64 {
        self.place(Mark::Inode(slot)).saturating_sub(self.place(Mark::Meta)) / INODE_SLOT
    }
}

/// Writes all inodes with their inline data, then their data blocks.
pub(crate) fn write_inodes(plan: &Plan<'_>, out: &mut Output) {
    for (slot, inode) in plan.inodes.iter().enumerate() {
        write_inode(slot, inode, out);
    }
    out.pad(BLOCK_SIZE);
    for (slot, inode) in plan.inodes.iter().enumerate() {
        write_blocks(slot, inode, out);
    }
}

fn write_inode(slot: Slot, inode: &PlannedInode<'_>, out: &mut Output) {
    let head = size_of::<InodeExtended>() as u64 + inode.xattrs.len() as u64;
    let inline = inode.inline_size();

    // Padding: inodes begin on a slot, and an inline tail may not cross a block border.
    out.pad(INODE_SLOT);
    // The kernel reads an inline tail from the one block that its inode ends in.
    if inline != 0 && out.position % BLOCK_SIZE + head + inline > BLOCK_SIZE {
        out.pad(BLOCK_SIZE);
    }

    // struct erofs_inode_extended
    out.mark(Mark::Inode(slot));
    out.write(
        InodeExtended {
            format: (INODE_EXTENDED | ((inode.layout as u16) << 1)).into(),
            xattr_count: match inode.xattrs.len() {
                0 => 0,
                len => 1 + ((len - size_of::<XattrHeader>()) / 4) as u16,
            }
            .into(),
            mode: inode.mode.into(),
            reserved: 0.into(),
            size: inode.size.into(),
            data: match inode.content {
                Content::Chunks(format, _) => format,
                Content::Node(device) => device,
                _ => (out.place(Mark::Blocks(slot)) / BLOCK_SIZE) as u32,
            }
            .into(),
            ino: (slot as u32 + 1).into(),
            uid: inode.metadata.uid.into(),
            gid: inode.metadata.gid.into(),
            mtime: inode.metadata.mtime.seconds.cast_unsigned().into(),
            mtime_nanoseconds: inode.metadata.mtime.nanoseconds.into(),
            nlink: inode.nlink.into(),
            reserved2: [0; 16],
        }
        .as_bytes(),
    );

    // struct erofs_xattr_ibody_header, and the attributes
    out.write(&inode.xattrs);

    // Tail: chunk indexes, or the inline end of the content.
    match &inode.content {
        Content::Chunks(_, indexes) => {
            out.pad(8);
            out.write(indexes.as_bytes());
        }
        Content::Symlink(target) if inline != 0 => out.write(target),
        Content::Directory(blocks) if inline != 0 => {
            if let Some(block) = blocks.last() {
                write_directory_block(block, out);
            }
        }
        _ => {}
    }
}

fn write_blocks(slot: Slot, inode: &PlannedInode<'_>, out: &mut Output) {
    let count = inode.block_count();
    if count == 0 {
        return;
    }
    out.mark(Mark::Blocks(slot));
    match &inode.content {
        Content::Directory(blocks) => {
            for block in &blocks[..count as usize] {
                write_directory_block(block, out);
                out.pad(BLOCK_SIZE);
            }
        }
        Content::Symlink(target) => {
            out.write(target);
            out.pad(BLOCK_SIZE);
        }
        Content::Chunks(..) | Content::Node(_) => {}
    }
}

fn write_directory_block(block: &DirBlock<'_>, out: &mut Output) {
    // struct erofs_dirent, one for each name
    let mut name_offset = size_of::<Dirent>() * block.entries.len();
    for (name, target, file_type) in &block.entries {
        out.write(
            Dirent {
                nid: out.nid(*target).into(),
                name_offset: (name_offset as u16).into(),
                file_type: *file_type as u8,
                reserved: 0,
            }
            .as_bytes(),
        );
        name_offset += name.len();
    }

    // Names, without terminators.
    for (name, _, _) in &block.entries {
        out.write(name);
    }
}
