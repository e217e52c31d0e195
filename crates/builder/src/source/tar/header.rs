//! The fixed 512 bytes before every member of an archive.

use super::number;

/// Bytes per tar block.
pub(super) const BLOCK: usize = 512;

/// A header block with a correct checksum.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header<'a>(&'a [u8; BLOCK]);

/// Why a block is not a header.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a tar header with checksum {expected:o} was expected, its bytes add up to {actual:o}")]
pub(super) struct BadChecksum {
    /// The checksum in the block.
    pub(super) expected: i64,
    /// The checksum of its bytes.
    pub(super) actual: u64,
}

impl<'a> Header<'a> {
    /// Checks the sum of the block. Old writers added up signed bytes; both sums are right.
    pub(super) fn new(block: &'a [u8; BLOCK]) -> Result<Self, BadChecksum> {
        let sum = |value: fn(u8) -> i64| -> i64 {
            let around = block[..148].iter().chain(&block[156..]).map(|&byte| value(byte));
            around.sum::<i64>() + 8 * i64::from(b' ')
        };
        let unsigned = sum(i64::from);
        let expected = number::parse(&block[148..156]).unwrap_or(-1);
        if expected == unsigned || expected == sum(|byte| i64::from(byte as i8)) {
            return Ok(Header(block));
        }
        Err(BadChecksum { expected: expected.max(0), actual: unsigned.unsigned_abs() })
    }

    /// Type of the member.
    pub(super) fn kind(&self) -> u8 {
        self.0[156]
    }

    /// The name, with the prefix field of POSIX headers before it.
    pub(super) fn name(&self) -> Vec<u8> {
        let name = text(&self.0[..100]);
        let prefix = text(self.prefix());
        if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() }
    }

    /// Target of a hard or symbolic link.
    pub(super) fn link_name(&self) -> &'a [u8] {
        text(&self.0[157..257])
    }

    /// The prefix field. GNU headers use its bytes for other fields, and star keeps two times at
    /// its end.
    fn prefix(&self) -> &'a [u8] {
        let posix = &self.0[257..263] == b"ustar\0";
        let star = &self.0[508..512] == b"tar\0";
        match (posix, star) {
            (false, _) => &[],
            (true, true) => &self.0[345..476],
            (true, false) => &self.0[345..500],
        }
    }

    /// Returns whether owner names, device numbers and the like exist; archives of 1979 have none.
    pub(super) fn has_ustar_fields(&self) -> bool {
        &self.0[257..262] == b"ustar"
    }

    /// Name of the owner.
    pub(super) fn user_name(&self) -> &'a [u8] {
        text(&self.0[265..297])
    }

    /// Name of the group.
    pub(super) fn group_name(&self) -> &'a [u8] {
        text(&self.0[297..329])
    }

    /// Raw number fields, for [`number::parse`].
    pub(super) fn mode(&self) -> &'a [u8] {
        &self.0[100..108]
    }

    /// Owner.
    pub(super) fn uid(&self) -> &'a [u8] {
        &self.0[108..116]
    }

    /// Group.
    pub(super) fn gid(&self) -> &'a [u8] {
        &self.0[116..124]
    }

    /// Bytes of content.
    pub(super) fn size(&self) -> &'a [u8] {
        &self.0[124..136]
    }

    /// Seconds since 1970.
    pub(super) fn mtime(&self) -> &'a [u8] {
        &self.0[136..148]
    }

    /// Major device number.
    pub(super) fn device_major(&self) -> &'a [u8] {
        &self.0[329..337]
    }

    /// Minor device number.
    pub(super) fn device_minor(&self) -> &'a [u8] {
        &self.0[337..345]
    }

    /// The four places for sparse segments in an old GNU header of type `S`.
    pub(super) fn sparse_segments(&self) -> &'a [u8] {
        &self.0[386..482]
    }

    /// Returns whether blocks with more sparse segments follow an old GNU header of type `S`.
    pub(super) fn sparse_continues(&self) -> bool {
        self.0[482] != 0
    }

    /// Bytes in the file of an old GNU header of type `S`, holes included.
    pub(super) fn sparse_size(&self) -> &'a [u8] {
        &self.0[483..495]
    }
}

/// A text field up to its first NUL.
fn text(field: &[u8]) -> &[u8] {
    field.split(|&byte| byte == 0).next().unwrap_or_default()
}
