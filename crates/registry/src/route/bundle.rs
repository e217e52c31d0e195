//! Where the images are that a node was delivered with.

use std::{
    collections::HashMap,
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use lazuli_image::{Digest, oci::Descriptor};

use crate::{
    file_version::FileVersion,
    name::{LayoutName, Reference, Selector},
};

/// A layout directory of images under their full names.
#[derive(Clone)]
pub struct Bundle {
    directory: PathBuf,
    known: Arc<Mutex<Known>>,
}

/// What was read of a bundle, until its index.json is another file.
#[derive(Default)]
pub(crate) struct Known {
    pub(crate) version: Option<FileVersion>,
    pub(crate) entries: Vec<Descriptor>,
    /// By repository.
    pub(crate) content: HashMap<String, Arc<Content>>,
}

/// What the images of a repository consist of, and its sizes.
pub(crate) type Content = HashMap<Digest, u64>;

impl fmt::Debug for Bundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Bundle").field(&self.directory).finish()
    }
}

impl Bundle {
    /// The bundle in `directory`, which need not exist.
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        Bundle { directory: directory.into(), known: Arc::default() }
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

    pub(crate) fn known(&self) -> MutexGuard<'_, Known> {
        // A panic leaves less that is known.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn selected(&self, image: Selector) -> LayoutName {
        LayoutName { directory: self.directory.clone(), image: Some(image) }
    }
}
