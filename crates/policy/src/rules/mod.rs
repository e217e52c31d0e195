//! `policy.toml`: the evidence that each image name requires.
//!
//! ```toml
//! default = "reject"                       # or "accept", or a table like those below
//!
//! [images]
//! "docker.io/library" = "accept"
//! "r.example/public" = { exec = "/usr/libexec/lazuli/notation" }
//!
//! [images."r.example/team"]
//! keys = ["/etc/lazuli/team.pub"]
//! ```
//! The longest name that covers an image's wins.

mod rule;

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use lazuli_image::Digest;
use lazuli_registry::ImageName;
use serde::Deserialize;

pub use self::rule::ReadFile;
use self::rule::Reader;
pub(crate) use self::rule::{Converters, Ground, Requirement, Rule, read_file};
use crate::name::{Asked, Scope};

/// Most bytes of the file, and rules in it.
const FILE_LIMIT: usize = 1 << 20;
const RULES: usize = 4096;

/// Why a policy cannot be used. Until it can, every image that is not mounted yet is refused.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The file cannot be read.
    #[error("policy {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// It is not TOML, or has keys that no policy has.
    #[error("policy {} is not valid: {problem}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The place, and the problem.
        problem: String,
    },
    /// A rule cannot be used.
    #[error("policy {}: {rule}: {problem}", path.display())]
    Rule {
        /// The file.
        path: PathBuf,
        /// `default`, or `images."NAME"`.
        rule: String,
        /// The problem, with the expected value.
        problem: String,
    },
}

/// The policy: for each name the evidence that an image needs.
#[derive(Debug)]
pub struct Policy {
    path: PathBuf,
    default: Rule,
    /// The longest first.
    rules: Vec<(Scope, Rule)>,
    hash: Digest,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    default: toml::Value,
    #[serde(default)]
    images: BTreeMap<String, toml::Value>,
}

impl Policy {
    /// Reads the policy at `path` and the files that it names. `read` reads a file of at most the
    /// given size.
    ///
    /// # Errors
    /// One of them cannot be read, or not be used.
    pub(crate) fn load(path: &Path, read: &ReadFile<'_>) -> Result<Self, PolicyError> {
        let text = read(path, FILE_LIMIT)
            .map_err(|source| PolicyError::Io { path: path.to_owned(), source })?;
        Self::parse(path, &text, read)
    }

    /// Parses the policy from the content of its file. Reads the files that it names.
    ///
    /// # Errors
    /// One of them cannot be read, or not be used.
    pub fn parse(path: &Path, text: &[u8], read: &ReadFile<'_>) -> Result<Self, PolicyError> {
        let syntax = |problem: String| PolicyError::Syntax { path: path.to_owned(), problem };
        if text.len() > FILE_LIMIT {
            return Err(syntax(format!(
                "it has {} bytes, expected at most {FILE_LIMIT}",
                text.len()
            )));
        }
        let text = std::str::from_utf8(text).map_err(|error| syntax(error.to_string()))?;
        let document: Document = toml::from_str(text).map_err(|error| syntax(error.to_string()))?;
        if document.images.len() > RULES {
            let count = document.images.len();
            return Err(syntax(format!("it has {count} images, expected at most {RULES}")));
        }
        let mut reader = Reader { read, seen: vec![(path.to_owned(), text.as_bytes().to_vec())] };
        let fail = |rule: &str, problem: String| {
            let (path, rule) = (path.to_owned(), rule.to_owned());
            PolicyError::Rule { path, rule, problem }
        };
        let default = reader.rule(document.default).map_err(|problem| fail("default", problem))?;
        let mut rules = Vec::new();
        for (name, value) in document.images {
            let place = format!("images.{name:?}");
            let scope = Scope::parse(&name).map_err(|problem| fail(&place, problem))?;
            if rules.iter().any(|(known, _)| *known == scope) {
                return Err(fail(&place, format!("{scope} appears twice")));
            }
            rules.push((scope, reader.rule(value).map_err(|problem| fail(&place, problem))?));
        }
        rules.sort_by_key(|(scope, _)| std::cmp::Reverse(scope.len()));
        Ok(Policy { path: path.to_owned(), default, rules, hash: reader.hash() })
    }

    /// The digest of everything that it depends on: a verdict holds for as long as this is the
    /// same.
    pub fn hash(&self) -> Digest {
        self.hash
    }

    /// Returns whether conversion statements count for lazy images under `name`, so that the
    /// referrers of an ordinary image are worth a request.
    pub fn takes_statements(&self, name: &ImageName) -> bool {
        let (_, rule) = self.rule(&Asked::of(name));
        matches!(rule, Rule::Require(requirement)
            if !requirement.converters.keys.is_empty() && !requirement.accepts_anything())
    }

    /// Returns whether a key is trusted to state the contents of layers of images named `name`.
    pub fn has_statement_keys(&self, name: &ImageName) -> bool {
        let (_, rule) = self.rule(&Asked::of(name));
        matches!(rule, Rule::Require(requirement) if !requirement.converters.keys.is_empty())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the rule for an image, and its name in the file.
    pub(crate) fn rule(&self, asked: &Asked) -> (String, &Rule) {
        let found = self.rules.iter().find(|(scope, _)| scope.covers(&asked.repository));
        found.map_or_else(
            || ("default".to_owned(), &self.default),
            |(scope, rule)| (scope.to_string(), rule),
        )
    }
}

#[cfg(test)]
mod tests;
