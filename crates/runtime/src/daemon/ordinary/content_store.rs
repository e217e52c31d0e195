//! containerd's content store: files named by their SHA-256.
//!
//! Nothing in it is trusted: readers compare the content with the digest.

use std::{
    fs::File,
    io::{self, Read as _},
    path::PathBuf,
};

use bytes::Bytes;
use lazuli_image::{Digest, oci::MAX_DOCUMENT};
use rustix::fs::OFlags;

/// The directory, `…/io.containerd.content.v1.content`.
#[derive(Clone, Debug)]
pub(super) struct ContentStore {
    root: PathBuf,
}

impl ContentStore {
    pub(super) fn new(root: PathBuf) -> Self {
        ContentStore { root }
    }

    /// Opens the file with this digest, if it exists, and returns its size. containerd only puts
    /// complete files there.
    pub(super) fn open(&self, digest: &Digest) -> io::Result<Option<(File, u64)>> {
        let path = self.root.join("blobs/sha256").join(digest.hex());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let opened = rustix::fs::open(path, flags, rustix::fs::Mode::empty());
        let file = match opened.map_err(io::Error::from) {
            Ok(file) => File::from(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        let size = metadata.len();
        Ok(metadata.is_file().then_some((file, size)))
    }

    /// Reads a manifest or a configuration, if it exists and matches its digest.
    pub(super) fn document(&self, digest: &Digest) -> io::Result<Option<Bytes>> {
        let Some((file, size)) = self.open(digest)? else { return Ok(None) };
        if size > MAX_DOCUMENT as u64 {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        file.take(MAX_DOCUMENT as u64).read_to_end(&mut bytes)?;
        Ok(digest.matches(&bytes).then(|| bytes.into()))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use lazuli_image::Algorithm;

    use super::*;

    #[test]
    fn only_whole_regular_files_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let blobs = directory.path().join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        let store = ContentStore::new(directory.path().to_owned());
        let digest = |text: &str| Algorithm::Sha256.digest(text.as_bytes());
        fs::write(blobs.join(digest("good").hex()), "good").unwrap();
        fs::write(blobs.join(digest("bad").hex()), "other").unwrap();
        std::os::unix::fs::symlink("/dev/zero", blobs.join(digest("link").hex())).unwrap();
        fs::create_dir(blobs.join(digest("directory").hex())).unwrap();
        assert_eq!(store.document(&digest("good")).unwrap().unwrap(), "good");
        assert!(store.document(&digest("bad")).unwrap().is_none());
        assert!(store.document(&digest("missing")).unwrap().is_none());
        assert!(store.open(&digest("link")).is_err());
        assert!(store.open(&digest("directory")).unwrap().is_none());
    }
}
