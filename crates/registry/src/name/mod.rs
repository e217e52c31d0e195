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

mod parse;

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
    path::PathBuf,
};

use lazuli_image::Digest;

use parse::is_tag;

pub(crate) use parse::host_problem;

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

/// An image in a registry or a layout: conversion targets and mountable images.
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

    /// The same repository or layout, at a fixed manifest.
    pub fn pinned_to(&self, digest: Digest) -> Self {
        match self {
            ImageName::Registry(reference) => ImageName::Registry(reference.at(digest)),
            ImageName::Layout(LayoutName { directory, .. }) => {
                let (directory, image) = (directory.clone(), Some(Selector::Digest(digest)));
                ImageName::Layout(LayoutName { directory, image })
            }
        }
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
