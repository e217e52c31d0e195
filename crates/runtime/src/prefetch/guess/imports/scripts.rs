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

/// The file in one directory that `name` means.
fn ruby_file(
    paths: &mut Paths<'_, impl AsRef<[u8]>>,
    directory: &[u8],
    name: &[u8],
) -> Option<Found> {
    let is_whole = name.ends_with(b".rb") || name.ends_with(b".so");
    let endings: &[&[u8]] = if is_whole { &[b""] } else { &[b".rb", b".so"] };
    endings.iter().find_map(|ending| paths.known(directory, &[name, *ending].concat()))
}

/// The directory of the gem that a path is in: `/var/lib/gems/3.1.0/gems/NAME-VERSION`.
fn gem_of(path: &[u8]) -> Option<&[u8]> {
    const GEMS: &[u8] = b"/gems/";
    let at = path.windows(GEMS.len()).rposition(|part| part == GEMS)? + GEMS.len();
    let len = path[at..].iter().position(|byte| *byte == b'/').unwrap_or(path.len() - at);
    Some(&path[..at + len])
}

/// Adds that RubyGems looks for a gem, if one of these is in another gem than what loads it.
fn with_gems(found: &mut Vec<Import>, loading: Option<&[u8]>) {
    let is_of_other = |import: &Import| {
        let (Import::Module(file) | Import::Library(file)) = import else { return false };
        let gem = gem_of(&file.path);
        gem.is_some() && gem != loading
    };
    if found.iter().any(is_of_other) {
        found.push(Import::Gems);
    }
}

impl Imports {
    pub(super) fn follow_ruby(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        let mut found = Vec::new();
        for name in text::ruby_relative(bytes) {
            found.extend(ruby_file(paths, file.directory(), &name).map(import));
        }
        for name in text::ruby(bytes) {
            // Scripts may add the directory that they are in to those that are searched.
            let feature = self.ruby_feature(paths, &name);
            found.extend(feature.or_else(|| ruby_file(paths, file.directory(), &name)).map(import));
        }
        with_gems(&mut found, gem_of(&file.path));
        for pattern in text::ruby_patterns(bytes) {
            let scripts = paths.matching(&[file.directory(), b"/", &pattern].concat());
            found.extend(scripts.into_iter().map(Import::Module));
        }
        if let Some([gem, program]) = text::ruby_program(bytes) {
            found.extend(self.ruby_program(paths, &gem, &program));
        }
        found
    }

    /// What is loaded before a program: `ruby -r NAME`.
    pub(super) fn ruby_option(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        name: &[u8],
    ) -> Vec<Import> {
        let mut found = Vec::from_iter(self.ruby_feature(paths, name).map(import));
        with_gems(&mut found, None);
        found
    }

    /// A program of a gem.
    fn ruby_program(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        gem: &[u8],
        program: &[u8],
    ) -> Vec<Import> {
        let mut found = vec![Import::Gems];
        for root in &self.roots {
            // COLLECTION/gems/NAME-VERSION/lib
            let mut names = root.rsplitn(4, |byte| *byte == b'/').skip(1);
            let (Some(name), Some(b"gems")) = (names.next(), names.next()) else { continue };
            if name.strip_prefix(gem).is_some_and(|rest| rest.starts_with(b"-")) {
                let places = [&b"../exe/"[..], b"../bin/"];
                let program =
                    places.iter().find_map(|place| paths.file(root, &[place, program].concat()));
                found.extend(program.map(Import::Module));
            }
        }
        found
    }

    /// What describes the gems. RubyGems reads all of it to find one.
    pub(in super::super) fn described_gems(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
    ) -> Vec<Found> {
        let mut collections: Vec<&[u8]> = Vec::new();
        for root in &self.roots {
            let collection =
                gem_of(root).and_then(|gem| gem.rsplitn(3, |byte| *byte == b'/').nth(2));
            collections.extend(collection.filter(|path| !collections.contains(path)));
        }
        let own = collections.iter().map(|path| [path, &b"/specifications"[..]].concat());
        let directories = own.chain(DESCRIBED.map(<[u8]>::to_vec));
        let patterns = directories.map(|path| [&path[..], b"/*.gemspec"].concat());
        patterns.flat_map(|pattern| paths.matching(&pattern)).collect()
    }

    /// The file in the directories of the interpreter and of gems that `name` means.
    fn ruby_feature(&self, paths: &mut Paths<'_, impl AsRef<[u8]>>, name: &[u8]) -> Option<Found> {
        // Such a path is relative to the directory in which the program starts.
        let is_path = name.starts_with(b"./") || name.starts_with(b"../");
        let roots = if is_path { &self.own } else { &self.roots };
        roots.iter().find_map(|root| ruby_file(paths, root, name))
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
