//! Paths that the guides for contributors name exist.

use std::{fs, path::Path};

/// The documents that are checked.
const DOCUMENTS: [&str; 2] = ["ARCHITECTURE.md", "CONTRIBUTING.md"];

/// Directories that a path in code spans begins with; other spans are commands or names.
const ROOTS: [&str; 10] = [
    ".ci/",
    "bench/",
    "crates/",
    "debian/",
    "dist/",
    "docs/",
    "examples/",
    "fuzz/",
    "scripts/",
    "tests/",
];

#[test]
fn every_path_in_the_guides_exists() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut missing = Vec::new();
    let mut seen = 0;
    for document in DOCUMENTS {
        let text = fs::read_to_string(repository.join(document)).unwrap();
        for path in named(&text) {
            seen += 1;
            if !exists(&repository, &path) {
                missing.push(format!("{document} names {path}, which does not exist"));
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    assert!(seen > 50, "only {seen} paths were found: does the test still read the documents?");
}

/// Paths in code spans, and targets of links that are in the repository.
fn named(text: &str) -> Vec<String> {
    let spans = text.split('`').skip(1).step_by(2);
    let spans = spans.filter(|span| ROOTS.iter().any(|root| span.starts_with(root)));
    let links = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    let links = links.filter(|target| !target.is_empty() && !target.contains("://"));
    spans.chain(links).map(str::to_owned).collect()
}

/// Returns whether the file or directory exists. `*` stands for any directory. A last component
/// with a `<placeholder>` only needs its directory.
fn exists(directory: &Path, path: &str) -> bool {
    let (first, rest) = path.split_once('/').unwrap_or((path, ""));
    match first {
        "" => directory.is_dir(),
        "*" => fs::read_dir(directory).is_ok_and(|mut entries| {
            entries.any(|entry| entry.is_ok_and(|entry| exists(&entry.path(), rest)))
        }),
        placeholder if placeholder.starts_with('<') => directory.is_dir(),
        last if rest.is_empty() && !path.ends_with('/') => directory.join(last).exists(),
        name => exists(&directory.join(name), rest),
    }
}

#[test]
fn a_path_that_does_not_exist_is_found() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (path, expected) in [
        ("testkit/src/lib.rs", true),
        ("testkit/src/", true),
        ("*/tests/it/main.rs", true),
        ("cli/src/commands/<verb>.rs", true),
        ("testkit/src/gone.rs", false),
        ("testkit/gone/", false),
        ("*/src/gone.rs", false),
        ("cli/src/gone/<verb>.rs", false),
    ] {
        assert_eq!(exists(&crates, path), expected, "{path}");
    }
    assert_eq!(named("[a](b.md#c) `crates/d`, `make e` [f](https://g)"), ["crates/d", "b.md"]);
}
