//! What is wrong with an image, and where.

/// A part of an image that breaks the format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{object} at byte {offset}: {problem}")]
pub struct FormatError {
    /// Which structure: `superblock`, `inode 128`, `chunk table entry 7`.
    pub object: String,
    /// Where it starts in its file.
    pub offset: u64,
    /// What was found and what was expected.
    pub problem: String,
}

impl FormatError {
    /// An error about the structure `object` that starts at `offset`.
    pub fn new(object: impl Into<String>, offset: u64, problem: impl Into<String>) -> Self {
        FormatError { object: object.into(), offset, problem: problem.into() }
    }
}
