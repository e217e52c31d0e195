//! containerd's filter language: `labels."a.b"==x,kind==active`. Conditions of one filter all hold,
//! of several filters one.

use std::{iter::Peekable, str::Chars};

use regex::Regex;

use crate::{
    SnapshotError,
    store::{Kind, Snapshot},
};

/// Longer ones are not written by hand; containerd's own are a hundred bytes.
const LIMIT: usize = 16 << 10;

/// One filter, as a client sends it.
#[derive(Debug)]
pub struct Filter(Vec<Condition>);

#[derive(Debug)]
struct Condition {
    field: Vec<String>,
    test: Test,
}

#[derive(Debug)]
enum Test {
    Present,
    Equal(String),
    NotEqual(String),
    Matches(Regex),
}

/// Returns whether a snapshot passes any of `filters`, or there are none.
pub(crate) fn any(filters: &[Filter], snapshot: &Snapshot) -> bool {
    filters.is_empty() || filters.iter().any(|filter| filter.0.iter().all(|c| c.holds(snapshot)))
}

impl Condition {
    fn holds(&self, snapshot: &Snapshot) -> bool {
        let value = field(&self.field, snapshot);
        match &self.test {
            Test::Present => value.is_some(),
            Test::Equal(wanted) => value == Some(wanted),
            Test::NotEqual(unwanted) => value.unwrap_or_default() != unwanted,
            Test::Matches(pattern) => pattern.is_match(value.unwrap_or_default()),
        }
    }
}

fn field<'a>(path: &[String], snapshot: &'a Snapshot) -> Option<&'a str> {
    match path.first()?.as_str() {
        "kind" => Some(match snapshot.kind {
            Kind::View => "view",
            Kind::Active => "active",
            Kind::Committed => "committed",
        }),
        "name" => Some(&snapshot.name),
        "parent" => Some(snapshot.parent.as_deref().unwrap_or_default()),
        "labels" => snapshot.labels.get(&path[1..].join(".")).map(String::as_str),
        _ => None,
    }
}

impl Filter {
    /// Parses a filter.
    ///
    /// # Errors
    /// It cannot be understood, is longer than 16 KiB, or has a pattern that takes too much memory.
    pub fn parse(text: &str) -> Result<Self, SnapshotError> {
        let invalid =
            |problem: &str| SnapshotError::Invalid(format!("filter `{text:.200}`: {problem}"));
        if text.len() > LIMIT {
            return Err(invalid("it is too long"));
        }
        let mut rest = text.chars().peekable();
        let mut conditions = Vec::new();
        while rest.peek().is_some() {
            let mut field = vec![word(&mut rest).map_err(invalid)?];
            while rest.next_if_eq(&'.').is_some() {
                field.push(word(&mut rest).map_err(invalid)?);
            }
            let test = match rest.peek() {
                None | Some(',') => Test::Present,
                Some(_) => {
                    let operator: String = rest.by_ref().take(2).collect();
                    let kind = if operator == "~=" { Operand::Pattern } else { Operand::Text };
                    let value = value(&mut rest, kind).map_err(invalid)?;
                    match operator.as_str() {
                        "==" => Test::Equal(value),
                        "!=" => Test::NotEqual(value),
                        "~=" => Test::Matches(
                            Regex::new(&value).map_err(|error| invalid(&error.to_string()))?,
                        ),
                        _ => return Err(invalid("expected ==, != or ~=")),
                    }
                }
            };
            conditions.push(Condition { field, test });
            if rest.next().is_some_and(|next| next != ',') {
                return Err(invalid("expected a comma"));
            }
        }
        Ok(Filter(conditions))
    }
}

type Input<'a> = Peekable<Chars<'a>>;

/// A part of a field's name.
fn word(input: &mut Input<'_>) -> Result<String, &'static str> {
    if input.peek() == Some(&'"') {
        return quoted(input);
    }
    let mut word = String::new();
    while let Some(next) = input.next_if(|c| c.is_alphanumeric() || matches!(c, '_' | '-')) {
        word.push(next);
    }
    if word.is_empty() { Err("expected the name of a field") } else { Ok(word) }
}

/// The kind of value that an operator takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operand {
    Text,
    /// A regular expression.
    Pattern,
}

fn value(input: &mut Input<'_>, kind: Operand) -> Result<String, &'static str> {
    match input.peek() {
        Some('"') => quoted(input),
        // Patterns have too many backslashes for quotes that use them, too.
        Some(&delimiter @ ('/' | '|')) if kind == Operand::Pattern => {
            input.next();
            let mut value = String::new();
            loop {
                match input.next() {
                    None => return Err("a pattern does not end"),
                    Some(c) if c == delimiter => return Ok(value),
                    Some(c) => value.push(c),
                }
            }
        }
        _ => {
            let mut value = String::new();
            while let Some(next) = input.next_if(|c| *c != ',' && !c.is_whitespace()) {
                value.push(next);
            }
            Ok(value)
        }
    }
}

/// A string in quotes, with the escapes that Go has for printable text.
fn quoted(input: &mut Input<'_>) -> Result<String, &'static str> {
    input.next();
    let mut value = String::new();
    loop {
        match input.next().ok_or("a quoted string does not end")? {
            '"' => return Ok(value),
            '\\' => value.push(match input.next().ok_or("a quoted string does not end")? {
                'n' => '\n',
                't' => '\t',
                'r' => '\r',
                c @ ('"' | '\\' | '\'') => c,
                'x' => escape(input, 2)?,
                'u' => escape(input, 4)?,
                'U' => escape(input, 8)?,
                _ => return Err("unknown escape"),
            }),
            c => value.push(c),
        }
    }
}

fn escape(input: &mut Input<'_>, digits: usize) -> Result<char, &'static str> {
    let digits: String = input.by_ref().take(digits).collect();
    u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32).ok_or("unknown escape")
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn filters_pick_snapshots() {
        let labels = [("plain", "x"), ("containerd.io/a.b", "sha256:1"), ("quote", "a\"b")];
        let snapshot = Snapshot {
            number: 1,
            name: "default/1/key".to_owned(),
            parent: None,
            kind: Kind::Active,
            labels: labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            created: SystemTime::UNIX_EPOCH,
            updated: SystemTime::UNIX_EPOCH,
            usage: Default::default(),
            image: None,
            proven: false,
            key: None,
        };
        for (text, passes) in [
            ("name==default/1/key", true),
            ("name==other", false),
            ("name!=other", true),
            ("kind==active,name~=^default/", true),
            ("kind==committed,name~=^default/", false),
            ("parent==", true),
            ("parent==\"\"", true),
            ("labels.plain", true),
            ("labels.missing", false),
            ("labels.missing!=x", true),
            ("labels.\"containerd.io/a.b\"==\"sha256:1\"", true),
            ("labels.\"containerd.io/a.b\"==sha256:2", false),
            ("labels.quote==\"a\\\"b\"", true),
            ("labels.plain~=/^[xy]$/", true),
            ("unknown", false),
        ] {
            let filter = [Filter::parse(text).unwrap()];
            assert_eq!(any(&filter, &snapshot), passes, "{text}");
        }
        assert!(any(&[], &snapshot));
        let two = ["name==other", "kind==active"].map(|text| Filter::parse(text).unwrap());
        assert!(any(&two, &snapshot));
    }

    #[test]
    fn bad_filters_are_refused() {
        for text in ["==x", "name=x", "name==\"x", "name~=(", "labels.==x", "name==x y", "a~=/x"] {
            let error = Filter::parse(text).unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}
