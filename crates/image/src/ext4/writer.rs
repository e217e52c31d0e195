//! Writes the metadata from begin to end.

use std::io::{self, Write};

use zerocopy::IntoBytes;

use super::{
    Plan, Refused,
    layout::{
        EXTRA_ISIZE, FIRST_INO, GroupDescriptor, INODE_SIZE, SUPERBLOCK_OFFSET, SuperBlock,
        superblock as sb,
    },
    node::Node,
};
use crate::BLOCK_SIZE;

const ZEROS: [u8; BLOCK_SIZE as usize] = [0; BLOCK_SIZE as usize];

pub(super) fn write<B: AsRef<[u8]>>(
    plan: &Plan<'_, B>,
    uuid: [u8; 16],
    out: &mut impl Write,
) -> io::Result<()> {
    let geometry = &plan.geometry;
    let inodes = &plan.source.inodes;
    let last = inodes.last_number();

    // The superblock, behind room for a boot loader.
    let descriptors = descriptors(plan);
    let free_blocks = descriptors.iter().map(|group| u32::from(group.free_blocks.get())).sum();
    out.write_all(&ZEROS[..SUPERBLOCK_OFFSET])?;
    out.write_all(super_block(plan, uuid, free_blocks).as_bytes())?;
    pad(SUPERBLOCK_OFFSET + size_of::<SuperBlock>(), out)?;

    // Group descriptors.
    out.write_all(descriptors.as_bytes())?;
    pad(descriptors.as_bytes().len(), out)?;

    // Bitmaps.
    for group in 0..geometry.groups {
        out.write_all(geometry.block_bitmap(group, &plan.used).bytes())?;
        out.write_all(geometry.inode_bitmap(group, last).bytes())?;
    }

    // The inode table. Its first number is 1; of the reserved ones only the root's is in use.
    let mut written = 0;
    for (position, number) in inodes.numbers().enumerate() {
        for _ in written + 1..number {
            out.write_all(&ZEROS[..INODE_SIZE as usize])?;
        }
        let (node, at) = node(plan, position)?;
        out.write_all(&node.encode(at, geometry.data as u32))?;
        written = number;
    }
    for _ in u64::from(written)..geometry.groups * geometry.inodes_per_group {
        out.write_all(&ZEROS[..INODE_SIZE as usize])?;
    }

    // Content: attributes, extent trees, directories and long links, inode by inode.
    for position in inodes.placement() {
        let (node, at) = node(plan, position)?;
        node.blocks(at, geometry.data as u32, |block| {
            out.write_all(block)?;
            pad(block.len(), out)
        })?;
    }
    for _ in geometry.content_end..geometry.data {
        out.write_all(&ZEROS)?;
    }
    Ok(())
}

/// The inode at `position` with the first of its blocks of metadata.
fn node<'a, B: AsRef<[u8]>>(plan: &'a Plan<'_, B>, position: usize) -> io::Result<(Node<'a>, u32)> {
    let node = plan.source.node(position).map_err(|failure| {
        let refused: Refused = plan.source.refused(position, failure);
        io::Error::new(io::ErrorKind::InvalidData, refused)
    })?;
    let start = plan.starts.get(position).copied().unwrap_or_default();
    Ok((node, plan.geometry.content as u32 + start))
}

/// Fills the block that ends with a part of `len` bytes.
fn pad(len: usize, out: &mut impl Write) -> io::Result<()> {
    let rest = len.next_multiple_of(ZEROS.len()) - len;
    out.write_all(&ZEROS[..rest])
}

fn descriptors<B: AsRef<[u8]>>(plan: &Plan<'_, B>) -> Vec<GroupDescriptor> {
    let geometry = &plan.geometry;
    let inodes = &plan.source.inodes;
    let last = inodes.last_number();
    let mut directories = vec![0_u16; geometry.groups as usize];
    for number in inodes.directories().filter_map(|directory| inodes.number(directory)) {
        let group = u64::from(number - 1) / geometry.inodes_per_group;
        if let Some(count) = directories.get_mut(group as usize) {
            *count += 1;
        }
    }
    let table_blocks = geometry.inodes_per_group * INODE_SIZE / BLOCK_SIZE;
    (0..)
        .zip(directories)
        .map(|(group, used_dirs)| GroupDescriptor {
            block_bitmap: ((geometry.bitmaps + 2 * group) as u32).into(),
            inode_bitmap: ((geometry.bitmaps + 2 * group + 1) as u32).into(),
            inode_table: ((geometry.table + table_blocks * group) as u32).into(),
            free_blocks: geometry.block_bitmap(group, &plan.used).free().into(),
            free_inodes: geometry.inode_bitmap(group, last).free().into(),
            used_dirs: used_dirs.into(),
            flags: 0.into(),
            unused: [0; 12],
        })
        .collect()
}

fn super_block<B>(plan: &Plan<'_, B>, uuid: [u8; 16], free_blocks: u32) -> SuperBlock {
    let geometry = &plan.geometry;
    let inodes = geometry.groups * geometry.inodes_per_group;
    let log_block_size = BLOCK_SIZE.ilog2() - 10;
    SuperBlock {
        inodes_count: (inodes as u32).into(),
        blocks_count: (geometry.total as u32).into(),
        reserved_blocks: 0.into(),
        free_blocks: free_blocks.into(),
        free_inodes: (inodes as u32 - plan.source.inodes.last_number()).into(),
        first_data_block: 0.into(),
        log_block_size: log_block_size.into(),
        log_cluster_size: log_block_size.into(),
        blocks_per_group: (geometry.blocks_per_group as u32).into(),
        clusters_per_group: (geometry.blocks_per_group as u32).into(),
        inodes_per_group: (geometry.inodes_per_group as u32).into(),
        mount_time: 0.into(),
        write_time: 0.into(),
        mount_count: 0.into(),
        max_mount_count: u16::MAX.into(),
        magic: sb::MAGIC.into(),
        state: sb::CLEAN.into(),
        errors: sb::CONTINUE.into(),
        minor_rev_level: 0.into(),
        last_check: 0.into(),
        check_interval: 0.into(),
        creator_os: 0.into(),
        rev_level: sb::DYNAMIC.into(),
        reserved_uid: 0.into(),
        reserved_gid: 0.into(),
        first_ino: FIRST_INO.into(),
        inode_size: (INODE_SIZE as u16).into(),
        block_group: 0.into(),
        feature_compat: if plan.is_indexed { sb::COMPAT | sb::DIR_INDEX } else { sb::COMPAT }
            .into(),
        feature_incompat: sb::INCOMPAT.into(),
        feature_ro_compat: sb::RO_COMPAT.into(),
        uuid,
        unused_0x78: [0; 0xec - 0x78],
        hash_seed: [0.into(); 4],
        def_hash_version: sb::HASH_TEA,
        unused_0xfd: [0; 3],
        default_mount_opts: sb::XATTR_AND_ACL.into(),
        unused_0x104: [0; 0x15c - 0x104],
        min_extra_isize: EXTRA_ISIZE.into(),
        want_extra_isize: EXTRA_ISIZE.into(),
        flags: sb::UNSIGNED_HASH.into(),
        unused_0x164: [0; 0x174 - 0x164],
        log_groups_per_flex: 4,
        unused_0x175: [0; 1024 - 0x175],
    }
}
