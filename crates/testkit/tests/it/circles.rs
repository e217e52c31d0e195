//! Files of a crate import each other in one direction.
//!
//! A circle of files can only be understood, moved and tested as a whole. The test reads the
//! imports of each crate as text: `use` declarations and paths that begin with `crate`, `super` or
//! `self`. A name that a module re-exports counts as an import of the file that defines it, and
//! unit tests at the end of a file don't count.
//!
//! Imports of a file from the module that it is in don't count either: `foo/mod.rs` declares
//! `foo/bar.rs` and what both share. The two can only be read together, and are one unit here.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// A module path, from the crate's root.
type Module = Vec<String>;

#[derive(Default)]
struct Crate {
    files: BTreeMap<Module, PathBuf>,
    /// The imports of each file, as whole paths from the crate's root.
    imports: BTreeMap<Module, Vec<Module>>,
}

#[test]
fn no_file_joins_a_circle() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut problems = Vec::new();
    let mut seen = 0;
    for entry in fs::read_dir(crates).unwrap() {
        let directory = entry.unwrap().path();
        let name = directory.file_name().unwrap().to_str().unwrap().to_owned();
        let source = directory.join("src");
        let parsed = Crate::read(&source);
        seen += parsed.imports.values().map(Vec::len).sum::<usize>();
        let show = |file: &PathBuf| file.strip_prefix(&source).unwrap().display().to_string();
        let circles: BTreeSet<String> = parsed.in_circles().iter().map(show).collect();
        if !circles.is_empty() {
            problems.push(format!("{name}: in a circle of imports: {circles:?}"));
        }
    }
    assert!(seen > 1000, "{seen} imports were found: the test does not read the sources");
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

impl Crate {
    fn read(source: &Path) -> Self {
        let mut read = Crate::default();
        let mut directories = vec![source.to_owned()];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    directories.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    read.add(source, path);
                }
            }
        }
        read
    }

    fn add(&mut self, source: &Path, path: PathBuf) {
        let within = path.strip_prefix(source).unwrap().with_extension("");
        let mut module: Module =
            within.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
        if module.iter().any(|part| part == "tests" || part == "bin") {
            return;
        }
        if module.last().is_some_and(|last| matches!(&last[..], "mod" | "lib" | "main")) {
            module.pop();
        }
        let text = without_tests_and_comments(&fs::read_to_string(&path).unwrap());
        self.imports.insert(module.clone(), imports(&text, &module));
        self.files.insert(module, path);
    }

    /// The file that defines `path` as seen by `from`; `None` if it is not in the crate.
    fn resolve(&self, path: &[String], depth: usize) -> Option<Module> {
        let length = (0..=path.len()).rev().find(|at| self.files.contains_key(&path[..*at]))?;
        let module = path[..length].to_vec();
        let Some(name) = path.get(length).filter(|_| depth < 8) else { return Some(module) };
        // Re-exported: the module's own import under this name.
        let renamed = self.imports[&module]
            .iter()
            .find(|import| import.last() == Some(name) && **import != path[..=length]);
        match renamed {
            Some(import) => self.resolve(import, depth + 1),
            None => Some(module),
        }
    }

    /// The files that can be reached from themselves.
    fn in_circles(&self) -> Vec<PathBuf> {
        let edges: BTreeMap<&Module, BTreeSet<Module>> = self
            .imports
            .iter()
            .map(|(module, imports)| {
                let targets = imports.iter().filter_map(|import| self.resolve(import, 0));
                // A submodule's imports of the modules that it is in make no circle.
                (module, targets.filter(|target| !module.starts_with(target)).collect())
            })
            .collect();
        let reaches_itself = |start: &Module| {
            let mut seen = BTreeSet::new();
            let mut next: Vec<&Module> = edges[start].iter().collect();
            while let Some(module) = next.pop() {
                if module == start {
                    return true;
                }
                if seen.insert(module) {
                    next.extend(&edges[module]);
                }
            }
            false
        };
        let circular = self.files.iter().filter(|(module, _)| reaches_itself(module));
        circular.map(|(_, file)| file.clone()).collect()
    }
}

/// The text before the unit tests, without comments and string literals.
fn without_tests_and_comments(text: &str) -> String {
    let mut kept = String::new();
    let mut is_test = false;
    for line in text.lines() {
        if line == "#[cfg(test)]" {
            is_test = true;
            continue;
        }
        if is_test && line.starts_with("mod ") && line.ends_with('{') {
            break;
        }
        // One item that only tests have: its first line is enough for a declaration.
        if std::mem::take(&mut is_test) {
            continue;
        }
        let code = line.split("//").next().unwrap_or_default();
        kept.extend(code.split('"').step_by(2));
        kept.push('\n');
    }
    kept
}

/// Whole paths of everything that the text imports from its crate.
fn imports(text: &str, module: &[String]) -> Vec<Module> {
    let mut found = Vec::new();
    for root in ["crate::", "super::", "self::"] {
        for (at, _) in text.match_indices(root) {
            let before = text[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            expand(&text[at..], &[], &mut found);
        }
    }
    let absolute = |path: Module| {
        let mut base = module.to_vec();
        let mut rest = &path[..];
        while let Some((first, tail)) = rest.split_first() {
            match &first[..] {
                "crate" => base.clear(),
                "super" => drop(base.pop()),
                "self" => {}
                _ => break,
            }
            rest = tail;
        }
        let rest = rest.iter().filter(|part| *part != "self" && *part != "*");
        [base, rest.cloned().collect()].concat()
    };
    let mut paths: Vec<Module> = found.into_iter().map(absolute).collect();
    // `pub use child::Name;`, which names no root.
    for line in text.lines() {
        if let Some((_, path)) = line.split_once("pub use ").or(line.split_once("pub(crate) use "))
        {
            let mut relative = Vec::new();
            expand(path, &[], &mut relative);
            paths.extend(relative.into_iter().map(|path| [module.to_vec(), path].concat()));
        }
    }
    paths
}

/// Adds the paths of the `use` tree at the start of `text`. Returns the rest.
fn expand<'a>(text: &'a str, prefix: &[String], found: &mut Vec<Module>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = expand(rest, prefix, found).trim_start();
            rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
            if rest.is_empty() || rest.starts_with('}') {
                return rest.strip_prefix('}').unwrap_or(rest);
            }
            if !rest.starts_with(|c: char| c.is_alphanumeric() || "_*{".contains(c)) {
                return rest;
            }
        }
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_' && c != '*');
    let (name, rest) = text.split_at(end.unwrap_or(text.len()));
    if name.is_empty() {
        return rest;
    }
    let path = [prefix, &[name.to_owned()]].concat();
    match rest.strip_prefix("::") {
        Some(rest) if rest.starts_with(|c: char| c.is_alphabetic() || "_*{".contains(c)) => {
            expand(rest, &path, found)
        }
        _ => {
            found.push(path);
            let rest = rest.trim_start();
            // A rename, which imports from here would use: the path's own last part is resolved
            // instead.
            rest.strip_prefix("as ").map_or(rest, |rest| {
                let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
                &rest[end.unwrap_or(rest.len())..]
            })
        }
    }
}
