//! Modules of Python, as its import system finds them: compiled, in packages, or as libraries.

use super::{
    super::paths::{Found, Paths},
    Import, Imports, ancestors, pyc, text,
};

/// Maximum number of packages that relative imports of source go up.
const LEVELS: usize = 4;

/// The ending of files in which installed packages have lines of Python.
const SITE: &[u8] = b".pth";

/// How a module names others.
#[derive(Clone, Copy)]
enum Written {
    /// Relative names begin with dots.
    Source,
    /// Relative names are not marked, so either may be meant. They lead up to so many packages.
    Compiled(usize),
}

impl Imports {
    pub(super) fn follow_python(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        const CACHE: &[u8] = b"/__pycache__";
        if file.name().ends_with(SITE) {
            let names = text::python_site(bytes);
            return names.iter().flat_map(|name| self.absolute(paths, name)).collect();
        }
        let directory = file.directory();
        let package = directory.strip_suffix(CACHE).unwrap_or(directory).to_vec();
        if file.name().ends_with(b".pyc") {
            let Some(module) = pyc::module(bytes) else {
                return source_of(paths, &package, file).into_iter().collect();
            };
            let mut found =
                self.modules(paths, &package, &module.names, Written::Compiled(module.level));
            // Names of modules in settings: `"django.contrib.auth"`.
            for name in module.texts.iter().filter_map(|text| module_of(text)) {
                found.extend(self.absolute(paths, name));
            }
            found.extend(self.entry_points(paths, &package, bytes));
            return found;
        }
        let mut found = self.modules(paths, &package, &text::python(bytes), Written::Source);
        // Settings of the application name packages: `"rest_framework"`.
        let is_own = self.own.iter().any(|own| file.path.starts_with(own));
        let is_module = |text: &[u8]| module_of(text).is_some() || is_own && is_name(text);
        for name in text::quoted(bytes, |_, text| is_module(text)) {
            found.extend(self.absolute(paths, module_of(&name).unwrap_or(&name)));
        }
        found.extend(self.entry_points(paths, &package, bytes));
        found
    }

    /// Resolves the names in a module of `package`; some are no modules at all.
    fn modules(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        package: &[u8],
        names: &[Vec<u8>],
        written: Written,
    ) -> Vec<Import> {
        let mut found = Vec::new();
        // Imported names follow the name of their module.
        let mut last: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        for name in names {
            let plain = name.iter().position(|byte| *byte != b'.').unwrap_or(name.len());
            let (dots, name) = name.split_at(plain);
            let above = ancestors(package);
            let roots = self.roots.iter().map(Vec::as_slice);
            // Where one module is looked for, and where another one of the same name.
            let places: [Vec<&[u8]>; 2] = match (dots.len(), written) {
                (0, Written::Compiled(level)) => [above.take(level).collect(), roots.collect()],
                (0, Written::Source) => [roots.chain(above.take(LEVELS)).collect(), Vec::new()],
                (count, _) => [above.skip(count - 1).take(1).collect(), Vec::new()],
            };
            if !name.is_empty() {
                for (place, module) in &last {
                    let taken = [module, &b"."[..], name].concat();
                    found.extend(module_in(paths, place, &taken).into_iter().flatten());
                }
            }
            if name.is_empty() {
                // `from . import name`
                let place = places.iter().flatten().next();
                last = place.map(|place| (place.to_vec(), Vec::new())).into_iter().collect();
                continue;
            }
            let mut in_place =
                |place: &&[u8]| Some((place.to_vec(), module_in(paths, place, name)?));
            let new: Vec<_> =
                places.iter().filter_map(|places| places.iter().find_map(&mut in_place)).collect();
            if !new.is_empty() {
                last = new.iter().map(|(place, _)| (place.clone(), name.to_vec())).collect();
            }
            found.extend(new.into_iter().flat_map(|(_, modules)| modules));
        }
        found
    }

    /// The lists of what the installed distributions offer as plug-ins, if a module asks for them.
    fn entry_points(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        package: &[u8],
        bytes: &[u8],
    ) -> Vec<Import> {
        let has = |text: &[u8]| bytes.windows(text.len()).any(|part| part == text);
        let is_asking = has(b"entry_points")
            && (has(b"importlib.metadata") || has(b"importlib_metadata"))
            && !package.ends_with(b"/importlib/metadata");
        if !is_asking {
            return Vec::new();
        }
        let of_root = |root: &Vec<u8>| [root, &b"/*-info/entry_points.txt"[..]].concat();
        let lists = self.roots.iter().flat_map(|root| paths.matching(&of_root(root)));
        lists.map(Import::Data).collect()
    }

    pub(super) fn absolute(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        name: &[u8],
    ) -> Vec<Import> {
        let found = self.roots.iter().find_map(|root| module_in(paths, root, name));
        found.unwrap_or_default()
    }

    /// The files whose lines the interpreter runs before anything else.
    pub(super) fn site_files(&self, paths: &mut Paths<'_, impl AsRef<[u8]>>) -> Vec<Import> {
        let is_site = |root: &&Vec<u8>| root.ends_with(b"-packages");
        let patterns =
            self.roots.iter().filter(is_site).map(|root| [root, &b"/*"[..], SITE].concat());
        patterns.flat_map(|pattern| paths.matching(&pattern)).map(Import::Module).collect()
    }

    /// The files that `python -m name` runs.
    pub(super) fn python_program(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        name: &[u8],
    ) -> Vec<Import> {
        let mut found = self.absolute(paths, name);
        found.extend(self.absolute(paths, &[name, b".__main__"].concat()));
        found
    }

    /// The module that an argument such as `package.module:name` names.
    pub(super) fn python_word(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        word: &[u8],
    ) -> Vec<Import> {
        let end = word.iter().position(|byte| *byte == b':').unwrap_or(word.len());
        let is_module = end < word.len() || is_dotted(word);
        if is_module { self.absolute(paths, &word[..end]) } else { Vec::new() }
    }
}

/// The module that a text could name: `package.module`, or `package.module:object`.
fn module_of(text: &[u8]) -> Option<&[u8]> {
    let end = text.iter().position(|byte| *byte == b':').unwrap_or(text.len());
    let (module, object) = text.split_at(end);
    (is_dotted(module) && (object.is_empty() || is_name(&object[1..]))).then_some(module)
}

/// Returns whether a text could name a module in a package.
pub(super) fn is_dotted(text: &[u8]) -> bool {
    text.contains(&b'.') && is_name(text)
}

/// Returns whether a text could name a module.
fn is_name(text: &[u8]) -> bool {
    const LONGEST: usize = 128;
    let is_part = |part: &[u8]| {
        part.first().is_some_and(|first| first.is_ascii_alphabetic() || *first == b'_')
            && part.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
    };
    text.len() <= LONGEST && text.split(|byte| *byte == b'.').all(is_part)
}

/// The module `name` in the directory `place`, with its packages; `None` if not even its first part
/// exists. Missing parts at its end are attributes of a module.
fn module_in(
    paths: &mut Paths<'_, impl AsRef<[u8]>>,
    place: &[u8],
    name: &[u8],
) -> Option<Vec<Import>> {
    let mut found = Vec::new();
    let mut directory = place.to_vec();
    let parts = name.split(|byte| *byte == b'.').filter(|part| !part.is_empty());
    for part in parts {
        let names = paths.named(&directory, part);
        // What is compiled counts only beside its source.
        if names.is_empty() {
            break;
        }
        let is_package = names.contains(&part);
        let inner = [&directory[..], b"/", part].concat();
        let package = (is_package && paths.directory(b"/", &inner).is_some())
            .then(|| module_files(paths, &inner, b"__init__"));
        // A directory without code is a package only if no module has the name.
        if package.as_ref().is_none_or(Vec::is_empty) {
            let module = module_files(paths, &directory, part);
            if !module.is_empty() {
                found.extend(module);
                break;
            }
        }
        let Some(package) = package else { break };
        found.extend(package);
        directory = inner;
    }
    (!found.is_empty()).then_some(found)
}

/// The files of a module in a directory: compiled if it is, or its source. Python prefers a library
/// that was made of these, but they say what it imports.
fn module_files(
    paths: &mut Paths<'_, impl AsRef<[u8]>>,
    directory: &[u8],
    name: &[u8],
) -> Vec<Import> {
    let names = paths.named(directory, name);
    let library = names.iter().copied().find(|file| file.ends_with(b".so"));
    let library = library.and_then(|library| paths.file(directory, library)).map(Import::Library);
    library.into_iter().chain(text_of(paths, directory, name)).collect()
}

/// A module compiled, or its source.
fn text_of(
    paths: &mut Paths<'_, impl AsRef<[u8]>>,
    directory: &[u8],
    name: &[u8],
) -> Option<Import> {
    let cache = [directory, b"/__pycache__"].concat();
    let is_plain =
        |file: &[u8]| file.ends_with(b".pyc") && !file.windows(4).any(|at| at == b"opt-");
    let compiled = paths.named(&cache, name).iter().copied().find(|file| is_plain(file));
    if let Some(compiled) = compiled {
        return paths.file(&cache, compiled).map(Import::Module);
    }
    paths.known(directory, &[name, b".py"].concat()).map(Import::Module)
}

/// The source of a module that was compiled by a version that is not known.
fn source_of(
    paths: &mut Paths<'_, impl AsRef<[u8]>>,
    package: &[u8],
    compiled: &Found,
) -> Option<Import> {
    let stem = compiled.name().split(|byte| *byte == b'.').next().unwrap_or_default();
    paths.known(package, &[stem, b".py"].concat()).map(Import::Module)
}
