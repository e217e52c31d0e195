//! Errors of the format: which structure, where, and what is wrong.

use std::fmt;

use crate::Digest;

/// A part of an image that breaks the format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{object} at byte {offset}: {problem}")]
pub struct FormatError {
    /// Which structure it is.
    pub object: Structure,
    /// Where it starts in its file.
    pub offset: u64,
    /// What was found and what was expected.
    pub problem: String,
}

impl FormatError {
    /// An error about the structure `object` that starts at `offset`.
    pub fn new(object: impl Into<Structure>, offset: u64, problem: impl Into<String>) -> Self {
        FormatError { object: object.into(), offset, problem: problem.into() }
    }
}

/// A structure of the format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Structure {
    /// The only one of its kind: `superblock`.
    Only(&'static str),
    /// One of several: `chunk table entry 7`.
    Numbered(&'static str, u64),
    /// The one of a blob: `blob sha256:…`.
    OfBlob(&'static str, Digest),
    /// What an inode has besides itself: `chunk indexes of inode 128`.
    OfInode(&'static str, u64),
    /// A file of the tree that an image is made from.
    File(String),
}

impl fmt::Display for Structure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Structure::Only(name) => f.write_str(name),
            Structure::Numbered(name, number) => write!(f, "{name} {number}"),
            Structure::OfBlob(name, blob) => write!(f, "{name} {blob}"),
            Structure::OfInode(name, number) => write!(f, "{name} of inode {number}"),
            Structure::File(path) => write!(f, "file `{path}`"),
        }
    }
}

impl From<&'static str> for Structure {
    fn from(name: &'static str) -> Self {
        Structure::Only(name)
    }
}

/// The number fits: no table of an image has more than 2^64 rows.
impl From<(&'static str, usize)> for Structure {
    fn from((name, number): (&'static str, usize)) -> Self {
        Structure::Numbered(name, number as u64)
    }
}

impl From<(&'static str, u32)> for Structure {
    fn from((name, number): (&'static str, u32)) -> Self {
        Structure::Numbered(name, number.into())
    }
}

impl From<(&'static str, u64)> for Structure {
    fn from((name, number): (&'static str, u64)) -> Self {
        Structure::Numbered(name, number)
    }
}

impl From<(&'static str, Digest)> for Structure {
    fn from((name, blob): (&'static str, Digest)) -> Self {
        Structure::OfBlob(name, blob)
    }
}
