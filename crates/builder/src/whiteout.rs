//! Whiteouts: empty files whose names hide entries of lower layers (OCI image layers, "Whiteouts").

use crate::entry::{Entry, EntryKind, EntryPath, InvalidPath};

/// Prefix of a marker's name; the hidden name follows.
pub(crate) const PREFIX: &[u8] = b".wh.";
/// AUFS's own bookkeeping, which old Docker layers still hold.
const META: &[u8] = b".wh..wh.";
/// The marker in a directory that hides all that lower layers have there.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// The entry that hides the target of the marker at `path`; `None` if `path` is no marker.
pub(crate) fn hidden(path: &EntryPath) -> Option<Result<(EntryPath, EntryKind), String>> {
    let name = path.last();
    if name == OPAQUE {
        return Some(Ok((path.parent(), EntryKind::Opaque)));
    }
    Some(match name.strip_prefix(PREFIX)? {
        b"" | b"." | b".." => Err("a whiteout that hides no name".into()),
        hidden => {
            let path = path.parent().join(hidden);
            path.map(|path| (path, EntryKind::Whiteout)).map_err(|problem| problem.to_string())
        }
    })
}

/// Returns whether the path belongs to AUFS's own bookkeeping.
pub(crate) fn is_aufs_metadata(path: &EntryPath) -> bool {
    path.components().any(|name| name.starts_with(META) && name != OPAQUE)
}

/// Turns a whiteout entry into its marker file.
pub(crate) fn to_marker(entry: &mut Entry) -> Result<(), InvalidPath> {
    entry.path = match entry.kind {
        EntryKind::Whiteout => {
            let name = [PREFIX, entry.path.last()].concat();
            entry.path.parent().join(&name)?
        }
        EntryKind::Opaque => entry.path.join(OPAQUE)?,
        _ => return Ok(()),
    };
    entry.kind = EntryKind::Regular { size: 0, chunks: Vec::new() };
    Ok(())
}
