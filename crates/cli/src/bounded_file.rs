//! Files of other programs.

use std::{fs, io, path::Path};

use anyhow::{Result, bail};

use crate::path_context::PathContext as _;

/// Biggest file that is read, in bytes.
const LIMIT: u64 = 4 << 20;

/// A file's text, if there is one.
pub(crate) fn read(path: &Path) -> Result<Option<String>> {
    let size = match fs::metadata(path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).cannot("read", path),
    };
    if size > LIMIT {
        bail!("{} has {size} bytes, expected at most {LIMIT}", path.display());
    }
    fs::read_to_string(path).map(Some).cannot("read", path)
}
