//! The files of an image that have given bytes of a blob.

use std::ops::{ControlFlow, Range};

use lazuli_image::{
    BlobIndex, Decoded,
    erofs::{FileType, Nid},
    rafs::Bootstrap,
};

use super::walk::walk;

/// Adds the paths of files that have bytes of `range` in this blob, until there are `most`.
pub(crate) fn files_with<B: AsRef<[u8]>>(
    bootstrap: &Bootstrap<B>,
    blob: BlobIndex,
    range: &Range<Decoded>,
    most: usize,
    files: &mut Vec<String>,
) {
    walk(bootstrap, String::new(), |parent, entry| {
        let path = format!("{parent}/{}", entry.name.escape_ascii());
        if entry.file_type == FileType::Regular && has(bootstrap, entry.nid, blob, range) {
            files.push(path.clone());
            if files.len() >= most {
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(path)
    });
}

/// Returns whether a file has bytes of `range` in this blob.
fn has<B: AsRef<[u8]>>(
    bootstrap: &Bootstrap<B>,
    file: Nid,
    blob: BlobIndex,
    range: &Range<Decoded>,
) -> bool {
    let mut offset = 0;
    while let Ok(Some(piece)) = bootstrap.extent(file, offset) {
        let end = piece.start.0 + piece.len;
        if piece.blob == blob && piece.start < range.end && end > range.start.0 {
            return true;
        }
        if piece.len == 0 {
            return false;
        }
        offset += piece.len;
    }
    false
}
