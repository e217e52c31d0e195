//! Shells that run scripts, and what is known of these.

use std::{
    collections::{HashMap, HashSet},
    hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher},
};

/// A shell that runs a script.
#[derive(Debug)]
pub(super) struct Shell {
    pub(super) path: Vec<u8>,
    pub(super) text: Vec<u8>,
    /// The words after its name.
    pub(super) words: Vec<Vec<u8>>,
    /// Texts of scripts that it sources, by the path that it gives; empty until they are read.
    pub(super) sources: HashMap<Vec<u8>, Vec<u8>>,
    /// Its commands that were followed, by their hash.
    followed: HashSet<u64>,
}

impl Shell {
    pub(super) fn new(path: &[u8], text: &[u8], words: &[Vec<u8>]) -> Self {
        let (path, text, words) = (path.to_vec(), text.to_vec(), words.to_vec());
        let (sources, followed) = Default::default();
        Shell { path, text, words, sources, followed }
    }

    /// Returns whether a command was not followed before. From now on it was.
    pub(super) fn is_new(&mut self, command: &[Vec<u8>]) -> bool {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(command);
        self.followed.insert(hash)
    }
}
