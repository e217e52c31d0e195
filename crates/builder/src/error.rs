//! Errors of a conversion.

use std::{io, path::PathBuf};

use lazuli_image::{Digest, FormatError, path::InvalidName};

use crate::entry::EntryPath;

/// Why an image could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A layer is damaged, hostile, or cannot be read.
    #[error("layer {layer}: {problem}")]
    Layer {
        /// [`crate::Layer::name`].
        layer: String,
        /// The problem with the layer.
        #[source]
        problem: SourceError,
    },
    /// An entry does not fit on top of the layers below.
    #[error("layer {layer}: entry `{entry}` at byte {offset}: {problem}")]
    Overlay {
        /// [`crate::Layer::name`].
        layer: String,
        /// Path of the entry.
        entry: EntryPath,
        /// Offset of the entry in the unpacked layer.
        offset: u64,
        /// The violated expectation.
        problem: OverlayProblem,
    },
    /// Another image cannot be made on this one.
    #[error("the base image {0}: make the new one with `lazuli convert`")]
    Base(&'static str),
    /// More layers or blobs than the format can address.
    #[error("the image has {count} {what}, expected at most {limit}")]
    TooMany {
        /// The kind of items counted.
        what: &'static str,
        /// The number.
        count: u64,
        /// The maximum number.
        limit: u64,
    },
    /// An option is out of range.
    #[error("{option} is {value}, expected {expected}")]
    Option {
        /// Name of the field in [`crate::Options`].
        option: &'static str,
        /// The value.
        value: i64,
        /// The allowed values.
        expected: &'static str,
    },
    /// The scratch directory cannot hold the image while it is made.
    #[error(
        "cannot write to scratch directory {}: {problem}; it needs about as much space as the compressed image twice",
        path.display()
    )]
    Scratch {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        #[source]
        problem: io::Error,
    },
    /// Fetched content does not match the chunk table.
    #[error("chunk {number} of blob {blob}: {problem}")]
    Content {
        /// Number of the chunk.
        number: u32,
        /// Its blob.
        blob: Digest,
        /// The value found, and the one expected.
        problem: String,
    },
    /// Images that are to become one are not alike.
    #[error("{image}: {what} is {found}, expected {expected} as in what is below it")]
    Unlike {
        /// The image, or the blob of it.
        image: String,
        /// The property that differs.
        what: &'static str,
        /// Its value in this image.
        found: String,
        /// Its value in the images below.
        expected: String,
    },
    /// The codec cannot be set up.
    #[error("cannot set up the compressor: {0}")]
    Compress(#[source] io::Error),
    /// The format cannot hold the tree.
    #[error("the image does not fit the format: {0}")]
    Format(#[from] FormatError),
}

/// A problem with a layer, and its place.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// An entry is wrong.
    #[error("entry `{entry}` at byte {offset}: {problem}")]
    Entry {
        /// Its name as found, bytes that are not printable ASCII escaped.
        entry: String,
        /// Offset in the unpacked layer.
        offset: u64,
        /// The value found, and the one expected.
        problem: String,
    },
    /// The archive is wrong where there is no entry with a name.
    #[error("byte {offset}: {problem}")]
    Archive {
        /// Offset in the unpacked layer.
        offset: u64,
        /// The value found, and the one expected.
        problem: String,
    },
    /// A file of a directory source cannot be read.
    #[error("cannot read {}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        problem: io::Error,
    },
    /// An image, taken as a layer, has a tree that is out of proportion.
    #[error("the paths of all its files have more than {limit} bytes")]
    Paths {
        /// The maximum number.
        limit: usize,
    },
    /// An image, taken as a layer, has a path that no layer can have.
    #[error("{path}: {problem}")]
    Path {
        /// Bytes that are not printable ASCII escaped.
        path: String,
        /// The value found, and the one expected.
        problem: String,
    },
    /// A recorded layer whose chunks are not all in the dictionary.
    #[error("{chunks} of its chunks are not in the dictionary")]
    NotStored {
        /// The number.
        chunks: usize,
    },
}

/// Why an entry does not apply to the layers below.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverlayProblem {
    /// The target of a hard link exists neither in this layer nor below.
    #[error("a hard link to `{0}`, which is neither in this layer nor in a lower one")]
    MissingTarget(EntryPath),
    /// Only files can have several names.
    #[error("a hard link to `{0}`, which is a directory")]
    DirectoryTarget(EntryPath),
    /// The root cannot be replaced.
    #[error("the root of an image must be a directory")]
    Root,
    /// Symbolic links on the way to the entry lead in circles.
    #[error("more than 40 symbolic links on the way to `{0}`")]
    Loop(EntryPath),
    /// Symbolic links lead to a place that is deeper than a path may be.
    #[error("more than {max} directories deep", max = EntryPath::MAX_DEPTH)]
    TooDeep,
    /// A symbolic link on the way has a target with an impossible name in it.
    #[error("a symbolic link on the way: {0}")]
    Name(InvalidName),
}
