//! Whiteouts: empty files whose names hide entries of lower layers (OCI image layers, "Whiteouts").

use std::collections::BTreeSet;

use lazuli_image::{Metadata, tree::Device};

use crate::{
    entry::{Entry, EntryKind, EntryPath, InvalidPath},
    error::SourceError,
    source::SPACES,
};

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

/// The attribute of an opaque directory; its value is `y`.
const OPAQUE_ATTRIBUTE: &[u8] = b"trusted.overlay.opaque";

/// Turns the whiteouts of a layer into those of a directory of overlayfs: a character device 0:0,
/// or an attribute of the directory that is opaque. The layer's own attributes of overlayfs would
/// make it show files of other layers, and go.
///
/// # Errors
/// The layer has a directory that it does not list: its owner and mode are those of lower layers.
pub(crate) fn to_overlayfs(entries: &mut Vec<Entry>) -> Result<(), SourceError> {
    let paths = |is_it: fn(&EntryKind) -> bool| -> BTreeSet<EntryPath> {
        entries.iter().filter(|entry| is_it(&entry.kind)).map(|entry| entry.path.clone()).collect()
    };
    let directories = paths(|kind| matches!(kind, EntryKind::Directory));
    let whiteouts = paths(|kind| matches!(kind, EntryKind::Whiteout));
    let names = paths(|kind| !matches!(kind, EntryKind::Whiteout | EntryKind::Opaque));
    let mut opaque = paths(|kind| matches!(kind, EntryKind::Opaque));
    let refuse = |path: &EntryPath, problem: &str| {
        let (path, problem) = (path.to_string(), problem.to_owned());
        Err(SourceError::Path { path, problem })
    };
    // overlayfs merges the roots of all layers.
    if opaque.contains(&EntryPath::default()) {
        return refuse(&EntryPath::default(), "the root hides all lower layers");
    }
    for path in entries.iter().map(|entry| &entry.path).filter(|path| !path.is_root()) {
        let parent = path.parent();
        if !parent.is_root() && !directories.contains(&parent) {
            return refuse(path, "the layer does not list the directory that it is in");
        }
    }
    if let Some(path) = opaque.iter().find(|path| !directories.contains(path)) {
        return refuse(path, "the layer hides a directory that it does not list");
    }
    // A directory that replaces one of a lower layer.
    opaque.extend(whiteouts.intersection(&directories).cloned());
    entries.retain(|entry| match entry.kind {
        EntryKind::Opaque => false,
        EntryKind::Whiteout => !names.contains(&entry.path),
        _ => true,
    });
    for entry in entries {
        match entry.kind {
            EntryKind::Whiteout => {
                entry.kind = EntryKind::CharDevice(Device { major: 0, minor: 0 });
                entry.metadata = Metadata::default();
            }
            _ => {
                let is_mark = |name: &[u8]| SPACES.into_iter().any(|it| name.starts_with(it));
                entry.metadata.xattrs.retain(|name, _| !is_mark(name));
            }
        }
        if matches!(entry.kind, EntryKind::Directory) && opaque.contains(&entry.path) {
            entry.metadata.xattrs.insert(OPAQUE_ATTRIBUTE.into(), (*b"y").into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str, kind: EntryKind) -> Entry {
        let path = EntryPath::parse(path.as_bytes()).unwrap();
        Entry { path, offset: 0, metadata: Metadata::default(), kind }
    }

    fn file() -> EntryKind {
        EntryKind::Regular { size: 0, chunks: Vec::new() }
    }

    /// Paths, with `w` for a character device and `o` for an opaque directory.
    fn shown(mut entries: Vec<Entry>) -> Result<Vec<String>, String> {
        to_overlayfs(&mut entries).map_err(|error| error.to_string())?;
        let mark = |entry: &Entry| match (&entry.kind, entry.metadata.xattrs.len()) {
            (EntryKind::CharDevice(Device { major: 0, minor: 0 }), 0) => "w",
            (EntryKind::Directory, 1) => "o",
            (_, 0) => "-",
            _ => "?",
        };
        Ok(entries.iter().map(|entry| format!("{} {}", mark(entry), entry.path)).collect())
    }

    #[test]
    fn whiteouts_become_those_of_overlayfs() {
        use EntryKind::{Directory, Opaque, Whiteout};
        let mut own = entry("a/f", file());
        for name in ["trusted.overlay.redirect", "user.overlay.redirect"] {
            own.metadata.xattrs.insert(name.as_bytes().into(), (*b"/x").into());
        }
        let layer = vec![
            entry("a", Directory),
            own,
            entry("a/g", Whiteout),
            entry("b", Opaque),
            entry("b", Directory),
            entry("c", Whiteout),
            entry("c", Directory),
            entry("d", file()),
            entry("d", Whiteout),
        ];
        let expected = ["- /a", "- /a/f", "w /a/g", "o /b", "o /c", "- /d"];
        assert_eq!(shown(layer).unwrap(), expected);
    }

    #[test]
    fn layers_that_depend_on_lower_ones_are_refused() {
        for (layer, problem) in [
            (vec![entry("a/f", file())], "/a/f: the layer does not list the directory"),
            (vec![entry("a", EntryKind::Opaque)], "/a: the layer hides a directory"),
            (vec![entry(".", EntryKind::Opaque)], "the root hides all lower layers"),
        ] {
            let error = shown(layer).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }
}
