//! Modules of Ruby and Perl, which are named by paths.

use super::{
    super::paths::{Found, Paths},
    Import, Imports, import, text,
};

/// Where Debian describes gems whose files are in the directories of the interpreter.
const DESCRIBED: [&[u8]; 2] = [
    b"/usr/share/rubygems-integration/*/specifications",
    b"/usr/lib/*/rubygems-integration/*/specifications",
];

/// Adds directories within `gems/NAME-VERSION/lib` that gems have instead of these: one that has
/// what its gem is called after has the others, too.
pub(super) fn add_inner_gems(paths: &mut Paths<'_, impl AsRef<[u8]>>, roots: &mut Vec<Vec<u8>>) {
    for at in 0..roots.len() {
        let mut names = roots[at].rsplit(|byte| *byte == b'/').skip(1);
        let (Some(gem), Some(b"gems")) = (names.next(), names.next()) else { continue };
        let Some(dash) = gem.iter().rposition(|byte| *byte == b'-') else { continue };
        let name = [&gem[..dash], b".rb"].concat();
        let inner = [&roots[at], &b"/"[..], &gem[..dash]].concat();
        if paths.known(&roots[at], &name).is_none() && paths.known(&inner, &name).is_some() {
            roots.push(inner);
        }
    }
}

impl Imports {
    pub(super) fn follow_ruby(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        let names = text::ruby(bytes);
        let of_name = |name: &Vec<u8>| self.ruby_feature(paths, Some(file.directory()), name);
        let mut found: Vec<_> = names.iter().flat_map(of_name).collect();
        for pattern in text::ruby_patterns(bytes) {
            let scripts = paths.matching(&[file.directory(), b"/", &pattern].concat());
            found.extend(scripts.into_iter().map(Import::Module));
        }
        if let Some([gem, program]) = text::ruby_program(bytes) {
            found.extend(self.ruby_program(paths, &gem, &program));
        }
        found
    }

    /// A program of a gem. To find it, RubyGems reads what describes the gems.
    fn ruby_program(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        gem: &[u8],
        program: &[u8],
    ) -> Vec<Import> {
        let mut found = Vec::new();
        let mut collections = Vec::new();
        for root in &self.roots {
            // COLLECTION/gems/NAME-VERSION/lib
            let mut names = root.rsplitn(4, |byte| *byte == b'/').skip(1);
            let (Some(name), Some(b"gems"), Some(collection)) =
                (names.next(), names.next(), names.next())
            else {
                continue;
            };
            if name.strip_prefix(gem).is_some_and(|rest| rest.starts_with(b"-")) {
                let places = [&b"../exe/"[..], b"../bin/"];
                let program =
                    places.iter().find_map(|place| paths.file(root, &[place, program].concat()));
                found.extend(program.map(Import::Module));
            }
            if !collections.contains(&collection) {
                collections.push(collection);
            }
        }
        let specifications =
            collections.iter().map(|path| [path, &b"/specifications"[..]].concat());
        let specifications = specifications.chain(DESCRIBED.map(<[u8]>::to_vec));
        for directory in specifications {
            let described = paths.matching(&[&directory[..], b"/*.gemspec"].concat());
            found.extend(described.into_iter().map(Import::Data));
        }
        found
    }

    pub(super) fn ruby_feature(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        beside: Option<&[u8]>,
        name: &[u8],
    ) -> Vec<Import> {
        let places = beside.into_iter().chain(self.roots.iter().map(Vec::as_slice));
        let found = places.into_iter().find_map(|place| {
            let is_whole = name.ends_with(b".rb") || name.ends_with(b".so");
            let endings: &[&[u8]] = if is_whole { &[b""] } else { &[b".rb", b".so"] };
            endings.iter().find_map(|ending| paths.known(place, &[name, *ending].concat()))
        });
        found.into_iter().map(import).collect()
    }

    pub(super) fn follow_perl(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        bytes: &[u8],
    ) -> Vec<Import> {
        text::perl(bytes).iter().flat_map(|name| self.perl_module(paths, name)).collect()
    }

    /// A module by its path, and its library: `A/B.pm` may have `auto/A/B/B.so`.
    pub(super) fn perl_module(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        name: &[u8],
    ) -> Vec<Import> {
        let of_root = |root: &Vec<u8>| paths.known(root, name);
        let module = self.roots.iter().find_map(of_root).map(Import::Module);
        let stem = name.strip_suffix(b".pm").unwrap_or(name);
        let last = stem.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        let mut with = |name: &[u8]| {
            let name = [b"auto/", stem, b"/", name].concat();
            self.roots.iter().find_map(|root| paths.known(root, &name))
        };
        let library = with(&[last, b".so"].concat()).map(Import::Library);
        // What is in it is loaded when it is called.
        let split = with(b"autosplit.ix").map(Import::Data);
        module.into_iter().chain(library).chain(split).collect()
    }
}
