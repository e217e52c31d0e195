//! Patterns of tags that get the lazy form of their image.

use lazuli_registry::Reference;

use crate::error::MirrorError;

/// A set of repositories, by name or by prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LazyNames(Vec<Pattern>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    Repository(String),
    Prefix(String),
}

impl LazyNames {
    /// Parses patterns: `registry.example/team/app`, `registry.example/team/*` and `*`.
    ///
    /// # Errors
    /// A pattern has none of these forms.
    pub fn parse(patterns: &[String]) -> Result<Self, MirrorError> {
        patterns.iter().map(|text| Pattern::parse(text)).collect::<Result<_, _>>().map(Self)
    }

    pub(crate) fn has(&self, reference: &Reference) -> bool {
        let name = format!("{}/{}", reference.registry(), reference.repository());
        self.0.iter().any(|pattern| match pattern {
            Pattern::Repository(repository) => *repository == name,
            Pattern::Prefix(prefix) => name.starts_with(prefix),
        })
    }
}

impl Pattern {
    fn parse(text: &str) -> Result<Self, MirrorError> {
        let wrong = |problem: String| MirrorError::Pattern { pattern: text.to_owned(), problem };
        if text == "*" {
            return Ok(Pattern::Prefix(String::new()));
        }
        let plain = text.strip_suffix("/*").unwrap_or(text);
        if plain.is_empty() || plain.contains(['*', '@', ' ']) {
            let expected = "expected HOST/REPOSITORY, HOST/PATH/* or *";
            return Err(wrong(expected.to_owned()));
        }
        if plain != text {
            return Ok(Pattern::Prefix(format!("{plain}/")));
        }
        let reference: Reference = text.parse().map_err(|error| wrong(format!("{error}")))?;
        if text.rsplit('/').next() != reference.repository().rsplit('/').next() {
            return Err(wrong("expected a repository, without a tag".to_owned()));
        }
        Ok(Pattern::Repository(format!("{}/{}", reference.registry(), reference.repository())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories_are_named_whole_or_by_their_beginning() {
        let parse = |text: &str| LazyNames::parse(&[text.to_owned()]);
        for (pattern, name, expected) in [
            ("*", "r.example/a:1", true),
            ("r.example/*", "r.example/team/a:1", true),
            ("r.example/team/*", "r.example/team/a:1", true),
            ("r.example/team/*", "r.example/teams/a:1", false),
            ("r.example/team/a", "r.example/team/a:1", true),
            ("r.example/team/a", "r.example/team/ab:1", false),
            ("debian", "docker.io/library/debian:12", true),
        ] {
            let names = parse(pattern).unwrap();
            assert_eq!(names.has(&name.parse().unwrap()), expected, "{pattern} {name}");
        }
        assert!(!LazyNames::default().has(&"r.example/a:1".parse().unwrap()));
        for pattern in ["", "/*", "r.example/*/a", "r.example/a:1", "r.example/te*", "https://a/b"]
        {
            let error = parse(pattern).unwrap_err().to_string();
            assert!(error.contains(&format!("`{pattern}`")), "{error}");
        }
    }
}
