//! Patterns of repositories.

use lazuli_registry::Reference;

/// The repositories whose images are made lazy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Repositories(Vec<Pattern>);

/// The parts of a pattern between slashes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pattern(Vec<Part>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    /// `**`: any parts, at least one.
    Any,
    /// One part, with `*` for any letters, also none.
    One(String),
}

impl Repositories {
    /// Parses patterns; the error has the position of the wrong one, and what is wrong.
    pub(crate) fn parse(patterns: &[String]) -> Result<Self, (usize, String)> {
        let parse = |(at, text): (usize, &String)| Pattern::parse(text).map_err(|e| (at, e));
        patterns.iter().enumerate().map(parse).collect::<Result<_, _>>().map(Repositories)
    }

    pub(crate) fn has(&self, repository: &str) -> bool {
        let parts: Vec<&str> = repository.split('/').collect();
        self.0.iter().any(|pattern| pattern.matches(&parts))
    }
}

impl Pattern {
    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}`, expected a repository without its registry and tag, in which `*` stands for any \
                 letters of one part and `**` for any parts, as in team/* or **"
            )
        };
        // What is left is a repository if every `*` stands for a letter.
        let plain = text.replace('*', "x");
        let reference: Reference = format!("r.example/{plain}").parse().map_err(|_| wrong())?;
        if reference.repository() != plain {
            return Err(wrong());
        }
        let part = |part: &str| match part {
            "**" => Ok(Part::Any),
            part if part.contains("**") => Err(wrong()),
            part => Ok(Part::One(part.to_owned())),
        };
        text.split('/').map(part).collect::<Result<_, _>>().map(Pattern)
    }

    fn matches(&self, parts: &[&str]) -> bool {
        // The numbers of parts that the pattern's beginning can have matched.
        let mut matched = vec![false; parts.len() + 1];
        matched[0] = true;
        for wanted in &self.0 {
            let mut next = vec![false; parts.len() + 1];
            for (at, part) in parts.iter().enumerate() {
                next[at + 1] = match wanted {
                    Part::Any => matched[at] || next[at],
                    Part::One(glob) => matched[at] && fits(glob, part),
                };
            }
            matched = next;
        }
        matched[parts.len()]
    }
}

/// Returns whether `text` is `glob` with letters in place of each `*`.
pub(super) fn fits(glob: &str, text: &str) -> bool {
    let Some((first, rest)) = glob.split_once('*') else { return glob == text };
    let Some(mut text) = text.strip_prefix(first) else { return false };
    let mut pieces: Vec<&str> = rest.split('*').collect();
    let last = pieces.pop().unwrap_or_default();
    for piece in pieces {
        // The first occurrence leaves the most for the rest.
        let Some(at) = text.find(piece) else { return false };
        text = &text[at + piece.len()..];
    }
    text.ends_with(last)
}

/// Returns whether `text` is a registry as images name it, and nothing more.
pub(crate) fn is_registry(text: &str) -> bool {
    let parsed = format!("{text}/x/x").parse::<Reference>();
    parsed.is_ok_and(|name| name.registry() == text && name.repository() == "x/x")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_stand_for_parts_of_names() {
        for (pattern, fitting, others) in [
            (
                "team/*",
                &["team/app", "team/x"][..],
                &["team", "team/a/b", "teams/app", "x/team/a"][..],
            ),
            ("library/redis", &["library/redis"], &["library/redis2", "redis", "library/redi"]),
            ("**", &["a", "a/b", "a/b/c"], &[]),
            ("team/**", &["team/a", "team/a/b"], &["team", "other/a"]),
            ("**/app", &["a/app", "a/b/app"], &["app", "a/app/b"]),
            ("a/**/b/**/c", &["a/x/b/y/c", "a/b/b/b/b/c"], &["a/b/c", "a/x/b/c"]),
            ("app-*", &["app-1", "app-x-y"], &["app", "xapp-1", "app-1/b"]),
            ("*-*-a", &["x-y-a", "x-y-z-a"], &["x-a", "x-y-ab"]),
            ("a*a", &["aa", "aba"], &["a"]),
        ] {
            let repositories = Repositories::parse(&[pattern.to_owned()]).unwrap();
            for name in fitting {
                assert!(repositories.has(name), "{pattern} {name}");
            }
            for name in others {
                assert!(!repositories.has(name), "{pattern} {name}");
            }
        }
    }

    #[test]
    fn what_is_no_pattern_is_refused_by_its_position() {
        for wrong in ["", "/a", "a/", "A", "a:1", "a//b", "../a", "a**", "a/***", "a@b", "a b"] {
            let patterns = ["a".to_owned(), wrong.to_owned()];
            let (at, error) = Repositories::parse(&patterns).unwrap_err();
            assert!(at == 1 && error.contains("expected"), "{wrong}");
        }
        let none = Repositories::parse(&[]).unwrap();
        assert!(!none.has("a"));
    }

    #[test]
    fn registries_are_hosts() {
        for (text, right) in [
            ("registry.example:5000", true),
            ("127.0.0.1:5000", true),
            ("localhost", true),
            ("docker.io", true),
            ("", false),
            ("registry", false),
            ("https://registry.example", false),
            ("registry.example/team", false),
            ("index.docker.io", false),
        ] {
            assert_eq!(is_registry(text), right, "{text}");
        }
    }
}
