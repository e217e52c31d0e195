//! The marks of overlayfs in an upper directory.
//!
//! A character device 0:0 hides the entry of its name in lower layers. All other marks are
//! attributes `trusted.overlay.…`, or `user.overlay.…` on a mount with `userxattr`. A container's
//! own attributes in these namespaces are escaped by the kernel with another `overlay.`, as
//! `trusted.overlay.overlay.…`. The directory alone doesn't show which of the two the mount used,
//! so both count.

use std::collections::BTreeMap;

/// Prefixes of the names of attributes that mean something to overlayfs.
pub(crate) const SPACES: [&[u8]; 2] = [b"trusted.overlay.", b"user.overlay."];

/// The marks of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Marks {
    /// Whether everything below this directory in lower layers is hidden.
    pub(super) opaque: bool,
}

/// Removes the marks from `xattrs`.
///
/// # Errors
/// The meaning of a mark depends on other directories.
pub(super) fn take(xattrs: &mut BTreeMap<Box<[u8]>, Box<[u8]>>) -> Result<Marks, &'static str> {
    let mut marks = Marks { opaque: false };
    let names: Vec<_> = xattrs.keys().filter(|name| mark(name).is_some()).cloned().collect();
    for name in names {
        let value = xattrs.remove(&name).unwrap_or_default();
        let Some((space, mark)) = mark(&name) else { continue };
        match mark {
            b"opaque" if *value == *b"y" => marks.opaque = true,
            // Internal references of overlayfs: the origin of a copy-up, and lookup hints.
            // `protattr` has flags of chattr(1), which images cannot hold.
            b"origin" | b"impure" | b"uuid" | b"upper" | b"protattr" => {}
            b"redirect" => return Err(REDIRECT),
            b"metacopy" => return Err(METACOPY),
            b"nlink" => return Err(NLINK),
            mark => match mark.strip_prefix(b"overlay.") {
                Some(own) => {
                    xattrs.insert([space, own].concat().into(), value);
                }
                None => return Err(UNKNOWN),
            },
        }
    }
    Ok(marks)
}

const REDIRECT: &str = "it was renamed, and overlayfs left its content in the lower layers \
                        (overlay.redirect): mount the overlay with redirect_dir=off";
const METACOPY: &str = "overlayfs copied only its metadata up, its content is in the lower layers \
                        (overlay.metacopy): mount the overlay with metacopy=off";
const NLINK: &str = "its other names may be in the lower layers only (overlay.nlink): mount the \
                     overlay with index=off";
const UNKNOWN: &str = "it has a mark of overlayfs (overlay.*) whose meaning is not known";

/// Name space and rest of the name of a mark.
fn mark(name: &[u8]) -> Option<(&'static [u8], &[u8])> {
    SPACES.into_iter().find_map(|space| Some((space, name.strip_prefix(space)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Xattrs = BTreeMap<Box<[u8]>, Box<[u8]>>;

    fn xattrs(all: &[(&str, &str)]) -> Xattrs {
        all.iter().map(|(name, value)| (name.as_bytes().into(), value.as_bytes().into())).collect()
    }

    #[test]
    fn overlay_marks_differ_from_the_containers_own_attributes() {
        let mut found = xattrs(&[
            ("trusted.overlay.opaque", "y"),
            ("trusted.overlay.origin", "x"),
            ("trusted.overlay.overlay.opaque", "y"),
            ("user.mine", "1"),
        ]);
        assert_eq!(take(&mut found), Ok(Marks { opaque: true }));
        assert_eq!(found, xattrs(&[("trusted.overlay.opaque", "y"), ("user.mine", "1")]));
        let mut found = xattrs(&[("user.overlay.impure", "y")]);
        assert_eq!(take(&mut found), Ok(Marks { opaque: false }));
        assert!(found.is_empty());
    }

    #[test]
    fn unsupported_overlay_features_are_refused() {
        for (mark, expected) in [
            ("redirect", "redirect_dir=off"),
            ("metacopy", "metacopy=off"),
            ("nlink", "index=off"),
            ("whiteout", "not known"),
        ] {
            let error = take(&mut xattrs(&[(&format!("trusted.overlay.{mark}"), "")])).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
