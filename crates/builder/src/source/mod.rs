//! Sources of layers: tars, directories, images.

pub(crate) mod dir;
pub(crate) mod image;
mod marks;
pub(crate) mod stream;
pub mod tar;

use std::{fmt, io::Read, path::PathBuf};

pub(crate) use marks::SPACES;

use lazuli_image::Metadata;

use crate::{
    LayerContents,
    chunk::{CutError, Cutter},
    entry::{Entry, EntryKind, EntryPath},
    error::SourceError,
};

/// One layer of an image, lowest first.
#[derive(Debug)]
pub struct Layer {
    /// Its name in messages: a digest or a path.
    pub name: String,
    /// Bytes as stored, if known before reading; limits the unpacked size.
    pub stored_size: Option<u64>,
    /// The source of the content.
    pub source: LayerSource,
}

/// The source of a layer.
pub enum LayerSource {
    /// A tar archive: plain, gzip or zstd. It is read to the last byte, also behind the end of the
    /// archive, so that a reader that checks a digest sees all of it.
    Tar(Box<dyn Read + Send>),
    /// One file, byte for byte, at this path: a layer of an artifact, of a known size.
    File(String, Box<dyn Read + Send>),
    /// A directory on this machine. It holds no whiteouts: names that begin with `.wh.` are just
    /// names.
    Directory(PathBuf),
    /// The upper directory of an overlayfs: changes on top of the layers below, with overlayfs
    /// marks for removed files.
    Upper(PathBuf),
    /// It was read before, and all of its content is in the dictionary.
    Known(Box<LayerContents>),
}

impl fmt::Debug for LayerSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayerSource::Tar(_) => f.write_str("Tar"),
            LayerSource::File(path, _) => f.debug_tuple("File").field(path).finish(),
            LayerSource::Directory(path) => f.debug_tuple("Directory").field(path).finish(),
            LayerSource::Upper(path) => f.debug_tuple("Upper").field(path).finish(),
            LayerSource::Known(_) => f.write_str("Known"),
        }
    }
}

/// Why a layer was not read.
#[derive(Debug)]
pub(crate) enum ReadError {
    /// It is damaged or cannot be read.
    Source(SourceError),
    /// Another thread failed first.
    Stopped,
}

impl From<SourceError> for ReadError {
    fn from(error: SourceError) -> Self {
        ReadError::Source(error)
    }
}

/// Reads an archive to its end: content goes to `cutter`, entries are returned in order.
pub(crate) fn read_tar(
    raw: Box<dyn Read + Send>,
    stored_size: Option<u64>,
    cutter: &mut Cutter<'_>,
    on_read: &dyn Fn(u64),
) -> Result<Vec<Entry>, ReadError> {
    let unreadable = |offset| {
        move |error: std::io::Error| SourceError::Archive { offset, problem: error.to_string() }
    };
    let (reader, allowance) = stream::expand(raw, stored_size, on_read).map_err(unreadable(0))?;
    let mut archive = tar::Archive::new(reader);
    let mut entries = Vec::new();
    let mut content = 0u64;
    while let Some(mut entry) = archive.next_entry()? {
        if let EntryKind::Regular { size, chunks } = &mut entry.kind {
            let fail = |problem: String| SourceError::Entry {
                entry: entry.path.to_string(),
                offset: entry.offset,
                problem,
            };
            // Holes cost the archive nothing, so they count like unpacked bytes.
            content = content.saturating_add(*size);
            if content > allowance.limit() {
                return Err(fail(allowance.exceeded()).into());
            }
            *chunks = cutter.cut(*size, &mut archive.content()).map_err(|error| match error {
                CutError::Read(error) => fail(error.to_string()).into(),
                CutError::TooMany => fail(TOO_MANY_CHUNKS.into()).into(),
                CutError::Stopped => ReadError::Stopped,
            })?;
        }
        entries.push(entry);
    }
    let offset = archive.offset();
    let mut reader = archive.into_inner();
    std::io::copy(&mut reader, &mut std::io::sink()).map_err(unreadable(offset))?;
    Ok(entries)
}

/// The file that a layer of `size` bytes is. Artifacts say nothing that Linux asks of a file but
/// its path: everybody may read it, and it is root's.
///
/// # Errors
/// No file can have the path.
pub(crate) fn lone_file(path: &str, size: u64) -> Result<Entry, SourceError> {
    let wrong = |problem: String| SourceError::Entry { entry: path.to_owned(), offset: 0, problem };
    let parsed = EntryPath::parse(path.as_bytes()).map_err(|error| wrong(error.to_string()))?;
    if parsed.is_root() {
        return Err(wrong("it names no file".to_owned()));
    }
    let metadata = Metadata { permissions: 0o644, ..Metadata::default() };
    let kind = EntryKind::Regular { size, chunks: Vec::new() };
    Ok(Entry { path: parsed, offset: 0, metadata, kind })
}

/// Reads a layer that is one file: its content goes to `cutter`.
pub(crate) fn read_file(
    path: &str,
    raw: Box<dyn Read + Send>,
    stored_size: Option<u64>,
    cutter: &mut Cutter<'_>,
    on_read: &dyn Fn(u64),
) -> Result<Vec<Entry>, ReadError> {
    let size = stored_size.unwrap_or_default();
    let mut entry = lone_file(path, size)?;
    let fail = |problem| SourceError::Entry { entry: path.to_owned(), offset: 0, problem };
    let mut raw = stream::Counted { raw, on_read };
    let cut = cutter.cut(size, &mut raw).map_err(|error| match error {
        CutError::Read(error) => fail(error.to_string()).into(),
        CutError::TooMany => fail(TOO_MANY_CHUNKS.into()).into(),
        CutError::Stopped => ReadError::Stopped,
    })?;
    // A reader that checks a digest does so at its end.
    std::io::copy(&mut raw, &mut std::io::sink()).map_err(|error| fail(error.to_string()))?;
    entry.kind = EntryKind::Regular { size, chunks: cut };
    Ok(vec![entry])
}

/// The message of [`CutError::TooMany`].
const TOO_MANY_CHUNKS: &str = "the layer has more than 16,777,214 chunks up to here, the maximum \
                               of a blob; choose a bigger chunk size";
