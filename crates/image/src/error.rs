//! Format errors: the structure, the place in it, and the problem.

use std::{borrow::Cow, fmt};

use crate::Digest;

/// A part of an image that breaks the format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{object} at byte {offset}: {problem}")]
pub struct FormatError {
    /// The structure.
    pub object: Structure,
    /// The structure's offset in its file.
    pub offset: u64,
    /// The problem at that place.
    pub problem: Problem,
}

impl FormatError {
    /// An error about the structure `object` that starts at `offset`.
    pub fn new(object: impl Into<Structure>, offset: u64, problem: impl Into<Problem>) -> Self {
        FormatError { object: object.into(), offset, problem: problem.into() }
    }
}

/// A problem with a structure: the value found, and the one expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// It reaches beyond the bytes that there are.
    #[error("{len} bytes do not fit in {available}")]
    OutOfBounds {
        /// Its bytes.
        len: u64,
        /// Bytes of the whole file or table.
        available: u64,
    },
    /// Upstream's format has it, and this version does not read it.
    #[error("{0} is not supported")]
    Unsupported(Cow<'static, str>),
    /// There is more of something than the format, or this version, allows.
    #[error("{found} {what}, at most {limit} are possible")]
    TooMany {
        /// The kind of items counted.
        what: &'static str,
        /// Their number.
        found: u64,
        /// The maximum number.
        limit: u64,
    },
    /// Structures, or chunks, that must lie apart claim the same bytes.
    #[error("{0} overlap")]
    Overlap(Cow<'static, str>),
    /// Something else that contradicts the format, or another structure.
    #[error("{0}")]
    Invalid(Cow<'static, str>),
}

impl Problem {
    /// A bit of a set of flags or features that this version does not support.
    pub(crate) fn unsupported(set: &str, bits: impl Into<u64>, what: &str) -> Self {
        Problem::Unsupported(format!("{set} {:#x}: {what}", bits.into()).into())
    }

    /// The same, with the part of the structure that has it.
    pub(crate) fn of(self, part: impl fmt::Display) -> Self {
        let with = |text| format!("{part}: {text}").into();
        match self {
            Problem::Unsupported(text) => Problem::Unsupported(with(text)),
            Problem::Overlap(text) => Problem::Overlap(with(text)),
            problem => Problem::Invalid(with(problem.to_string().into())),
        }
    }
}

impl From<String> for Problem {
    fn from(text: String) -> Self {
        Problem::Invalid(text.into())
    }
}

impl From<&'static str> for Problem {
    fn from(text: &'static str) -> Self {
        Problem::Invalid(text.into())
    }
}

/// A structure of the format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Structure {
    /// A structure that an image has once: `superblock`.
    Only(&'static str),
    /// An entry of a table: `chunk table entry 7`.
    Numbered(&'static str, u64),
    /// A structure that each blob has: `blob sha256:…`.
    OfBlob(&'static str, Digest),
    /// A structure that belongs to an inode: `chunk indexes of inode 128`.
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
