//! Where the parts of the metadata lie, and how blocks and inodes are divided into groups.

use super::layout::{BITS_PER_BLOCK, GroupDescriptor, INODE_SIZE};
use crate::BLOCK_SIZE;

/// Inodes in a block.
const INODES_PER_BLOCK: u64 = BLOCK_SIZE / INODE_SIZE;
/// With so few blocks per group there are enough groups for the inodes: each has at most 32,768,
/// whose part of the table is so many blocks.
const MIN_GROUP: u64 = BITS_PER_BLOCK / INODES_PER_BLOCK;

/// The parts of the metadata are, in blocks: the superblock, descriptors of groups, for each group
/// the bitmaps of its blocks and of its inodes, the inode table, content (directories, long links,
/// attributes, extent trees), and padding that is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) groups: u64,
    pub(super) blocks_per_group: u64,
    /// A multiple of 16: a group's part of the table is whole blocks.
    pub(super) inodes_per_group: u64,
    /// First block of the bitmaps.
    pub(super) bitmaps: u64,
    /// First block of the inode table.
    pub(super) table: u64,
    /// First block of the content.
    pub(super) content: u64,
    /// First block behind the content.
    pub(super) content_end: u64,
    /// First block of the blobs.
    pub(super) data: u64,
    /// Blocks of the device; fewer than 2³².
    pub(super) total: u64,
}

impl Geometry {
    /// Finds room for inodes up to the number `inodes`, and for `content` and `data` blocks.
    ///
    /// # Errors
    /// The number of blocks, if there are 2³² or more.
    pub(super) fn new(inodes: u32, content: u64, data: u64) -> Result<Self, u64> {
        let inodes = u64::from(inodes);
        let mut blocks_per_group = BITS_PER_BLOCK;
        let mut groups = 1;
        loop {
            let found = Self::with(groups, blocks_per_group, inodes, content, data);
            if u32::try_from(found.total).is_err() {
                return Err(found.total);
            }
            // The kernel counts groups by blocks.
            let needed = found.total.div_ceil(blocks_per_group);
            if needed > groups {
                groups = needed;
            } else if found.inodes_per_group > BITS_PER_BLOCK && blocks_per_group > MIN_GROUP {
                blocks_per_group /= 2;
            } else {
                return Ok(found);
            }
        }
    }

    fn with(groups: u64, blocks_per_group: u64, inodes: u64, content: u64, data: u64) -> Self {
        let inodes_per_group =
            inodes.div_ceil(groups).next_multiple_of(INODES_PER_BLOCK).max(INODES_PER_BLOCK);
        let descriptors = (groups * size_of::<GroupDescriptor>() as u64).div_ceil(BLOCK_SIZE);
        let bitmaps = 1 + descriptors;
        let table = bitmaps + 2 * groups;
        let content_at = table + groups * (inodes_per_group / INODES_PER_BLOCK);
        let content_end = content_at + content;
        // One group more can make the inode table some blocks shorter, so that the last group would
        // have no block.
        let least = (groups - 1) * blocks_per_group + 1;
        let data_at = content_end + least.saturating_sub(content_end + data);
        Geometry {
            groups,
            blocks_per_group,
            inodes_per_group,
            bitmaps,
            table,
            content: content_at,
            content_end,
            data: data_at,
            total: data_at + data,
        }
    }

    /// Blocks of the metadata.
    pub(super) fn metadata(&self) -> u64 {
        self.data
    }

    /// The bitmap of the inodes of `group`, with those up to the number `last` in use.
    pub(super) fn inode_bitmap(&self, group: u64, last: u32) -> Bitmap {
        let mut bitmap = Bitmap::new(group * self.inodes_per_group, self.inodes_per_group);
        bitmap.mark(0, last.into());
        bitmap
    }

    /// The bitmap of the blocks of `group`. `used` has the blocks of blobs that are in use, as
    /// first and end counted from the first blob's, in order.
    pub(super) fn block_bitmap(&self, group: u64, used: &[(u32, u32)]) -> Bitmap {
        let first = group * self.blocks_per_group;
        let end = first + self.blocks_per_group;
        let mut bitmap = Bitmap::new(first, self.blocks_per_group);
        bitmap.mark(0, self.content_end);
        bitmap.mark(self.total, u64::MAX);
        let place = |block: u32| self.data + u64::from(block);
        let at = used.partition_point(|(_, end)| place(*end) <= first);
        let here = used.iter().skip(at).take_while(|(start, _)| place(*start) < end);
        for (start, end) in here {
            bitmap.mark(place(*start), place(*end));
        }
        bitmap
    }
}

/// A bitmap in its block. Bits behind the last number of the group are 1.
pub(super) struct Bitmap {
    bits: [u8; BLOCK_SIZE as usize],
    /// The number of bit 0.
    first: u64,
    len: u64,
}

impl Bitmap {
    fn new(first: u64, len: u64) -> Self {
        let mut bitmap = Bitmap { bits: [0; BLOCK_SIZE as usize], first, len: BITS_PER_BLOCK };
        bitmap.mark(first + len, u64::MAX);
        bitmap.len = len;
        bitmap
    }

    /// Sets the bits of the numbers from `start` to before `end`, as far as they are here.
    fn mark(&mut self, start: u64, end: u64) {
        let mut at = start.saturating_sub(self.first).min(self.len);
        let end = end.saturating_sub(self.first).min(self.len);
        while at < end {
            let (from, to) = (at % 8, (end - at + at % 8).min(8));
            let mask = (0xff_u16 >> (8 - to)) & (0xff << from);
            if let Some(byte) = self.bits.get_mut((at / 8) as usize) {
                *byte |= mask as u8;
            }
            at += to - from;
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bits
    }

    /// Numbers that are not in use.
    pub(super) fn free(&self) -> u16 {
        let used: u32 = self.bits.iter().map(|byte| byte.count_ones()).sum();
        (BITS_PER_BLOCK - u64::from(used)) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_group_has_blocks_and_room_for_its_inodes() {
        let steps = [0, 1, 100, 2000, 32_760, 32_768, 70_000, 1_000_000];
        for inodes in (11..3000).chain((1..80).map(|n| n * 32_768 - 5)).chain([40_000_000]) {
            for content in steps {
                for data in steps {
                    let found = Geometry::new(inodes, content, data).unwrap();
                    let Geometry { groups, blocks_per_group, inodes_per_group, .. } = found;
                    assert_eq!(found.total.div_ceil(blocks_per_group), groups, "{found:?}");
                    assert!(inodes_per_group <= BITS_PER_BLOCK, "{found:?}");
                    assert!(groups * inodes_per_group >= inodes.into(), "{found:?}");
                    assert_eq!(found.content_end - found.content, content, "{found:?}");
                    assert!(found.data - found.content_end <= groups, "{found:?}");
                    assert_eq!(found.total - found.data, data, "{found:?}");
                }
            }
        }
    }

    #[test]
    fn blocks_are_numbered_in_32_bits() {
        let most = u64::from(u32::MAX);
        let metadata = Geometry::new(11, 0, most - 500_000).unwrap().metadata();
        assert!(metadata > 393_216, "{metadata}");
        for data in [most - 1000, most, most + 1, 1 << 40] {
            assert!(Geometry::new(11, 0, data).unwrap_err() > most);
        }
    }

    #[test]
    fn bitmaps_have_what_is_used_and_what_does_not_exist() {
        let geometry = Geometry::new(20, 3, 40_000).unwrap();
        assert_eq!(geometry.groups, 2);
        let first = geometry.data as u32;
        let border = 32_768 - first;
        let used = [(0, 5), (border - 3, border + 2), (39_999, 40_000)];
        let [low, high] = [0, 1].map(|group| geometry.block_bitmap(group, &used));
        assert_eq!(u32::from(low.free()), 32_768 - first - 5 - 3);
        assert_eq!(u64::from(high.free()), geometry.total - 32_768 - 2 - 1);
        assert_eq!(high.bytes()[..2], [3, 0]);
        // 16 inodes per group.
        assert_eq!(geometry.inode_bitmap(0, 20).free(), 0);
        let inodes = geometry.inode_bitmap(1, 20);
        assert_eq!(inodes.bytes()[..3], [0x0f, 0, 0xff]);
        assert_eq!(inodes.free(), 12);
    }
}
