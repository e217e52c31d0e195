//! The file tree of an image: what sources produce, the overlay merges, and the format stores.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{ChunkRef, Name};

/// Index of an inode in its [`Tree`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InodeId(pub u32);

/// A file tree. Several names may lead to the same inode: those are hard links.
#[derive(Clone, Debug)]
pub struct Tree {
    inodes: Vec<Inode>,
}

/// A file of any type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inode {
    /// Owner, permissions, time and extended attributes.
    pub metadata: Metadata,
    /// Type and content.
    pub kind: Kind,
}

/// Metadata that every type of file has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metadata {
    /// Permission bits including set-uid, set-gid and sticky: `0..=0o7777`, without the file type.
    pub permissions: u16,
    /// User ID of the owner.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
    /// Time of last modification.
    pub mtime: Mtime,
    /// Extended attributes, full name (`security.capability`) to value. ACLs are the attributes
    /// `system.posix_acl_access` and `system.posix_acl_default` in the kernel's binary form.
    pub xattrs: BTreeMap<Box<[u8]>, Box<[u8]>>,
}

/// A point in time. Seconds count from 1970 and may be negative; nanoseconds are added to them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Mtime {
    /// Seconds since 1970-01-01 00:00 UTC.
    pub seconds: i64,
    /// `0..1_000_000_000`.
    pub nanoseconds: u32,
}

/// The type of a file, with its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Children by name; `.` and `..` are implied.
    Directory(BTreeMap<Name, InodeId>),
    /// Content, cut at multiples of the image's chunk size: `ceil(size / chunk_size)` chunks, or
    /// fewer larger ones in images of [seekable layers](crate::seekable).
    Regular {
        /// Bytes in the file.
        size: u64,
        /// The pieces in file order.
        chunks: Vec<ChunkRef>,
    },
    /// Target of 1 to 4095 bytes, any bytes but NUL.
    Symlink(Box<[u8]>),
    /// Character device.
    CharDevice(Device),
    /// Block device.
    BlockDevice(Device),
    /// Named pipe.
    Fifo,
    /// Unix socket.
    Socket,
}

/// A device number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// `0..4096` (12 bits in Linux).
    pub major: u32,
    /// `0..1 << 20` (20 bits in Linux).
    pub minor: u32,
}

impl Device {
    /// Linux's 32-bit encoding (`new_encode_dev`), which EROFS stores.
    pub const fn encode(self) -> u32 {
        (self.minor & 0xff) | (self.major << 8) | ((self.minor & !0xff) << 12)
    }

    /// Reverse of [`Device::encode`].
    pub const fn decode(raw: u32) -> Self {
        Device { major: (raw >> 8) & 0xfff, minor: (raw & 0xff) | ((raw >> 12) & 0xfff00) }
    }
}

impl Kind {
    /// The S_IFMT bits of `st_mode`.
    pub const fn mode(&self) -> u16 {
        match self {
            Kind::Fifo => 0o010_000,
            Kind::CharDevice(_) => 0o020_000,
            Kind::Directory(_) => 0o040_000,
            Kind::BlockDevice(_) => 0o060_000,
            Kind::Regular { .. } => 0o100_000,
            Kind::Symlink(_) => 0o120_000,
            Kind::Socket => 0o140_000,
        }
    }
}

impl Tree {
    /// The root directory.
    pub const ROOT: InodeId = InodeId(0);

    /// A tree of just a root directory with the given metadata.
    pub fn new(root: Metadata) -> Self {
        Tree { inodes: vec![Inode { metadata: root, kind: Kind::Directory(BTreeMap::new()) }] }
    }

    /// Adds an inode that no name leads to yet.
    ///
    /// # Panics
    /// At 2³² inodes; sources stop long before.
    pub fn add(&mut self, inode: Inode) -> InodeId {
        let id = InodeId(u32::try_from(self.inodes.len()).expect("fewer than 2^32 inodes"));
        self.inodes.push(inode);
        id
    }

    /// Inodes ever added, also those that no name leads to any more.
    pub fn len(&self) -> usize {
        self.inodes.len()
    }

    /// Never true: there is always a root.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The children of `id` if it is a directory.
    pub fn children(&self, id: InodeId) -> Option<&BTreeMap<Name, InodeId>> {
        match &self[id].kind {
            Kind::Directory(children) => Some(children),
            _ => None,
        }
    }

    /// The children of `id`, to change them, if it is a directory.
    pub fn children_mut(&mut self, id: InodeId) -> Option<&mut BTreeMap<Name, InodeId>> {
        match &mut self[id].kind {
            Kind::Directory(children) => Some(children),
            _ => None,
        }
    }

    /// Follows names from the root; `None` when one does not exist. Does not follow symbolic links.
    pub fn find<'a>(&self, path: impl IntoIterator<Item = &'a [u8]>) -> Option<InodeId> {
        path.into_iter().try_fold(Self::ROOT, |at, name| self.children(at)?.get(name).copied())
    }
}

impl std::ops::Index<InodeId> for Tree {
    type Output = Inode;

    fn index(&self, id: InodeId) -> &Inode {
        &self.inodes[id.0 as usize]
    }
}

impl std::ops::IndexMut<InodeId> for Tree {
    fn index_mut(&mut self, id: InodeId) -> &mut Inode {
        &mut self.inodes[id.0 as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_are_encoded_as_linux_does() {
        let device = Device { major: 259, minor: 70_000 };
        assert_eq!(device.encode(), 0x1111_0370);
        assert_eq!(Device::decode(0x1111_0370), device);
    }
}
