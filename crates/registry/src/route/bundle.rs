//! Where the images are that a node was delivered with.

use std::path::PathBuf;

use crate::name::{LayoutName, Reference, Selector};

/// A layout directory of images under their full names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bundle(PathBuf);

impl Bundle {
    /// The bundle in `directory`, which need not exist.
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        Bundle(directory.into())
    }

    /// The name in the layout under which the image `reference` is stored.
    pub fn entry(&self, reference: &Reference) -> LayoutName {
        let name = match reference.selector() {
            Selector::Tag(tag) => format!("{}:{tag}", reference.in_registry()),
            Selector::Digest(digest) => format!("{}@{digest}", reference.in_registry()),
        };
        self.selected(Selector::Tag(name))
    }

    /// The name in the layout of what `reference` names: a platform's manifest, which `reference`
    /// may name by its digest, has no entry of its own.
    pub(crate) fn content(&self, reference: &Reference) -> LayoutName {
        match reference.selector() {
            digest @ Selector::Digest(_) => self.selected(digest),
            Selector::Tag(_) => self.entry(reference),
        }
    }

    fn selected(&self, image: Selector) -> LayoutName {
        LayoutName { directory: self.0.clone(), image: Some(image) }
    }
}
