//! Modules of Ruby, Perl and PHP, which are named by paths.

use super::{
    super::paths::{Found, Paths},
    Import, Imports, ancestors, import, text,
};

impl Imports {
    pub(super) fn follow_ruby(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        let names = text::ruby(bytes);
        let of_name = |name: &Vec<u8>| self.ruby_feature(paths, Some(file.directory()), name);
        names.iter().flat_map(of_name).collect()
    }

    pub(super) fn ruby_feature(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        beside: Option<&[u8]>,
        name: &[u8],
    ) -> Vec<Import> {
        let places = beside.into_iter().chain(self.roots.iter().map(Vec::as_slice));
        let found = places.into_iter().find_map(|place| {
            let endings: &[&[u8]] = if name.ends_with(b".rb") { &[b""] } else { &[b".rb", b".so"] };
            endings.iter().find_map(|ending| paths.known(place, &[name, *ending].concat()))
        });
        found.into_iter().map(import).collect()
    }

    pub(super) fn follow_perl(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        bytes: &[u8],
    ) -> Vec<Import> {
        let mut found = Vec::new();
        for name in text::perl(bytes) {
            let of_root = |root: &Vec<u8>| paths.known(root, &name);
            found.extend(self.roots.iter().find_map(of_root).map(Import::Module));
            // `A/B.pm` may have `auto/A/B/B.so`.
            let stem = name.strip_suffix(b".pm").unwrap_or(&name);
            let last = stem.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
            let library = [b"auto/", stem, b"/", last, b".so"].concat();
            let of_root = |root: &Vec<u8>| paths.known(root, &library);
            found.extend(self.roots.iter().find_map(of_root).map(Import::Library));
        }
        found
    }

    pub(super) fn follow_php(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        /// `__DIR__ . '/../a.php'` is relative to the file; `BASE . 'a.php'` is relative to one of
        /// the directories above it.
        const ABOVE: usize = 3;
        let mut found = Vec::new();
        for name in text::php(bytes) {
            let name = name.strip_prefix(b"/").unwrap_or(&name);
            let above = ancestors(file.directory()).take(ABOVE).map(<[u8]>::to_vec);
            let places: Vec<_> = above.chain(self.roots.iter().cloned()).collect();
            found.extend(places.iter().find_map(|place| paths.known(place, name)).map(import));
        }
        found
    }
}
