//! The tests that docs/security.md names exist.

use std::{collections::HashSet, fs, path::Path};

#[test]
fn every_test_of_an_attack_exists() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = fs::read_to_string(repository.join("docs/security.md")).unwrap();
    let mut known = Names::default();
    known.read(&repository.join("crates"));
    let named = tests_in(&text);
    assert!(named.len() > 50, "only {} tests were found in the document", named.len());
    let missing: Vec<_> = named.iter().filter(|path| !known.has(path)).collect();
    assert!(missing.is_empty(), "docs/security.md names tests that do not exist: {missing:#?}");
}

/// Code spans in the entries *test:*, without commands.
fn tests_in(text: &str) -> Vec<String> {
    let entries = text.split("*test:*").skip(1);
    let entries = entries.filter_map(|entry| entry.split("\n- ").next()?.split("\n\n").next());
    let spans = entries.flat_map(|entry| entry.split('`').skip(1).step_by(2));
    spans.filter(|span| !span.contains(' ')).map(str::to_owned).collect()
}

#[derive(Default)]
struct Names {
    functions: HashSet<String>,
    /// Names of files, directories and inline modules.
    modules: HashSet<String>,
}

impl Names {
    fn read(&mut self, directory: &Path) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                self.read(&path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                self.functions.extend(words_after(&text, "fn "));
                self.modules.extend(words_after(&text, "mod "));
            }
            let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
            self.modules.insert(stem);
        }
    }

    /// Returns whether `module::*::test`, or every module in front of a final `*`, exists.
    fn has(&self, path: &str) -> bool {
        let mut parts = path.split("::").filter(|part| *part != "*").collect::<Vec<_>>();
        let last = if path.ends_with("::*") { None } else { parts.pop() };
        let is_test = last.is_none_or(|last| match last.strip_suffix('*') {
            Some(prefix) => self.functions.iter().any(|name| name.starts_with(prefix)),
            None => self.functions.contains(last),
        });
        is_test && parts.iter().all(|part| self.modules.contains(*part))
    }
}

fn words_after<'a>(text: &'a str, keyword: &str) -> impl Iterator<Item = String> + use<'a> {
    let starts: Vec<_> = text.match_indices(keyword).map(|(at, it)| at + it.len()).collect();
    let is_of_a_name = |letter: char| letter.is_alphanumeric() || letter == '_';
    starts
        .into_iter()
        .map(move |at| text[at..].chars().take_while(|it| is_of_a_name(*it)).collect())
}
