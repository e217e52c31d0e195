//! Scripts of PHP: named by paths, or by the classes that are in them.

use std::collections::{BTreeMap, HashMap};

use super::{
    super::paths::{Found, Paths},
    Import, Imports, ancestors, import, text,
};

/// Classes that arrays of class loaders have, and those that are looked for in them. Applications
/// with their libraries have some ten thousand.
const MAPPED: usize = 1 << 16;
const ASKED: usize = 1 << 14;

/// Paths of one entry: packages may share the beginning of their names.
const PATHS: usize = 64;

/// How many entries such an array has at least. Others say which script does what.
const ENTRIES: usize = 4;

/// `__DIR__ . '/../a.php'` is relative to the file; `BASE . 'a.php'` is relative to one of so many
/// directories above it.
const ABOVE: usize = 3;

/// Where applications have their classes.
const CLASSES: [&[u8]; 6] = [b"/src", b"/inc", b"/lib", b"/app", b"/includes", b"/classes"];

/// Files of classes, from arrays as Composer and phpab make them for class loaders:
/// `'A\\B' => __DIR__ . '/b.php'`, or `'A\\' => array($vendorDir . '/a/src')` for all that begins
/// with it.
#[derive(Debug, Default)]
pub(in super::super) struct ClassMap {
    /// By name in lower case, with slashes; beginnings end with one.
    files: HashMap<Vec<u8>, Vec<Vec<u8>>>,
    /// Classes that are used, also by name in lower case.
    asked: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl ClassMap {
    /// Adds entries. Returns the paths that files of classes may have that were looked for before.
    pub(in super::super) fn add(&mut self, entries: Vec<(Vec<u8>, Vec<u8>)>) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        for (name, path) in entries {
            if self.files.len() >= MAPPED {
                break;
            }
            let paths = self.files.entry(name.clone()).or_default();
            if paths.len() < PATHS && !paths.contains(&path) {
                let asked = self.asked.range(name.clone()..);
                let is_meant = |lower: &[u8]| {
                    lower == name || name.ends_with(b"/") && lower.starts_with(&name)
                };
                let meant = asked.take_while(|(lower, _)| is_meant(lower));
                found.extend(meant.map(|(_, class)| path_of(&name, &path, class)));
                paths.push(path);
            }
        }
        found
    }

    /// Looks for a class that is used. Returns the paths that its file may have.
    pub(in super::super) fn ask(&mut self, class: Vec<u8>) -> Vec<Vec<u8>> {
        let lower = class.to_ascii_lowercase();
        if self.asked.len() >= ASKED || self.asked.insert(lower.clone(), class.clone()).is_some() {
            return Vec::new();
        }
        let beginnings = (1..lower.len()).rev().filter(|end| lower[end - 1] == b'/');
        let names = [lower.len()].into_iter().chain(beginnings).map(|end| &lower[..end]);
        let known = names.filter_map(|name| Some((name, self.files.get(name)?)));
        let paths = |(name, paths): (&[u8], &Vec<Vec<u8>>)| {
            Vec::from_iter(paths.iter().map(|path| path_of(name, path, &class)))
        };
        known.take(1).flat_map(paths).collect()
    }
}

/// The path of a class's file: that of an entry, or one below it.
fn path_of(name: &[u8], path: &[u8], class: &[u8]) -> Vec<u8> {
    match name.ends_with(b"/") {
        true => [path, b"/", &class[name.len()..], b".php"].concat(),
        false => path.to_vec(),
    }
}

impl Imports {
    pub(super) fn follow_php(
        &self,
        paths: &mut Paths<'_, impl AsRef<[u8]>>,
        file: &Found,
        bytes: &[u8],
    ) -> Vec<Import> {
        let mut found = Vec::new();
        let above = ancestors(file.directory()).take(ABOVE).map(<[u8]>::to_vec);
        let mut places: Vec<_> = above.chain(self.roots.iter().cloned()).collect();
        let mapped = class_map(file.directory(), bytes);
        let is_loader = mapped.len() >= ENTRIES;
        for name in scripts(bytes, is_loader) {
            let name = name.strip_prefix(b"/").unwrap_or(&name);
            found.extend(places.iter().find_map(|place| paths.known(place, name)).map(import));
        }
        if is_loader {
            let always = mapped.iter().filter(|(key, _)| is_hash(key));
            found.extend(always.filter_map(|(_, path)| paths.file(b"/", path)).map(import));
            found.push(Import::ClassMap(mapped));
        }
        let of_root = |root: &Vec<u8>| CLASSES.map(|classes| [root, classes].concat());
        places.extend(self.roots.iter().flat_map(of_root));
        let namespace = namespace(bytes);
        for class in classes(bytes) {
            // What a directory's namespace is called is not known: `A/B/C.php`, `B/C.php`, `C.php`.
            let parts = class.iter().enumerate().filter(|(_, byte)| **byte == b'/');
            let starts = std::iter::once(0).chain(parts.map(|(at, _)| at + 1));
            let file = starts.take(ABOVE).find_map(|start| {
                let name = [&class[start..], b".php"].concat();
                places.iter().find_map(|place| paths.known(place, &name))
            });
            found.extend(file.map(import));
            if let Some(namespace) = &namespace {
                found.push(Import::Class([namespace, &b"/"[..], &class].concat()));
            }
            found.push(Import::Class(class));
        }
        found
    }
}

/// Returns whether a file of this name may have a long array for a class loader.
pub(in super::super) fn is_class_loader(name: &[u8]) -> bool {
    name.starts_with(b"autoload") && name.ends_with(b".php")
}

/// Returns whether Composer calls a file by this key: one with functions, which is always loaded.
fn is_hash(key: &[u8]) -> bool {
    key.len() == 32 && key.iter().all(u8::is_ascii_hexdigit)
}

/// Whatever looks like a script, but for the values of a class loader's array.
fn scripts(source: &[u8], is_loader: bool) -> Vec<Vec<u8>> {
    const ENDINGS: [&[u8]; 3] = [b".php", b".inc", b".phtml"];
    text::quoted(source, |before, word| {
        ENDINGS.iter().any(|ending| word.ends_with(ending))
            && !(is_loader && before.windows(2).any(|pair| pair == b"=>"))
    })
}

/// The namespace that a script declares, with slashes.
fn namespace(source: &[u8]) -> Option<Vec<u8>> {
    let mut lines = source.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let name = lines.find_map(|line| line.strip_prefix(b"namespace "))?;
    let len = name.iter().position(|byte| !is_of_name(byte)).unwrap_or(name.len());
    (1..=text::LONGEST).contains(&len).then(|| with_slashes(&name[..len]))
}

/// Classes that are used, with slashes: `A/B`.
fn classes(source: &[u8]) -> Vec<Vec<u8>> {
    const BEFORE: [&[u8]; 5] = [b"use", b"extends", b"implements", b"new", b"instanceof"];
    let mut names: Vec<&[u8]> = Vec::new();
    let mut before: &[u8] = b"";
    let mut rest = source;
    while let Some(start) = rest.iter().position(is_of_name)
        && names.len() < text::NAMES
    {
        // `implements A, B`
        let is_listed = matches!(before, b"use" | b"extends" | b"implements")
            && rest[..start].iter().all(|byte| byte.is_ascii_whitespace() || *byte == b',');
        let len = rest[start..].iter().position(|byte| !is_of_name(byte));
        let (word, after) = rest[start..].split_at(len.unwrap_or(rest.len() - start));
        let name = word.strip_prefix(b"\\").unwrap_or(word);
        let is_class =
            name.first().is_some_and(|first| first.is_ascii_uppercase()) || name.contains(&b'\\');
        let is_used = BEFORE.contains(&before) || after.starts_with(b"::");
        if is_class && is_used && !names.contains(&name) {
            names.push(name);
        }
        let is_keyword = BEFORE.contains(&word);
        before = if is_listed && !is_keyword { before } else { word };
        rest = after;
    }
    text::bounded(names).iter().map(|name| with_slashes(name)).collect()
}

/// The entries of arrays for class loaders: name in lower case, and path.
fn class_map(directory: &[u8], source: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut entries = Vec::new();
    let mut key = Vec::new();
    for line in source.split(|byte| *byte == b'\n') {
        let arrow = line.windows(2).position(|pair| pair == b"=>");
        let Some(arrow) = arrow else { continue };
        let (left, right) = (&line[..arrow], &line[arrow + 2..]);
        if let Some(name) = text::quoted(left, |_, _| true).pop() {
            key = with_slashes(&name).to_ascii_lowercase();
        }
        let is_beginning = key.ends_with(b"/");
        let has = |word: &[u8]| right.windows(word.len()).any(|part| part == word);
        let above = if has(b"$baseDir") { 2 } else { usize::from(has(b"$vendorDir")) };
        let Some(base) = ancestors(directory).nth(above) else { continue };
        // `$vendorDir . '/a', $vendorDir . '/b'`
        for value in right.split(|byte| *byte == b',') {
            let path = text::quoted(value, |_, _| true).concat();
            if path.is_empty() || key.is_empty() || is_beginning == path.ends_with(b".php") {
                continue;
            }
            let slash: &[u8] = if path.starts_with(b"/") { b"" } else { b"/" };
            entries.push((key.clone(), [base, slash, &path].concat()));
            if entries.len() >= MAPPED {
                return entries;
            }
        }
    }
    entries
}

fn is_of_name(byte: &u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_\\".contains(byte)
}

/// `A\B` as `A/B`; in texts, a backslash is written twice.
fn with_slashes(name: &[u8]) -> Vec<u8> {
    let mut path: Vec<u8> =
        name.iter().map(|byte| if *byte == b'\\' { b'/' } else { *byte }).collect();
    path.dedup_by(|next, last| *next == b'/' && *last == b'/');
    path
}

/// Every parser of scripts, and of what class loaders have, over the same bytes.
#[cfg(fuzzing)]
pub(super) fn fuzz(bytes: &[u8]) {
    scripts(bytes, true);
    let mut map = ClassMap::default();
    classes(bytes).into_iter().for_each(|class| drop(map.ask(class)));
    map.add(class_map(b"/app/vendor", bytes));
    namespace(bytes).into_iter().for_each(|name| drop(map.ask(name)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(names: Vec<Vec<u8>>) -> Vec<String> {
        names.into_iter().map(|name| String::from_utf8(name).unwrap()).collect()
    }

    #[test]
    fn scripts_and_classes_are_found() {
        let source = b"<?php require_once __DIR__ . '/a.php'; include 'b/c.inc'; echo 'no';";
        assert_eq!(texts(scripts(source, true)), ["/a.php", "b/c.inc"]);
        let source = b"$a = ['B' => 'c.php'];\nrequire 'd.php';";
        assert_eq!(texts(scripts(source, false)), ["c.php", "d.php"]);
        assert_eq!(texts(scripts(source, true)), ["d.php"]);
        let source = b"<?php\nnamespace a\\b;\nuse a\\C; class D extends E implements F,\n  G {\n\
            use H, I; f() { return new \\J\\K(L::m(), N); } }";
        assert_eq!(texts(classes(source)), ["a/C", "E", "F", "G", "H", "I", "J/K", "L"]);
        assert_eq!(namespace(source).unwrap(), b"a/b");
        assert_eq!(namespace(b"<?php // in no namespace\n"), None);
    }

    #[test]
    fn class_loaders_say_which_files_classes_are_in() {
        let composer = b"'A\\\\B' => $vendorDir . '/a/B.php',\n'Own' => $baseDir . '/Own.php',\n\
            'P\\\\' => array($vendorDir . '/p/src', $vendorDir . '/q'),\n\
            'S\\\\' => \n array (\n 0 => __DIR__ . '/..' . '/s',\n),\n'title' => 'none',";
        let mut map = ClassMap::default();
        assert!(map.ask(b"A/B".to_vec()).is_empty());
        let known = map.add(class_map(b"/app/vendor/composer", composer));
        assert_eq!(texts(known), ["/app/vendor/a/B.php"]);
        let mut ask = |class: &str| texts(map.ask(class.into()));
        assert_eq!(ask("Own"), ["/app/Own.php"]);
        assert_eq!(ask("P/Q/R"), ["/app/vendor/p/src/Q/R.php", "/app/vendor/q/Q/R.php"]);
        assert_eq!(ask("P/Q/R"), [""; 0]);
        assert_eq!(ask("S/T"), ["/app/vendor/composer/../s/T.php"]);
        assert_eq!(ask("title"), [""; 0]);
        let phpab = class_map(b"/usr/share/php/Tool", b"'tool\\\\cli' => '/Cli.php',");
        assert_eq!(texts(map.add(phpab)), [""; 0]);
        assert_eq!(texts(map.ask(b"Tool/Cli".to_vec())), ["/usr/share/php/Tool/Cli.php"]);
    }
}
