//! Matches names of images against a policy's rules and the names in signatures.

use std::fmt;

use lazuli_registry::ImageName;

/// The repository of an image and its tag, as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    /// `docker.io/library/debian`, or `oci:/srv/images`.
    pub(crate) repository: String,
    /// The tag, also beside a digest.
    pub(crate) tag: Option<String>,
}

impl Asked {
    pub(crate) fn of(name: &ImageName) -> Self {
        match name {
            ImageName::Registry(reference) => Asked {
                repository: format!("{}/{}", reference.registry(), reference.repository()),
                tag: reference.tag().map(str::to_owned),
            },
            ImageName::Layout(layout) => {
                Asked { repository: format!("oci:{}", layout.directory.display()), tag: name.tag() }
            }
        }
    }

    /// Returns whether a signature under the name `identity` covers this image.
    pub(crate) fn is_signed_as(&self, identity: &str, others: &[Scope]) -> bool {
        let Ok(name) = identity.parse::<ImageName>() else { return false };
        let signed = Asked::of(&name);
        // Signers may omit the tag, and a name without a tag is parsed as `latest`.
        let last = identity.rsplit('/').next().unwrap_or_default();
        let names_tag = last.contains([':', '@']);
        let is_same_tag = !names_tag || self.tag.is_none() || signed.tag == self.tag;
        signed.repository == self.repository && is_same_tag
            || others.iter().any(|scope| scope.covers(&signed.repository))
    }
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repository)?;
        self.tag.as_ref().map_or(Ok(()), |tag| write!(f, ":{tag}"))
    }
}

/// A registry, a repository, or all repositories below a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scope(String);

impl Scope {
    /// Parses `HOST`, `HOST/PATH` or `oci:DIR`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let expected = "expected HOST or HOST/PATH as in docker.io/library, or oci:/DIR, \
                        without tag and digest";
        if let Some(directory) = text.strip_prefix("oci:") {
            let is_plain = directory.starts_with('/') && !directory.contains(':');
            return match directory.trim_end_matches('/') {
                path if is_plain && !path.is_empty() => Ok(Scope(format!("oci:{path}"))),
                _ => Err(expected.to_owned()),
            };
        }
        // Append two parts: a registry alone is no image name, and Docker Hub's images of one part
        // are below `library`.
        let name = format!("{text}/x/x").parse::<ImageName>();
        let name = name.map_err(|error| format!("{}; {expected}", error.problem))?;
        let repository = Asked::of(&name).repository;
        let scope = repository.strip_suffix("/x/x").unwrap_or(&repository);
        let host = text.split('/').next();
        let is_as_written = scope.split('/').next() == host || host == Some("index.docker.io");
        if is_as_written { Ok(Scope(scope.to_owned())) } else { Err(expected.to_owned()) }
    }

    pub(crate) fn covers(&self, repository: &str) -> bool {
        let rest = repository.strip_prefix(&self.0);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_end_at_parts_of_a_name() {
        for (scope, covered, not) in [
            ("r.example/team", "r.example/team/app", "r.example/teams"),
            ("r.example/team", "r.example/team", "r.example"),
            ("r.example:5000", "r.example:5000/a", "r.example/a"),
            ("docker.io", "docker.io/library/debian", "docker.iox/a"),
            ("index.docker.io/library", "docker.io/library/debian", "docker.io/other/debian"),
            ("oci:/srv/images/", "oci:/srv/images/a", "oci:/srv/images2"),
        ] {
            let scope = Scope::parse(scope).unwrap();
            assert!(scope.covers(covered) && !scope.covers(not), "{scope}");
        }
        for wrong in
            ["", "team", "r.example/a:1", "r.example/A", "r.example/", "oci:rel", "oci:/a:b"]
        {
            assert!(Scope::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn identities_name_the_image_that_was_asked_for() {
        let asked = |name: &str| Asked::of(&name.parse().unwrap());
        let digest = format!("@sha256:{}", "1".repeat(64));
        for (name, identity, fits) in [
            ("r.example/a:1", "r.example/a", true),
            ("r.example/a:1", "r.example/a:1", true),
            ("r.example/a:1", "r.example/a:2", false),
            ("r.example/a:1", "r.example/b", false),
            ("debian", "index.docker.io/library/debian", true),
            (&format!("r.example/a{digest}"), "r.example/a:2", true),
            (&format!("r.example/a:1{digest}"), "r.example/a:2", false),
            ("r.example/a:1", "", false),
            ("r.example/a:1", "not a name", false),
        ] {
            assert_eq!(asked(name).is_signed_as(identity, &[]), fits, "{name} {identity}");
        }
        let others = [Scope::parse("stage.example").unwrap()];
        assert!(asked("r.example/a:1").is_signed_as("stage.example/a:9", &others));
    }
}
