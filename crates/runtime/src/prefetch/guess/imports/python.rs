//! Modules of Python, as its import system finds them: compiled, in packages, or as libraries.

use super::{
    super::paths::{Found, Paths},
    Import, Imports, pyc, text,
};

/// Maximum number of packages that relative imports of source go up.
const LEVELS: usize = 4;

impl Imports {
    pub(super) fn follow_python(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        const CACHE: &[u8] = b"/__pycache__";
        let directory = file.directory();
        let package = directory.strip_suffix(CACHE).unwrap_or(directory).to_vec();
        if file.name().ends_with(b".pyc") {
            let Some(module) = pyc::module(bytes) else {
                return source_of(paths, &package, file).into_iter().collect();
            };
            let mut found = self.modules(paths, &package, &module.names, module.level);
            // Names of modules in settings: `"django.contrib.auth"`.
            for name in module.texts.iter().filter(|text| is_dotted(text)) {
                found.extend(self.absolute(paths, name));
            }
            return found;
        }
        let mut found = self.modules(paths, &package, &text::python(bytes), LEVELS);
        // Settings of the application name packages: `"rest_framework"`.
        let is_own = self.own.iter().any(|own| file.path.starts_with(own));
        for name in text::quoted(bytes, |_, text| is_dotted(text) || is_own && is_name(text)) {
            found.extend(self.absolute(paths, &name));
        }
        found
    }

    /// Resolves the names in a module of `package`; some are no modules at all.
    fn modules(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        package: &[u8],
        names: &[Vec<u8>],
        level: usize,
    ) -> Vec<Import> {
        let mut found = Vec::new();
        // Imported names follow the name of their module.
        let mut last: Option<(Vec<u8>, Vec<u8>)> = None;
        for name in names {
            let plain = name.iter().position(|byte| *byte != b'.').unwrap_or(name.len());
            let (dots, name) = name.split_at(plain);
            let mut places: Vec<&[u8]> = Vec::new();
            if dots.is_empty() {
                places.extend(self.roots.iter().map(Vec::as_slice));
            }
            let mut above = super::ancestors(package);
            match dots.len() {
                0 => places.extend(above.take(level)),
                count => places.extend(above.nth(count - 1)),
            }
            if let Some((place, module)) = &last
                && !name.is_empty()
            {
                let taken = [module, &b"."[..], name].concat();
                found.extend(module_in(paths, place, &taken).into_iter().flatten());
            }
            if name.is_empty() {
                last = places.first().map(|place| (place.to_vec(), Vec::new()));
                continue;
            }
            for place in places {
                if let Some(modules) = module_in(paths, place, name) {
                    found.extend(modules);
                    last = Some((place.to_vec(), name.to_vec()));
                    break;
                }
            }
        }
        found
    }

    fn absolute(&self, paths: &mut Paths<'_, impl AsRef<[u8]>>, name: &[u8]) -> Vec<Import> {
        let found = self.roots.iter().find_map(|root| module_in(paths, root, name));
        found.unwrap_or_default()
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

/// Returns whether a text could name a module in a package.
fn is_dotted(text: &[u8]) -> bool {
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
        let is_package = names.contains(&part);
        let inner = [&directory[..], b"/", part].concat();
        if is_package && paths.directory(b"/", &inner).is_some() {
            found.extend(module_file(paths, &inner, b"__init__"));
            directory = inner;
            continue;
        }
        found.extend(module_file(paths, &directory, part));
        break;
    }
    (!found.is_empty()).then_some(found)
}

/// The file of a module in a directory: compiled if it is, else a library or its source.
fn module_file(
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
    let names = paths.named(directory, name);
    let library = names.iter().copied().find(|file| file.ends_with(b".so"));
    if let Some(library) = library {
        return paths.file(directory, library).map(Import::Library);
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
