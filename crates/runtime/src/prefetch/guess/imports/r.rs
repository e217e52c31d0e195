//! Packages of R.

use super::{super::paths::Paths, Import, Imports, import, text};

/// Packages that each start loads.
pub(super) const BASE: [&[u8]; 7] =
    [b"base", b"methods", b"datasets", b"utils", b"grDevices", b"graphics", b"stats"];

impl Imports {
    pub(super) fn follow_r(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        bytes: &[u8],
    ) -> Vec<Import> {
        text::r(bytes).iter().flat_map(|name| self.r_package(paths, name)).collect()
    }

    /// The files that loading a package of R reads.
    pub(super) fn r_package(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        name: &[u8],
    ) -> Vec<Import> {
        let of_root = |root: &Vec<u8>| {
            let description = [name, b"/DESCRIPTION"].concat();
            paths.known(root, &description)
        };
        let Some(description) = self.roots.iter().find_map(of_root) else { return Vec::new() };
        let mut found = Vec::new();
        for part in [&b"/NAMESPACE"[..], b"/Meta/*.rds", b"/R/*", b"/libs/*.so"] {
            let pattern = [description.directory(), part].concat();
            found.extend(paths.matching(&pattern).into_iter().map(import));
        }
        found.push(Import::Module(description));
        found
    }
}
