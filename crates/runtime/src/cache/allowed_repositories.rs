//! The repositories whose images may use what the cache has of a private blob.
//!
//! A blob is private once an image that came with a pull secret has used it. Its directory then has
//! a file `repositories`, with one repository per line: those of such images, and those that have
//! proven to have the blob. Blobs without the file are for every image.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Mutex,
};

use crate::sync::lock;

const FILE: &str = "repositories";

/// See the module. `host/path`, or `oci:` and a directory.
#[derive(Debug)]
pub(crate) struct AllowedRepositories {
    directory: PathBuf,
    names: Mutex<BTreeSet<String>>,
}

impl AllowedRepositories {
    /// Reads the file in a blob's directory.
    pub(super) fn read(directory: &Path) -> Self {
        let text = fs::read_to_string(directory.join(FILE)).unwrap_or_default();
        let names = Mutex::new(text.lines().map(str::to_owned).collect());
        AllowedRepositories { directory: directory.to_owned(), names }
    }

    /// Returns whether an image may use the blob because of its repository, without a proof.
    pub(crate) fn allow(&self, repository: &str) -> bool {
        let names = lock(&self.names);
        names.is_empty() || names.contains(repository)
    }

    /// Makes the blob private, if it is not yet, and allows a repository.
    pub(crate) fn add(&self, repository: &str) -> io::Result<()> {
        let mut names = lock(&self.names);
        if names.insert(repository.to_owned()) {
            let new = self.directory.join("repositories.new");
            let options =
                fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(&new);
            let mut file = options?;
            names.iter().try_for_each(|name| writeln!(file, "{name}"))?;
            fs::rename(&new, self.directory.join(FILE))?;
        }
        Ok(())
    }

    /// Returns whether images of another blob may use chunks of this one.
    pub(super) fn share_with(&self, other: &Self) -> bool {
        let names = lock(&self.names).clone();
        names.is_empty() || !names.is_disjoint(&lock(&other.names))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_blob_is_for_its_repositories_also_after_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let here = || AllowedRepositories::read(directory.path());
        assert!(here().allow("r.example/b"));
        here().add("r.example/a").unwrap();
        here().add("r.example/c").unwrap();
        assert!(here().allow("r.example/a") && here().allow("r.example/c"));
        assert!(!here().allow("r.example/b"));
    }

    #[test]
    fn private_chunks_are_shared_within_a_repository() {
        let directories: Vec<_> = (0..4).map(|_| tempfile::tempdir().unwrap()).collect();
        let [public, one, other, both] = [&[][..], &["a"], &["b"], &["a", "b"]];
        let blobs: Vec<_> = [public, one, other, both]
            .into_iter()
            .zip(&directories)
            .map(|(names, directory)| {
                let blob = AllowedRepositories::read(directory.path());
                names.iter().for_each(|name| blob.add(name).unwrap());
                blob
            })
            .collect();
        let [public, one, other, both] = &blobs[..] else { unreachable!() };
        for (from, to, may) in [
            (public, one, true),
            (one, public, false),
            (one, other, false),
            (one, both, true),
            (both, other, true),
        ] {
            assert_eq!(from.share_with(to), may, "{from:?} {to:?}");
        }
    }
}
