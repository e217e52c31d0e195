//! Comments and documents wrap at 100 columns.

use std::{
    fs,
    path::{Path, PathBuf},
};

const COLUMNS: usize = 100;

#[test]
fn comments_and_documents_are_at_most_100_columns_wide() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut wide = Vec::new();
    let mut seen = 0;
    for file in files(&repository) {
        let wide_lines = match file.extension().and_then(|extension| extension.to_str()) {
            Some("md") => wide_prose,
            Some("rs") => wide_comments,
            _ => continue,
        };
        let lines = wide_lines(&fs::read_to_string(&file).unwrap());
        seen += 1;
        let name = file.strip_prefix(&repository).unwrap();
        wide.extend(lines.iter().map(|line| format!("{}:{line}", name.display())));
    }
    assert!(wide.is_empty(), "wider than {COLUMNS} columns:\n{}", wide.join("\n"));
    assert!(seen > 500, "only {seen} files were found: does the test still find them?");
}

/// All files below a directory, but what is built or hidden.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name();
        let kind = entry.file_type().unwrap();
        if kind.is_file() {
            found.push(entry.path());
        } else if kind.is_dir() && name != "target" && !name.as_encoded_bytes().starts_with(b".") {
            found.extend(files(&entry.path()));
        }
    }
    found
}

/// The numbers of lines that are too wide, in a document without its blocks of code.
fn wide_prose(text: &str) -> Vec<usize> {
    let mut is_code = false;
    let mut wide = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code && !line.starts_with("    ") && is_wide(line) {
            wide.push(number);
        }
    }
    wide
}

/// The numbers of lines that hold nothing but a comment, and are too wide.
fn wide_comments(text: &str) -> Vec<usize> {
    let comments = text.lines().zip(1..).filter(|(line, _)| line.trim_start().starts_with("//"));
    comments.filter(|(line, _)| is_wide(line)).map(|(_, number)| number).collect()
}

/// Returns whether a line is too wide and can be broken: a link alone cannot.
fn is_wide(line: &str) -> bool {
    let is_link = line.trim_start().trim_start_matches('!').starts_with('[') && line.ends_with(')');
    line.chars().count() > COLUMNS && !is_link
}

#[test]
fn wide_lines_are_found() {
    let long = "word ".repeat(21);
    assert_eq!(
        wide_prose(&format!("short\n{long}\n| {long} |\n```\n{long}\n```\n{long}")),
        [2, 3, 7]
    );
    assert_eq!(wide_prose(&format!("    {long}\n![{long}](picture.svg)")), [0; 0]);
    assert_eq!(wide_comments(&format!("    // {long}\nlet a = \"{long}\";\n//! {long}")), [1, 3]);
}
