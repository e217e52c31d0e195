//! EROFS: inodes, directories and extended attributes, as far as RAFS v6 uses them.

pub mod layout;

pub(crate) mod dir;
pub(crate) mod plan;
pub(crate) mod reader;
pub(crate) mod writer;

pub use dir::{DirEntry, ReadDir};
pub use reader::{InodeView, Xattr};

use std::fmt;

/// An inode's number: its place in the inode area, in units of 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nid(pub u64);

impl fmt::Display for Nid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "inode {}", self.0)
    }
}

/// The type of a file. The discriminants are those of directory entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileType {
    /// Regular file.
    Regular = 1,
    /// Directory.
    Directory = 2,
    /// Character device.
    CharDevice = 3,
    /// Block device.
    BlockDevice = 4,
    /// Named pipe.
    Fifo = 5,
    /// Unix socket.
    Socket = 6,
    /// Symbolic link.
    Symlink = 7,
}

impl FileType {
    const ALL: [FileType; 7] = [
        FileType::Regular,
        FileType::Directory,
        FileType::CharDevice,
        FileType::BlockDevice,
        FileType::Fifo,
        FileType::Socket,
        FileType::Symlink,
    ];

    /// The S_IFMT bits of `st_mode`.
    pub const fn mode(self) -> u16 {
        match self {
            FileType::Fifo => 0o010_000,
            FileType::CharDevice => 0o020_000,
            FileType::Directory => 0o040_000,
            FileType::BlockDevice => 0o060_000,
            FileType::Regular => 0o100_000,
            FileType::Symlink => 0o120_000,
            FileType::Socket => 0o140_000,
        }
    }

    /// The type with these S_IFMT bits; other bits of `mode` are ignored.
    pub fn from_mode(mode: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.mode() == mode & 0o170_000)
    }

    /// The type with this number in a directory entry.
    pub fn from_dirent(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == number)
    }
}
