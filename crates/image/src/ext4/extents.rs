//! Runs of blocks, and the trees that hold them.

use zerocopy::IntoBytes;

use super::layout::{EXTENT_MAGIC, ExtentHeader, ExtentIndex, ExtentLeaf};
use crate::{BLOCK_SIZE, FormatError, erofs::InodeView, rafs::Bootstrap};

/// Blocks of one extent: the kernel takes greater numbers for extents that are not written.
pub(super) const MAX_RUN: u32 = 32_768;
/// Entries of a node in the inode, which has 60 bytes.
const ROOT_ENTRIES: usize = 4;
/// Entries of a node that is a block.
const NODE_ENTRIES: usize = (BLOCK_SIZE as usize - 12) / 12;

/// Consecutive blocks of a file that are consecutive on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// The first one's number in the file.
    pub(super) logical: u32,
    /// The first one's number on the device, or in the blobs, see [`of_file`].
    pub(super) start: u32,
    /// `1..=MAX_RUN`.
    pub(super) len: u32,
}

/// The runs of a regular file of fewer than 2³² blocks. `bases` has the first block of each blob,
/// counted from the first blob's; so have the runs.
pub(super) fn of_file<B: AsRef<[u8]>>(
    bootstrap: &Bootstrap<B>,
    file: &InodeView,
    bases: &[u32],
) -> Result<Vec<Run>, FormatError> {
    let chunk_size = u64::from(bootstrap.chunk_size());
    let mut runs: Vec<Run> = Vec::new();
    let mut offset = 0;
    for chunk in bootstrap.chunks(file.nid)? {
        let (chunk, decoded) = chunk?;
        let blob = usize::from(chunk.blob.0);
        let len = chunk_size.min(file.size - offset);
        // A chunk of a later file may follow at the next block, and no block lies behind the blob.
        let (Some(base), Some(found)) = (bases.get(blob), bootstrap.blobs().get(blob)) else {
            return Err(file.error(format!("no blob {blob}")));
        };
        if decoded.0.saturating_add(len) > found.decoded_size {
            return Err(file.error(format!("the chunk at byte {offset} ends after its blob")));
        }
        let piece = Run {
            logical: (offset / BLOCK_SIZE) as u32,
            start: base + (decoded.0 / BLOCK_SIZE) as u32,
            len: len.div_ceil(BLOCK_SIZE) as u32,
        };
        match runs.last_mut() {
            Some(last)
                if last.start + last.len == piece.start && last.len + piece.len <= MAX_RUN =>
            {
                last.len += piece.len;
            }
            _ => runs.push(piece),
        }
        offset += len;
    }
    Ok(runs)
}

/// The runs of `blocks` blocks from `start` on the device.
pub(super) fn consecutive(start: u32, blocks: u32) -> Vec<Run> {
    let logical = (0..blocks).step_by(MAX_RUN as usize);
    let run = |logical| Run { logical, start: start + logical, len: MAX_RUN.min(blocks - logical) };
    logical.map(run).collect()
}

/// Blocks that the nodes of a tree of `runs` runs take.
pub(super) fn node_blocks(mut runs: usize) -> u32 {
    let mut blocks = 0;
    while runs > ROOT_ENTRIES {
        runs = runs.div_ceil(NODE_ENTRIES);
        blocks += runs as u32;
    }
    blocks
}

/// An extent tree.
pub(super) struct ExtentTree {
    /// The root, for the inode.
    pub(super) root: Vec<u8>,
    /// The other nodes, a block each, as they lie from [`ExtentTree::build`]'s `at` on.
    pub(super) nodes: Vec<Vec<u8>>,
}

impl ExtentTree {
    /// Builds the tree of `runs`, with its nodes in the blocks from `at` on: leaves first.
    pub(super) fn build(runs: &[Run], at: u32) -> Self {
        let mut entries: Vec<(u32, [u8; 12])> = runs.iter().map(leaf).collect();
        let mut nodes = Vec::new();
        let mut depth = 0;
        while entries.len() > ROOT_ENTRIES {
            let level = entries.chunks(NODE_ENTRIES).map(|entries| {
                let number = at + nodes.len() as u32;
                nodes.push(node(entries, NODE_ENTRIES, depth));
                index(entries.first().map_or(0, |(logical, _)| *logical), number)
            });
            entries = level.collect();
            depth += 1;
        }
        ExtentTree { root: node(&entries, ROOT_ENTRIES, depth), nodes }
    }
}

fn leaf(run: &Run) -> (u32, [u8; 12]) {
    let entry = ExtentLeaf {
        logical: run.logical.into(),
        len: (run.len as u16).into(),
        start_high: 0.into(),
        start: run.start.into(),
    };
    (run.logical, zerocopy::transmute!(entry))
}

fn index(logical: u32, node: u32) -> (u32, [u8; 12]) {
    let entry = ExtentIndex {
        logical: logical.into(),
        node: node.into(),
        node_high: 0.into(),
        unused: 0.into(),
    };
    (logical, zerocopy::transmute!(entry))
}

fn node(entries: &[(u32, [u8; 12])], max: usize, depth: u16) -> Vec<u8> {
    let header = ExtentHeader {
        magic: EXTENT_MAGIC.into(),
        entries: (entries.len() as u16).into(),
        max: (max as u16).into(),
        depth: depth.into(),
        generation: 0.into(),
    };
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend(entries.iter().flat_map(|(_, entry)| entry));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_are_as_deep_as_needed() {
        for (runs, depth, blocks) in [
            (0, 0, 0),
            (4, 0, 0),
            (5, 1, 1),
            (340, 1, 1),
            (341, 1, 2),
            (1360, 1, 4),
            (1361, 2, 6),
            (4 * 340 * 340, 2, 1364),
            (4 * 340 * 340 + 1, 3, 1367),
        ] {
            let all: Vec<Run> = (0..runs)
                .map(|number| Run { logical: number, start: 2 * number, len: 1 })
                .collect();
            let tree = ExtentTree::build(&all, 1000);
            assert_eq!(tree.root[6], depth, "{runs}");
            assert_eq!(tree.nodes.len(), blocks, "{runs}");
            assert_eq!(node_blocks(runs as usize) as usize, blocks, "{runs}");
            assert_eq!(leaves(&tree.root, &tree.nodes), all, "{runs}");
        }
    }

    /// The runs below a node, as a reader finds them.
    fn leaves(node: &[u8], nodes: &[Vec<u8>]) -> Vec<Run> {
        let number = |at: usize| u32::from_le_bytes(node[at..at + 4].try_into().unwrap());
        let half = |at: usize| u16::from_le_bytes(node[at..at + 2].try_into().unwrap());
        assert_eq!((half(0), number(8)), (EXTENT_MAGIC, 0));
        let entries = (1..=usize::from(half(2))).map(|entry| entry * 12);
        let below = |at: usize| match half(6) {
            0 => {
                let (logical, len, start) = (number(at), half(at + 4).into(), number(at + 8));
                vec![Run { logical, start, len }]
            }
            _ => {
                let found = leaves(&nodes[number(at + 4) as usize - 1000], nodes);
                assert_eq!(found[0].logical, number(at));
                found
            }
        };
        entries.flat_map(below).collect()
    }

    #[test]
    fn long_runs_are_cut() {
        let run = |logical, len| Run { logical, start: 7 + logical, len };
        assert_eq!(consecutive(7, 0), []);
        assert_eq!(consecutive(7, 32_768), [run(0, 32_768)]);
        assert_eq!(consecutive(7, 65_537), [run(0, 32_768), run(32_768, 32_768), run(65_536, 1)]);
    }
}
