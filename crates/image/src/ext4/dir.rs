//! Directories: lists of names, large ones with an index of their hashes.
//!
//! A file system that has an index anywhere costs all its directories of one block the kernel's
//! readahead, and a walk of one that is not cached a read for each. To find a name in a list the
//! kernel compares half of it, some microseconds for each block. So only directories of thousands
//! of names have an index.

use std::iter;

use zerocopy::IntoBytes;

use super::{
    hash::hash,
    layout::{Dirent, IndexCount, IndexInfo, superblock::HASH_TEA},
};
use crate::{BLOCK_SIZE, erofs::FileType};

const BLOCK: usize = BLOCK_SIZE as usize;
/// Blocks of the largest directory without an index: some 4,000 names.
pub(super) const MAX_LINEAR: u32 = 32;
/// Blocks of the largest directory: what the four extents in its inode reach. An index of two
/// levels, which kernels without the feature `largedir` stop at, would reach twice as far.
pub(super) const MAX_BLOCKS: usize = 4 * super::extents::MAX_RUN as usize;
/// Entries of an index in the first block, behind `.`, `..` and [`IndexInfo`].
const ROOT_ENTRIES: usize = (BLOCK - 32) / 8;
/// Entries of an index in other blocks, behind an empty directory entry.
const NODE_ENTRIES: usize = (BLOCK - 8) / 8;

/// A name in a directory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry<'a> {
    pub(super) name: &'a [u8],
    pub(super) ino: u32,
    pub(super) file_type: FileType,
}

impl Entry<'_> {
    /// Bytes without what the last entry of a block has behind it.
    fn size(&self) -> usize {
        (size_of::<Dirent>() + self.name.len()).next_multiple_of(4)
    }
}

/// A directory, distributed over blocks.
pub(super) struct Directory<'a> {
    dots: [Entry<'a>; 2],
    entries: Vec<Entry<'a>>,
    /// Behind each leaf's last entry, its place in `entries`.
    ends: Vec<usize>,
    /// The hash from which on a name is in the leaf; empty without an index.
    hashes: Vec<u32>,
}

impl<'a> Directory<'a> {
    /// Distributes `entries`, in the order of their names and without `.` and `..`.
    pub(super) fn new(ino: u32, parent: u32, entries: Vec<Entry<'a>>) -> Self {
        let dot = |name, ino| Entry { name, ino, file_type: FileType::Directory };
        let dots = [dot(&b"."[..], ino), dot(&b".."[..], parent)];
        // `.` and `..` take 12 bytes each.
        let ends = split(&entries, 24);
        if ends.len() <= MAX_LINEAR as usize {
            return Directory { dots, entries, ends, hashes: Vec::new() };
        }
        let mut hashed: Vec<(u32, Entry<'a>)> =
            entries.into_iter().map(|entry| (hash(entry.name), entry)).collect();
        hashed.sort_unstable_by_key(|(hash, entry)| (*hash, entry.name));
        let entries: Vec<Entry<'a>> = hashed.iter().map(|(_, entry)| *entry).collect();
        let ends = split(&entries, 0);
        let starts = iter::once(0).chain(ends.iter().copied());
        let hash_at = |at: usize| hashed.get(at).map_or(0, |(hash, _)| *hash);
        let hashes = starts.zip(&ends).map(|(start, _)| match start.checked_sub(1) {
            // Bit 0 tells a reader that looks for this hash in the leaf before to go on here.
            Some(before) if hash_at(before) == hash_at(start) => hash_at(start) | 1,
            _ => hash_at(start),
        });
        Directory { hashes: hashes.collect(), dots, entries, ends }
    }

    /// Number of blocks.
    pub(super) fn block_count(&self) -> usize {
        match self.hashes.len() {
            0 => self.ends.len(),
            leaves => 1 + self.node_count() + leaves,
        }
    }

    /// Blocks of the index but the first one.
    fn node_count(&self) -> usize {
        match self.hashes.len() {
            0..=ROOT_ENTRIES => 0,
            leaves => leaves.div_ceil(NODE_ENTRIES),
        }
    }

    /// The blocks in order: the index from its root on, then the leaves.
    pub(super) fn blocks(&self) -> impl Iterator<Item = Vec<u8>> + '_ {
        let linear = self.hashes.is_empty();
        let index = (!linear).then(|| self.index()).into_iter().flatten();
        let starts = iter::once(0).chain(self.ends.iter().copied());
        let leaves = starts.zip(&self.ends).map(move |(start, end)| {
            let dots = if linear && start == 0 { &self.dots[..] } else { &[] };
            let entries = self.entries.get(start..*end).unwrap_or_default();
            leaf(dots.iter().chain(entries))
        });
        index.chain(leaves)
    }

    fn index(&self) -> Vec<Vec<u8>> {
        let nodes = self.node_count();
        let first_leaf = 1 + nodes as u32;
        let leaves: Vec<(u32, u32)> = self.hashes.iter().copied().zip(first_leaf..).collect();
        let mut root = Vec::with_capacity(BLOCK);
        let [dot, dots] = &self.dots;
        put(&mut root, dot, dot.size());
        // The entry covers the whole index, so that it hides it from readers that know none.
        put(&mut root, dots, BLOCK - dot.size());
        let info = IndexInfo {
            reserved: 0.into(),
            hash_version: HASH_TEA,
            info_len: size_of::<IndexInfo>() as u8,
            levels: u8::from(nodes > 0),
            unused: 0,
        };
        root.extend_from_slice(info.as_bytes());
        if nodes == 0 {
            put_index(&mut root, &leaves, ROOT_ENTRIES);
            return vec![root];
        }
        let below: Vec<(u32, u32)> =
            self.hashes.iter().copied().step_by(NODE_ENTRIES).zip(1..).collect();
        put_index(&mut root, &below, ROOT_ENTRIES);
        let node = |leaves| {
            let head = Dirent {
                ino: 0.into(),
                record_len: (BLOCK as u16).into(),
                name_len: 0,
                file_type: 0,
            };
            let mut node = head.as_bytes().to_vec();
            put_index(&mut node, leaves, NODE_ENTRIES);
            node
        };
        iter::once(root).chain(leaves.chunks(NODE_ENTRIES).map(node)).collect()
    }
}

/// Fills blocks with `entries`, the first one from the byte `used` on, and returns where each ends.
fn split(entries: &[Entry<'_>], mut used: usize) -> Vec<usize> {
    let mut ends = Vec::new();
    for (at, entry) in entries.iter().enumerate() {
        if used + entry.size() > BLOCK {
            ends.push(at);
            used = 0;
        }
        used += entry.size();
    }
    ends.push(entries.len());
    ends
}

fn leaf<'a>(entries: impl Iterator<Item = &'a Entry<'a>>) -> Vec<u8> {
    let mut block = Vec::with_capacity(BLOCK);
    let mut entries = entries.peekable();
    while let Some(entry) = entries.next() {
        let len = if entries.peek().is_some() { entry.size() } else { BLOCK - block.len() };
        put(&mut block, entry, len);
    }
    block
}

/// Appends an entry that takes `len` bytes, without zeros behind the padding of its name.
fn put(block: &mut Vec<u8>, entry: &Entry<'_>, len: usize) {
    let head = Dirent {
        ino: entry.ino.into(),
        record_len: (len as u16).into(),
        name_len: entry.name.len() as u8,
        file_type: entry.file_type as u8,
    };
    block.extend_from_slice(head.as_bytes());
    block.extend_from_slice(entry.name);
    block.resize(block.len().next_multiple_of(4), 0);
}

/// Appends an index of hashes and blocks. The first hash is left out: what is smaller than the
/// second one is there.
fn put_index(block: &mut Vec<u8>, entries: &[(u32, u32)], limit: usize) {
    let count = IndexCount { limit: (limit as u16).into(), count: (entries.len() as u16).into() };
    for (at, (hash, target)) in entries.iter().enumerate() {
        match at {
            0 => block.extend_from_slice(count.as_bytes()),
            _ => block.extend_from_slice(&hash.to_le_bytes()),
        }
        block.extend_from_slice(&target.to_le_bytes());
    }
}
