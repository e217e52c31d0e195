//! Parses names of images.

use std::{net::Ipv6Addr, path::PathBuf, str::FromStr};

use lazuli_image::{Algorithm, Digest};

use super::{ImageName, InvalidName, LayoutName, Reference, Selector, Source};

impl FromStr for Source {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        if let Some(rest) = text.strip_prefix("docker-archive:") {
            let (file, reference) = path_and_rest(text, rest, "docker-archive:image.tar")?;
            return Ok(Source::DockerArchive(file, reference.map(str::to_owned)));
        }
        if let Some(rest) = text.strip_prefix("tar:") {
            return whole_path(text, rest, "tar:rootfs.tar").map(Source::Tar);
        }
        if let Some(rest) = text.strip_prefix("dir:") {
            return whole_path(text, rest, "dir:./rootfs").map(Source::Directory);
        }
        text.parse().map(Source::Image)
    }
}

impl FromStr for ImageName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let source_only = ["docker-archive:", "tar:", "dir:"];
        if let Some(prefix) = source_only.iter().find(|prefix| text.starts_with(**prefix)) {
            let problem = format!(
                "{prefix} can only be converted from; an image is kept in a registry \
                 (localhost:5000/app:1) or a layout directory (oci:./images:app)"
            );
            return Err(InvalidName::new(text, problem));
        }
        match text.strip_prefix("oci:") {
            Some(rest) => layout(text, rest).map(ImageName::Layout),
            None => text.parse().map(ImageName::Registry),
        }
    }
}

fn layout(text: &str, rest: &str) -> Result<LayoutName, InvalidName> {
    if let Some((directory, digest)) = rest.rsplit_once('@')
        && let Ok(digest) = digest.parse::<Digest>()
    {
        let directory = whole_path(text, directory, "oci:./images")?;
        return Ok(LayoutName { directory, image: Some(Selector::Digest(digest)) });
    }
    let (directory, tag) = path_and_rest(text, rest, "oci:./images:app")?;
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"-._:@+/".contains(&b);
    if let Some(tag) = tag
        && !(tag.bytes().all(legal) && tag.len() <= 255)
    {
        let problem = "the tag after the path may hold letters, digits and -._:@+/ only, as in oci:./images:app-1.2";
        return Err(InvalidName::new(text, problem));
    }
    Ok(LayoutName { directory, image: tag.map(|tag| Selector::Tag(tag.to_owned())) })
}

fn whole_path(text: &str, rest: &str, example: &str) -> Result<PathBuf, InvalidName> {
    if rest.is_empty() || rest.contains('\0') {
        return Err(InvalidName::new(
            text,
            format!("a path is expected after the prefix, as in {example}"),
        ));
    }
    Ok(PathBuf::from(rest))
}

fn path_and_rest<'a>(
    text: &str,
    rest: &'a str,
    example: &str,
) -> Result<(PathBuf, Option<&'a str>), InvalidName> {
    let (path, tail) = match rest.split_once(':') {
        Some((_, "")) => {
            let problem = format!(
                "nothing follows the last `:`; leave it out or name an image, as in {example}"
            );
            return Err(InvalidName::new(text, problem));
        }
        Some((path, tail)) => (path, Some(tail)),
        None => (rest, None),
    };
    Ok((whole_path(text, path, example)?, tail))
}

impl FromStr for Reference {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let wrong = |problem: String| Err(InvalidName::new(text, problem));
        let name = text.strip_prefix("docker://").unwrap_or(text);
        if let Some((scheme, _)) = name.split_once("://") {
            return wrong(format!(
                "a reference has no `{scheme}://`; write it as in quay.io/org/app:1.2"
            ));
        }
        let (name, digest) = match name.split_once('@') {
            Some((name, digest)) => {
                let digest =
                    digest.parse::<Digest>().ok().filter(|d| d.algorithm == Algorithm::Sha256);
                if digest.is_none() {
                    return wrong(
                        "after `@` comes sha256: and 64 lower-case hex digits".to_owned(),
                    );
                }
                (name, digest)
            }
            None => (name, None),
        };
        // Docker's rule: the first component is a host if it could not be a part of a repository.
        let (registry, path) = match name.split_once('/') {
            Some((first, rest))
                if first.contains(['.', ':', '['])
                    || first == "localhost"
                    || first.bytes().any(|b| b.is_ascii_uppercase()) =>
            {
                (first, rest)
            }
            _ => ("docker.io", name),
        };
        if let Some(problem) = host_problem(registry) {
            return wrong(problem);
        }
        let registry = if registry == "index.docker.io" { "docker.io" } else { registry };
        let (path, tag) = match path.split_once(':') {
            Some((path, tag)) => (path, Some(tag)),
            None => (path, None),
        };
        let repository = match registry {
            "docker.io" if !path.contains('/') => format!("library/{path}"),
            _ => path.to_owned(),
        };
        if let Some(problem) = repository_problem(path, &repository) {
            return wrong(problem);
        }
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return wrong(
                "a tag is 1 to 128 letters, digits, `_`, `.` and `-` and starts with none of the last two, \
                 as in quay.io/org/app:1.2"
                    .to_owned(),
            );
        }
        let tag = match (tag, digest) {
            (None, None) => Some("latest".to_owned()),
            (tag, _) => tag.map(str::to_owned),
        };
        Ok(Reference { registry: registry.to_owned(), repository, tag, digest })
    }
}

/// The problem with the host and port of a registry, if any.
pub(crate) fn host_problem(registry: &str) -> Option<String> {
    let example = "as in quay.io, localhost:5000 or [::1]:5000";
    let (host_is_right, port) = match registry.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((address, port)) => (address.parse::<Ipv6Addr>().is_ok(), port),
            None => (false, ""),
        },
        None => {
            let (host, port) = registry.split_at(registry.find(':').unwrap_or(registry.len()));
            let label = |label: &str| {
                let legal = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
                !label.is_empty()
                    && label.bytes().all(legal)
                    && !label.starts_with('-')
                    && !label.ends_with('-')
            };
            (host.len() <= 253 && host.split('.').all(label), port)
        }
    };
    if !host_is_right {
        return Some(format!("`{registry}` is not a registry host, {example}"));
    }
    let port_is_right = port.is_empty()
        || port.strip_prefix(':').is_some_and(|digits| {
            digits.bytes().all(|b| b.is_ascii_digit())
                && digits.parse::<u16>().is_ok_and(|p| p != 0)
        });
    (!port_is_right).then(|| format!("`{registry}` has no valid port, {example}"))
}

/// The problem with a repository, if any. `path` is the user's spelling, `repository` the same with
/// `library/`.
fn repository_problem(path: &str, repository: &str) -> Option<String> {
    if path.is_empty() {
        return Some("the repository is missing, as in quay.io/org/app:1.2".to_owned());
    }
    if repository.len() > 255 {
        return Some("the repository is longer than 255 characters".to_owned());
    }
    if path.bytes().any(|b| b.is_ascii_uppercase()) {
        return Some(format!("a repository is lower case, as in {}", path.to_ascii_lowercase()));
    }
    (!repository.split('/').all(is_component)).then(|| {
        "each part of a repository is lower-case letters and digits, separated by one `.`, one or two `_` \
         or any number of `-`, as in quay.io/my-org/my_app"
            .to_owned()
    })
}

fn is_component(part: &str) -> bool {
    let word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    if !part.bytes().next().is_some_and(word) || !part.bytes().last().is_some_and(word) {
        return false;
    }
    part.split(|c: char| c.is_ascii() && word(c as u8)).all(|separator| {
        matches!(separator, "" | "." | "_" | "__") || separator.bytes().all(|b| b == b'-')
    })
}

pub(super) fn is_tag(tag: &str) -> bool {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    tag.len() <= 128
        && tag.bytes().next().is_some_and(word)
        && tag.bytes().all(|b| word(b) || b == b'.' || b == b'-')
}
