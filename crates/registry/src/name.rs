//! Names of images, spelled as users of docker and skopeo spell them.
//!
//! ```text
//! debian                                  docker.io/library/debian:latest
//! quay.io/org/app:1.2@sha256:…            the digest decides, the tag is kept for people
//! localhost:5000/app, [::1]:5000/app      a loopback registry, over plain HTTP
//! docker://host/app                       the same with skopeo's prefix
//! oci:DIR[:TAG], oci:DIR@sha256:…         an OCI image layout directory
//! docker-archive:FILE[:REFERENCE]         what `docker save` writes      (sources only)
//! tar:FILE, dir:PATH                      a root file system             (sources only)
//! ```
//!
//! As in skopeo, the first `:` after the prefix ends the path of `oci:` and `docker-archive:`, so
//! such a path cannot contain one; in `tar:` and `dir:` everything after the prefix is the path.

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
    path::PathBuf,
    str::FromStr,
};

use lazuli_image::{Algorithm, Digest};

/// A name that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}`: {problem}")]
pub struct InvalidName {
    /// The text, shortened.
    pub text: String,
    /// The problem, with an example of a valid name.
    pub problem: String,
}

impl InvalidName {
    pub(crate) fn new(text: &str, problem: impl Into<String>) -> Self {
        InvalidName { text: text.chars().take(300).collect(), problem: problem.into() }
    }
}

/// The source of an image to convert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A registry or a layout directory.
    Image(ImageName),
    /// An archive by `docker save`, and one of its images by name; `None` if there is only one.
    DockerArchive(PathBuf, Option<String>),
    /// A tar of a root file system.
    Tar(PathBuf),
    /// A directory that is a root file system.
    Directory(PathBuf),
}

/// Where an image is kept: conversion targets and mountable images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageName {
    /// In a registry.
    Registry(Reference),
    /// In an OCI image layout directory.
    Layout(LayoutName),
}

/// An image in a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

/// An image in an OCI image layout directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutName {
    /// The directory that holds `index.json`.
    pub directory: PathBuf,
    /// The selected image; `None` if there is only one.
    pub image: Option<Selector>,
}

/// Selects an image of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// A name that can move.
    Tag(String),
    /// The digest of a manifest.
    Digest(Digest),
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Selector::Tag(tag) => f.write_str(tag),
            Selector::Digest(digest) => digest.fmt(f),
        }
    }
}

impl ImageName {
    /// The name with this tag in the same place; `None` if no image there can have it.
    pub fn tagged(&self, tag: &str) -> Option<Self> {
        match self {
            ImageName::Registry(reference) => reference.tagged(tag).map(ImageName::Registry),
            ImageName::Layout(LayoutName { directory, .. }) => {
                let (directory, image) = (directory.clone(), Some(Selector::Tag(tag.to_owned())));
                Some(ImageName::Layout(LayoutName { directory, image }))
            }
        }
    }

    /// The tag or digest, if the name has one.
    pub fn selector(&self) -> Option<Selector> {
        match self {
            ImageName::Registry(reference) => Some(reference.selector()),
            ImageName::Layout(layout) => layout.image.clone(),
        }
    }

    /// The tag that decides, if one does.
    pub fn tag(&self) -> Option<String> {
        match self.selector()? {
            Selector::Tag(tag) => Some(tag),
            Selector::Digest(_) => None,
        }
    }

    /// Returns whether the name has a digest, and so means one image for ever.
    pub fn is_pinned(&self) -> bool {
        matches!(self.selector(), Some(Selector::Digest(_)))
    }
}

impl Reference {
    /// Host and port of the registry as a user spells it, `docker.io` for Docker Hub.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// Registry and repository, without tag and digest.
    pub(crate) fn in_registry(&self) -> String {
        format!("{}/{}", self.registry(), self.repository())
    }

    /// The repository inside the registry: `library/debian`.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The tag, also beside a digest.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The manifest that is meant: the digest if there is one, else the tag.
    pub fn selector(&self) -> Selector {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => Selector::Digest(*digest),
            (None, Some(tag)) => Selector::Tag(tag.clone()),
            (None, None) => Selector::Tag("latest".to_owned()),
        }
    }

    /// Returns whether both are images of one repository.
    pub(crate) fn is_same_repository(&self, other: &Self) -> bool {
        self.registry == other.registry && self.repository == other.repository
    }

    /// The same repository, at a fixed manifest.
    pub fn at(&self, digest: Digest) -> Self {
        Reference { digest: Some(digest), ..self.clone() }
    }

    /// The name with this tag in the same repository; `None` if it is not a valid tag.
    fn tagged(&self, tag: &str) -> Option<Self> {
        is_tag(tag).then(|| Reference { tag: Some(tag.into()), digest: None, ..self.clone() })
    }

    /// The same image at another host.
    pub(crate) fn on(&self, registry: &str) -> Self {
        Reference { registry: registry.to_owned(), ..self.clone() }
    }

    /// Returns whether the registry runs on this machine. Users of docker and skopeo expect plain
    /// HTTP there.
    pub fn is_loopback(&self) -> bool {
        let host = match self.registry.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or_default(),
            None => self.registry.split(':').next().unwrap_or_default(),
        };
        host == "localhost"
            || host.parse::<Ipv4Addr>().is_ok_and(|ip| ip.is_loopback())
            || host.parse::<Ipv6Addr>().is_ok_and(|ip| ip.is_loopback())
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        self.tag.as_ref().map_or(Ok(()), |tag| write!(f, ":{tag}"))?;
        self.digest.as_ref().map_or(Ok(()), |digest| write!(f, "@{digest}"))
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ImageName::Registry(reference) => reference.fmt(f),
            ImageName::Layout(layout) => {
                write!(f, "oci:{}", layout.directory.display())?;
                match &layout.image {
                    Some(Selector::Tag(tag)) => write!(f, ":{tag}"),
                    Some(Selector::Digest(digest)) => write!(f, "@{digest}"),
                    None => Ok(()),
                }
            }
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Image(name) => name.fmt(f),
            Source::DockerArchive(file, None) => write!(f, "docker-archive:{}", file.display()),
            Source::DockerArchive(file, Some(reference)) => {
                write!(f, "docker-archive:{}:{reference}", file.display())
            }
            Source::Tar(file) => write!(f, "tar:{}", file.display()),
            Source::Directory(path) => write!(f, "dir:{}", path.display()),
        }
    }
}

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

fn is_tag(tag: &str) -> bool {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    tag.len() <= 128
        && tag.bytes().next().is_some_and(word)
        && tag.bytes().all(|b| word(b) || b == b'.' || b == b'-')
}
