//! Extended attributes: in the inode or in one block.

use zerocopy::IntoBytes;

use super::{
    Unfit,
    layout::{EXTRA_ISIZE, INODE_SIZE, XATTR_MAGIC, XattrBlockHeader, XattrEntry},
};
use crate::{BLOCK_SIZE, erofs::Xattr, erofs::layout::XATTR_PREFIXES};

/// Bytes behind the magic number in an inode.
const INODE_AREA: usize = INODE_SIZE as usize - 128 - EXTRA_ISIZE as usize - 4;
/// Bytes behind the header of a block.
const BLOCK_AREA: usize = BLOCK_SIZE as usize - size_of::<XattrBlockHeader>();
/// Prefix numbers that are whole names of ACLs. The others are `user.` 1, `trusted.` 4 and
/// `security.` 6, all as in EROFS.
const ACLS: std::ops::RangeInclusive<u8> = 2..=3;

/// An inode's extended attributes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Attributes {
    None,
    /// What follows the inode's fields.
    Inode(Vec<u8>),
    /// A block.
    Block(Vec<u8>),
}

/// An attribute as ext4 has it.
struct Attribute<'a> {
    /// The number of the name's prefix.
    index: u8,
    /// The name without the prefix.
    name: &'a [u8],
    value: Vec<u8>,
}

impl Attributes {
    /// Encodes attributes by full name. Takes the inode if all of them fit there.
    pub(super) fn encode(xattrs: &[Xattr<'_>]) -> Result<Self, Unfit> {
        if xattrs.is_empty() {
            return Ok(Attributes::None);
        }
        let attributes = xattrs.iter().map(|(name, value)| Attribute::new(name, value));
        let mut attributes = attributes.collect::<Result<Vec<_>, _>>()?;
        // The kernel finds a name in a block by its order: prefix, length, bytes.
        attributes.sort_by_key(|attribute| (attribute.index, attribute.name.len(), attribute.name));
        // Four zeros follow the last entry.
        let size = 4 + attributes.iter().map(Attribute::size).sum::<usize>();
        if size <= INODE_AREA {
            let area = area(&attributes, INODE_AREA, 0);
            return Ok(Attributes::Inode([&XATTR_MAGIC.to_le_bytes()[..], &area].concat()));
        }
        if size > BLOCK_AREA {
            return Err(Unfit::Attributes { size });
        }
        let hash = attributes
            .iter()
            .fold(0_u32, |hash, attribute| hash.rotate_left(16) ^ attribute.hash());
        let header = XattrBlockHeader {
            magic: XATTR_MAGIC.into(),
            references: 1.into(),
            blocks: 1.into(),
            hash: hash.into(),
            checksum: 0.into(),
            reserved: [0.into(); 3],
        };
        let area = area(&attributes, BLOCK_AREA, size_of::<XattrBlockHeader>());
        Ok(Attributes::Block([header.as_bytes(), &area].concat()))
    }
}

impl<'a> Attribute<'a> {
    fn new(full: &'a [u8], value: &[u8]) -> Result<Self, Unfit> {
        let known = XATTR_PREFIXES.iter().find_map(|(index, prefix)| {
            let name = full.strip_prefix(*prefix)?;
            (ACLS.contains(index) == name.is_empty()).then_some((*index, name))
        });
        let Some((index, name)) = known else {
            return Err(Unfit::AttributeName(full.escape_ascii().to_string()));
        };
        let value = if ACLS.contains(&index) {
            acl(value).ok_or_else(|| Unfit::Acl(full.escape_ascii().to_string()))?
        } else {
            value.to_vec()
        };
        Ok(Attribute { index, name, value })
    }

    fn size(&self) -> usize {
        size_of::<XattrEntry>()
            + self.name.len().next_multiple_of(4)
            + self.value.len().next_multiple_of(4)
    }

    /// The hash of name and value; `e2fsck` checks it.
    fn hash(&self) -> u32 {
        let name =
            self.name.iter().fold(0_u32, |hash, byte| hash.rotate_left(5) ^ u32::from(*byte));
        self.value.chunks(4).fold(name, |hash, piece| {
            let word = piece.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
            hash.rotate_left(16) ^ word
        })
    }
}

/// Entries from the begin on, values from the end on. Places of values are counted from `before`
/// bytes before the area.
fn area(attributes: &[Attribute<'_>], len: usize, before: usize) -> Vec<u8> {
    let mut area = Vec::with_capacity(len);
    let mut value_at = len;
    for attribute in attributes {
        value_at -= attribute.value.len().next_multiple_of(4);
        let entry = XattrEntry {
            name_len: attribute.name.len() as u8,
            name_index: attribute.index,
            value_offset: match attribute.value.len() {
                0 => 0,
                _ => (before + value_at) as u16,
            }
            .into(),
            value_inode: 0.into(),
            value_size: (attribute.value.len() as u32).into(),
            hash: attribute.hash().into(),
        };
        area.extend_from_slice(entry.as_bytes());
        area.extend_from_slice(attribute.name);
        area.resize(area.len().next_multiple_of(4), 0);
    }
    area.resize(value_at, 0);
    for attribute in attributes.iter().rev() {
        area.extend_from_slice(&attribute.value);
        area.resize(area.len().next_multiple_of(4), 0);
    }
    area
}

/// An ACL in ext4's version 1 from the version 2 of the attribute's value: only entries of named
/// users and groups have an id. `None` for a value that Linux would not show again.
fn acl(value: &[u8]) -> Option<Vec<u8>> {
    /// Tags of the entries of owner, owning group, mask and others.
    const SHORT: [u16; 4] = [0x01, 0x04, 0x10, 0x20];
    /// Tags of the entries of named users and groups.
    const LONG: [u16; 2] = [0x02, 0x08];
    let (version, entries) = value.split_first_chunk::<4>()?;
    let (entries, []) = entries.as_chunks::<8>() else { return None };
    if u32::from_le_bytes(*version) != 2 {
        return None;
    }
    let mut encoded = 1_u32.to_le_bytes().to_vec();
    let mut short = 0;
    for entry in entries {
        let (tag, _) = entry.split_first_chunk::<2>()?;
        let tag = u16::from_le_bytes(*tag);
        if SHORT.contains(&tag) {
            short += 1;
            encoded.extend_from_slice(entry.get(..4)?);
        } else if LONG.contains(&tag) {
            encoded.extend_from_slice(entry);
        } else {
            return None;
        }
    }
    // From the size the kernel concludes how many entries there are: up to four short ones, or four
    // and some long ones.
    let sound = if short == entries.len() { short <= 4 } else { short == 4 };
    sound.then_some(encoded)
}
