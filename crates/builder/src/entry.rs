//! Entries of layers, with normalized paths, as every source yields them.

use std::{collections::BTreeMap, fmt};

use lazuli_image::{
    ChunkRef, Metadata, Name,
    path::InvalidName,
    tree::{Device, Kind},
};
use serde::{Deserialize, Serialize};

/// One entry of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The entry's path in the tree.
    pub path: EntryPath,
    /// First byte of the entry in the unpacked archive, for messages; 0 for directory sources.
    pub offset: u64,
    /// Owner, permissions, time and extended attributes.
    pub metadata: Metadata,
    /// The type of the entry, with its data.
    pub kind: EntryKind,
}

/// The effect of an [`Entry`] at its path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryKind {
    /// A directory: merges with an existing one.
    Directory,
    /// A file with content.
    Regular {
        /// Bytes in the file.
        size: u64,
        /// The content, as [`ChunkRef`]s into the layer: `blob` is the layer and `number` counts
        /// the chunks of the layer. Empty until the content is cut.
        chunks: Vec<ChunkRef>,
    },
    /// Another name for the file at this path, in this layer or a lower one.
    HardLink(EntryPath),
    /// A symbolic link.
    Symlink(Box<[u8]>),
    /// A character device.
    CharDevice(Device),
    /// A block device.
    BlockDevice(Device),
    /// A named pipe.
    Fifo,
    /// A Unix socket.
    Socket,
    /// Hides the path in lower layers (the path is without the `.wh.`).
    Whiteout,
    /// Hides everything below the path in lower layers.
    Opaque,
}

impl EntryKind {
    /// Returns the tree node for this entry; `None` for links and whiteouts, which have no node.
    pub(crate) fn into_node(self) -> Option<Kind> {
        Some(match self {
            EntryKind::Directory => Kind::Directory(BTreeMap::new()),
            EntryKind::Regular { size, chunks } => Kind::Regular { size, chunks },
            EntryKind::Symlink(target) => Kind::Symlink(target),
            EntryKind::CharDevice(device) => Kind::CharDevice(device),
            EntryKind::BlockDevice(device) => Kind::BlockDevice(device),
            EntryKind::Fifo => Kind::Fifo,
            EntryKind::Socket => Kind::Socket,
            EntryKind::HardLink(_) | EntryKind::Whiteout | EntryKind::Opaque => return None,
        })
    }
}

/// A path from the root of the image: names joined by `/`, nothing before the first or after the
/// last, no `.` and no `..`. The root itself is the empty path.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct EntryPath(Box<[u8]>);

/// Why bytes are not an [`EntryPath`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPath {
    /// No bytes at all.
    #[error("the name is empty")]
    Empty,
    /// More than [`EntryPath::MAX`].
    #[error("the name has {0} bytes, expected at most {max}", max = EntryPath::MAX)]
    TooLong(usize),
    /// More than [`EntryPath::MAX_DEPTH`].
    #[error("the name is more than {max} directories deep", max = EntryPath::MAX_DEPTH)]
    TooDeep,
    /// A `..` component could lead out of the image.
    #[error("the name has a `..` component, which could lead out of the image")]
    Parent,
    /// A component that no directory can hold.
    #[error(transparent)]
    Name(#[from] InvalidName),
}

impl EntryPath {
    /// Longest path in bytes: Linux's PATH_MAX, so that whatever is in an image can also be opened
    /// in it.
    pub const MAX: usize = 4096;
    /// Deepest path in components. Linux has no such limit, but recursive walks of a tree need
    /// stack; real images stay below 40.
    pub const MAX_DEPTH: usize = 256;

    /// Cleans a path as tar does: leading `/` and `./`, doubled slashes and `.` components go.
    pub fn parse(raw: &[u8]) -> Result<Self, InvalidPath> {
        if raw.is_empty() {
            return Err(InvalidPath::Empty);
        }
        if raw.len() > Self::MAX {
            return Err(InvalidPath::TooLong(raw.len()));
        }
        let mut clean = Vec::with_capacity(raw.len());
        let mut depth = 0;
        for part in raw.split(|&byte| byte == b'/') {
            match part {
                b"" | b"." => continue,
                b".." => return Err(InvalidPath::Parent),
                _ => {}
            }
            Name::new(part)?;
            depth += 1;
            if depth > Self::MAX_DEPTH {
                return Err(InvalidPath::TooDeep);
            }
            if !clean.is_empty() {
                clean.push(b'/');
            }
            clean.extend_from_slice(part);
        }
        Ok(EntryPath(clean.into()))
    }

    /// The bytes, without a leading slash; empty for the root.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns whether this is the root of the image.
    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// The names from the root on.
    pub fn components(&self) -> impl DoubleEndedIterator<Item = &[u8]> {
        self.0.split(|&byte| byte == b'/').filter(|part| !part.is_empty())
    }

    /// The last name; empty for the root.
    pub fn last(&self) -> &[u8] {
        self.components().next_back().unwrap_or_default()
    }

    /// The directory that holds [`EntryPath::last`]; the root's is the root.
    pub fn parent(&self) -> EntryPath {
        let end = self.0.iter().rposition(|&byte| byte == b'/').unwrap_or(0);
        EntryPath(self.0[..end].into())
    }

    /// The path of `name` in this directory.
    pub fn join(&self, name: &[u8]) -> Result<EntryPath, InvalidPath> {
        EntryPath::parse(&[self.as_bytes(), b"/", name].concat())
    }
}

impl fmt::Display for EntryPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}", self.0.escape_ascii())
    }
}

impl fmt::Debug for EntryPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_normalized_as_tar_does() {
        for (raw, clean) in [
            ("a/b", "a/b"),
            ("./a//b/", "a/b"),
            ("/a/./b", "a/b"),
            ("./", ""),
            ("/", ""),
            (".", ""),
            ("./.hidden/...", ".hidden/..."),
        ] {
            assert_eq!(EntryPath::parse(raw.as_bytes()).unwrap().as_bytes(), clean.as_bytes());
        }
    }

    #[test]
    fn paths_that_leave_the_image_or_are_too_long_are_refused() {
        for raw in ["..", "../a", "a/..", "a/../b", "/..", "./.."] {
            assert_eq!(EntryPath::parse(raw.as_bytes()), Err(InvalidPath::Parent), "{raw}");
        }
        let deep = "d/".repeat(257);
        assert_eq!(EntryPath::parse(deep.as_bytes()), Err(InvalidPath::TooDeep));
        let long = "d/".repeat(2049);
        assert_eq!(EntryPath::parse(long.as_bytes()), Err(InvalidPath::TooLong(4098)));
        let name = format!("a/{}", "x".repeat(256));
        assert!(matches!(EntryPath::parse(name.as_bytes()), Err(InvalidPath::Name(_))));
        assert!(matches!(EntryPath::parse(b"a\0b"), Err(InvalidPath::Name(_))));
        assert_eq!(EntryPath::parse(b""), Err(InvalidPath::Empty));
    }

    #[test]
    fn a_path_is_its_parent_joined_with_its_last_name() {
        let path = EntryPath::parse(b"a/b/c").unwrap();
        assert_eq!((path.last(), path.parent().as_bytes()), (&b"c"[..], &b"a/b"[..]));
        assert_eq!(path.parent().join(b"c").unwrap(), path);
        let root = EntryPath::default();
        assert!(root.is_root() && root.parent().is_root() && root.last().is_empty());
        assert_eq!(root.join(b"x").unwrap().to_string(), "/x");
    }
}
