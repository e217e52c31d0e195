//! Scripts of PHP: named by paths, or by the classes that are in them.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{
    super::paths::{Found, Paths},
    Import, Imports, ancestors, import, text,
};

/// Paths that arrays of class loaders may have together, and classes that are looked for in them.
/// Applications with their libraries have some ten thousand.
const MAPPED: usize = 1 << 16;
const LOOKED_FOR: usize = 1 << 14;

/// Maximum length of such a path.
const LONGEST_PATH: usize = 1024;

/// Paths that are tried for one class.
const TRIED: usize = 64;

/// How many entries an array for a class loader has at least, if its file is not called after one.
/// Shorter arrays may say which script shows a page.
const ENTRIES: usize = 4;

/// `__DIR__ . '/../a.php'` is relative to the file; `BASE . 'a.php'` is relative to one of so many
/// directories above it. So many parts of a class's name are left out to find its file.
const ABOVE: usize = 3;

/// Where applications have their classes.
const SOURCES: [&[u8]; 6] = [b"/src", b"/inc", b"/lib", b"/app", b"/includes", b"/classes"];

/// Files of classes, from arrays as Composer and phpab make them for class loaders:
/// `'A\\B' => __DIR__ . '/b.php'`, or `'A\\' => array($vendorDir . '/a/src')` for all classes
/// whose names begin so.
#[derive(Debug, Default)]
pub(in super::super) struct ClassMap {
    /// By name in lower case, with slashes; prefixes end with one.
    files: HashMap<Vec<u8>, Vec<Vec<u8>>>,
    /// How many there are.
    count: usize,
    /// Classes that are used, also by name in lower case.
    looked_for: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl ClassMap {
    /// Adds entries. Returns the paths that files of classes may have that were looked for before.
    pub(in super::super) fn add(&mut self, entries: Vec<(Vec<u8>, Vec<u8>)>) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        for (name, path) in entries {
            if self.count >= MAPPED || found.len() >= MAPPED {
                break;
            }
            let looked_for = self.looked_for.range(name.clone()..);
            let is_meant =
                |lower: &[u8]| lower == name || name.ends_with(b"/") && lower.starts_with(&name);
            let meant = looked_for.take_while(|(lower, _)| is_meant(lower));
            let paths = meant.flat_map(|(_, class)| paths_of(&name, &path, class));
            found.extend(paths.take(MAPPED - found.len()));
            self.files.entry(name).or_default().push(path);
            self.count += 1;
        }
        found
    }

    /// Looks for a class that is used. Returns the paths that its file may have, likely ones first.
    pub(in super::super) fn look_for(&mut self, class: Vec<u8>) -> Vec<Vec<u8>> {
        let lower = class.to_ascii_lowercase();
        if self.looked_for.len() >= LOOKED_FOR || self.looked_for.contains_key(&lower) {
            return Vec::new();
        }
        let prefixes = (1..lower.len()).rev().filter(|end| lower[end - 1] == b'/');
        let names = [lower.len()].into_iter().chain(prefixes).map(|end| &lower[..end]);
        let known = names.filter_map(|name| Some((name, self.files.get(name)?)));
        let entries = known.flat_map(|(name, paths)| paths.iter().map(move |path| (name, path)));
        let paths = entries.flat_map(|(name, path)| paths_of(name, path, &class));
        let found = paths.take(TRIED).collect();
        self.looked_for.insert(lower, class);
        found
    }
}

/// The paths of a class's file by an entry. Below the directory of a prefix, PSR-4 leaves the
/// prefix out, and PSR-0 does not.
fn paths_of(name: &[u8], path: &[u8], class: &[u8]) -> Vec<Vec<u8>> {
    if !name.ends_with(b"/") {
        return vec![path.to_vec()];
    }
    let below = [&class[name.len()..], class];
    below.map(|below| [path, b"/", below, b".php"].concat()).into()
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
        let has_map = mapped.len() >= if is_called_class_loader(file.name()) { 1 } else { ENTRIES };
        for name in scripts(bytes, has_map) {
            let name = name.strip_prefix(b"/").unwrap_or(&name);
            found.extend(places.iter().find_map(|place| paths.known(place, name)).map(import));
        }
        if has_map {
            let always = mapped.iter().filter(|(key, _)| is_hash(key)).take(text::NAMES);
            found.extend(always.filter_map(|(_, path)| paths.file(b"/", path)).map(import));
            found.push(Import::ClassMap(mapped));
        }
        let of_root = |root: &Vec<u8>| SOURCES.map(|sources| [root, sources].concat());
        places.extend(self.roots.iter().flat_map(of_root));
        let namespace = namespace(bytes);
        for Class { name: class, is_full } in classes(bytes) {
            // What a directory's namespace is called is not known: `A/B/C.php`, `B/C.php`, `C.php`.
            let parts = class.iter().enumerate().filter(|(_, byte)| **byte == b'/');
            let starts = std::iter::once(0).chain(parts.map(|(at, _)| at + 1));
            let file = starts.take(ABOVE).find_map(|start| {
                let name = [&class[start..], b".php"].concat();
                places.iter().find_map(|place| paths.known(place, &name))
            });
            found.extend(file.map(import));
            if let Some(namespace) = &namespace
                && !is_full
            {
                found.push(Import::Class([namespace, &b"/"[..], &class].concat()));
            }
            found.push(Import::Class(class));
        }
        found
    }
}

/// Returns whether a file of this name has arrays for a class loader, which may be long.
pub(in super::super) fn is_called_class_loader(name: &[u8]) -> bool {
    name.starts_with(b"autoload") && name.ends_with(b".php")
}

/// Returns whether Composer calls a file by this key: one with functions, which is always loaded.
fn is_hash(key: &[u8]) -> bool {
    key.len() == 32 && key.iter().all(u8::is_ascii_hexdigit)
}

/// Whatever looks like a script, except for the values of arrays if these are for a class loader.
fn scripts(source: &[u8], has_map: bool) -> Vec<Vec<u8>> {
    const ENDINGS: [&[u8]; 3] = [b".php", b".inc", b".phtml"];
    text::quoted(source, |before, word| {
        ENDINGS.iter().any(|ending| word.ends_with(ending))
            && !(has_map && before.windows(2).any(|pair| pair == b"=>"))
    })
}

/// The namespace that a script declares, with slashes.
fn namespace(source: &[u8]) -> Option<Vec<u8>> {
    let mut lines = source.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let name = lines.find_map(|line| {
        let line = line.strip_prefix(b"<?php").unwrap_or(line).trim_ascii_start();
        line.strip_prefix(b"namespace ")
    })?;
    let len = name.iter().position(|byte| !is_of_name(byte)).unwrap_or(name.len());
    (1..=text::LONGEST).contains(&len).then(|| with_slashes(&name[..len]))
}

/// A class that a script uses.
#[derive(Debug, PartialEq, Eq)]
struct Class {
    /// With slashes: `A/B`.
    name: Vec<u8>,
    /// No namespace comes before it.
    is_full: bool,
}

/// Classes that are used.
fn classes(source: &[u8]) -> Vec<Class> {
    let mut known = HashSet::new();
    let mut found = Vec::new();
    let mut before: &[u8] = b"";
    let mut rest = source;
    while let Some(start) = rest.iter().position(is_of_name)
        && found.len() < text::NAMES
    {
        let gap = &rest[..start];
        let len = rest[start..].iter().position(|byte| !is_of_name(byte));
        let (word, after) = rest[start..].split_at(len.unwrap_or(rest.len() - start));
        rest = after;
        // `implements A, B`
        let is_listed = matches!(before, b"use" | b"extends" | b"implements")
            && gap.iter().all(|byte| byte.is_ascii_whitespace() || *byte == b',');
        let is_used = is_listed
            || matches!(before, b"new" | b"instanceof") && gap.iter().all(u8::is_ascii_whitespace)
            || after.starts_with(b"::");
        let name = word.strip_prefix(b"\\").unwrap_or(word);
        let is_class = name.first().is_some_and(u8::is_ascii_uppercase) || name.contains(&b'\\');
        let is_full = name.len() < word.len() || is_listed && before == b"use";
        let fits = name.len() <= text::LONGEST && !name.ends_with(b"\\");
        if is_class && is_used && fits && known.insert(name) {
            found.push(Class { name: with_slashes(name), is_full });
        }
        // The list goes on, unless it is `use A as B` or `use function a`.
        before = if is_listed && is_class { before } else { word };
    }
    found
}

/// The entries of arrays for class loaders: name in lower case, and path.
fn class_map(directory: &[u8], source: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut entries = Vec::new();
    let mut key = Vec::new();
    for line in source.split(|byte| *byte == b'\n') {
        // `public static $fallbackDirsPsr4 = array (`: of another array than the last key.
        if line.windows(7).any(|part| part == b" static") {
            key.clear();
        }
        // `'A\\' => array($vendorDir . '/a', $baseDir . '/b')`
        for part in line.split(|byte| *byte == b',') {
            let arrow = part.windows(2).position(|pair| pair == b"=>");
            let (left, value) = arrow.map_or((&b""[..], part), |at| (&part[..at], &part[at + 2..]));
            if let Some(name) = text::quoted(left, |_, _| true).pop() {
                let is_class =
                    name[0].is_ascii_uppercase() || name.contains(&b'\\') || is_hash(&name);
                key = if is_class { with_slashes(&name).to_ascii_lowercase() } else { Vec::new() };
            }
            if key.is_empty() {
                continue;
            }
            let has = |word: &[u8]| value.windows(word.len()).any(|part| part == word);
            let above = if has(b"$baseDir") { 2 } else { usize::from(has(b"$vendorDir")) };
            let base = ancestors(directory).nth(above).unwrap_or_default();
            let path = text::quoted(value, |_, _| true).concat();
            let is_script = path.ends_with(b".php") || path.ends_with(b".inc");
            if path.is_empty()
                || key.ends_with(b"/") == is_script
                || base.len() + path.len() >= LONGEST_PATH
            {
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
    classes(bytes).into_iter().for_each(|class| drop(map.look_for(class.name)));
    map.add(class_map(b"/app/vendor", bytes));
    namespace(bytes).into_iter().for_each(|name| drop(map.look_for(name)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(names: Vec<Vec<u8>>) -> Vec<String> {
        names.into_iter().map(|name| String::from_utf8(name).unwrap()).collect()
    }

    #[test]
    fn scripts_and_classes_that_a_script_names_are_found() {
        let source = b"<?php require_once __DIR__ . '/a.php'; include 'b/c.inc'; echo 'no';";
        assert_eq!(texts(scripts(source, true)), ["/a.php", "b/c.inc"]);
        let source = b"$a = ['B' => 'c.php'];\nrequire 'd.php';";
        assert_eq!(texts(scripts(source, false)), ["c.php", "d.php"]);
        assert_eq!(texts(scripts(source, true)), ["d.php"]);
        let source = b"<?php namespace a\\b;\nuse a\\C as Cc, Not; use function a\\d;\n\
            class D extends E implements F,\n  G {\n/** Not this. */\n\
            use H, I; f() { return new \\J\\K(L::m(), N); } }";
        let found = |is_full| {
            let found = classes(source).into_iter().filter(|class| class.is_full == is_full);
            texts(found.map(|class| class.name).collect())
        };
        assert_eq!(found(true), ["a/C", "H", "I", "J/K"]);
        assert_eq!(found(false), ["E", "F", "G", "L"]);
        assert_eq!(namespace(source).unwrap(), b"a/b");
        assert_eq!(namespace(b"<?php\n namespace a;").unwrap(), b"a");
        assert_eq!(namespace(b"<?php // in no namespace\n"), None);
    }

    #[test]
    fn class_loaders_say_which_files_classes_are_in() {
        let composer = b"'A\\\\B' => $vendorDir . '/a/B.php',\n'Own' => $baseDir . '/Own.php',\n\
            'P\\\\' => array($baseDir . '/p/src', $vendorDir . '/q'),\n\
            'P\\\\Q\\\\' => array($vendorDir . '/q/own'),\n\
            'S\\\\' => \n array (\n 0 => __DIR__ . '/..' . '/s',\n),\n'title' => 'none.php',\n\
            public static $fallback = array (\n 0 => __DIR__ . '/fallback',\n);";
        let mut map = ClassMap::default();
        assert!(map.look_for(b"A/B".to_vec()).is_empty());
        let known = map.add(class_map(b"/app/vendor/composer", composer));
        assert_eq!(texts(known), ["/app/vendor/a/B.php"]);
        let mut look_for = |class: &str| texts(map.look_for(class.into()));
        assert_eq!(look_for("Own"), ["/app/Own.php"]);
        let expected = [
            "/app/vendor/q/own/R.php",
            "/app/vendor/q/own/P/Q/R.php",
            "/app/p/src/Q/R.php",
            "/app/p/src/P/Q/R.php",
            "/app/vendor/q/Q/R.php",
            "/app/vendor/q/P/Q/R.php",
        ];
        assert_eq!(look_for("P/Q/R"), expected);
        assert_eq!(look_for("P/Q/R"), [""; 0], "it is looked for once");
        let expected = ["/app/vendor/composer/../s/T.php", "/app/vendor/composer/../s/S/T.php"];
        assert_eq!(look_for("S/T"), expected);
        assert_eq!(look_for("title"), [""; 0]);
        let phpab = class_map(b"/usr/share/php/Tool", b"'tool\\\\cli' => '/Cli.php',");
        assert_eq!(texts(map.add(phpab)), [""; 0]);
        assert_eq!(texts(map.look_for(b"Tool/Cli".to_vec())), ["/usr/share/php/Tool/Cli.php"]);
    }

    #[test]
    fn pages_are_no_classes() {
        let pages = b"$pages = ['a' => 'a.php', 'b' => 'b.php', 'c' => 'c.php', 'd' => 'd.php'];";
        assert!(class_map(b"/", pages).is_empty());
    }

    #[test]
    fn what_class_loaders_have_is_bounded() {
        let deep: Vec<u8> = b"a/".repeat(100);
        let mut map = ClassMap::default();
        // So many that no number of prefixes gives just the bound.
        for number in 0..10_000 {
            map.look_for([&deep, number.to_string().as_bytes()].concat());
        }
        let prefixes = (1..=100).flat_map(|len| {
            (0..1000).map(move |number| (b"a/".repeat(len), format!("/{number}").into_bytes()))
        });
        assert_eq!(map.add(prefixes.collect()).len(), MAPPED);
        for _ in 0..2 {
            map.add((0..MAPPED).map(|_| (b"b".to_vec(), b"/b".to_vec())).collect());
        }
        assert!(map.count <= MAPPED);
        (0..2 * LOOKED_FOR).for_each(|number| drop(map.look_for(number.to_string().into())));
        assert_eq!(map.looked_for.len(), LOOKED_FOR);
    }
}
