//! Writes manifests and blobs.

use std::{
    fs::{self, File},
    io::{self, Read as _, Write as _},
    path::Path,
};

use bytes::Bytes;
use lazuli_image::{Algorithm, Digest};
use lazuli_sys::path_error::At as _;

use super::{
    Layout,
    files::{self, write_atomically, write_whole},
};
use crate::{
    blob::{Progress, Pushed, into_blocking},
    error::{self, RegistryError},
    manifest::Document,
    name::Selector,
    repository::{BlobContent, PushBy},
};

/// The content of `oci-layout`.
const VERSION: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;

/// Bytes that are copied at a time.
const COPY_BUFFER: usize = 1 << 20;

impl Layout {
    pub(super) fn put_document(
        &self,
        document: &Document,
        by: PushBy,
    ) -> Result<Pushed, RegistryError> {
        let Document { raw, digest, media_type } = document;
        let size = raw.len() as u64;
        if by == PushBy::Digest {
            return self.put_blob(digest, size, &BlobContent::Bytes(raw.clone()), &|_| {});
        }
        if self.find_document(None).is_ok_and(|there| there.digest == *digest) {
            self.unnamed.named();
            return Ok(Pushed::Existed);
        }
        self.put_manifest(raw, media_type)?;
        Ok(Pushed::Uploaded(size))
    }

    /// Makes the directories and `oci-layout`, if they are not there.
    pub(super) fn prepare(&self) -> Result<(), RegistryError> {
        let blobs = self.name.directory.join("blobs/sha256");
        fs::create_dir_all(&blobs).at(&blobs)?;
        let marker = self.name.directory.join("oci-layout");
        if !marker.exists() {
            write_whole(&marker, VERSION)?;
        }
        Ok(())
    }

    pub(super) fn put_manifest(
        &self,
        raw: &Bytes,
        media_type: &str,
    ) -> Result<Digest, RegistryError> {
        let digest = Algorithm::Sha256.digest(raw);
        if let Some(Selector::Digest(expected)) = self.name.image
            && expected != digest
        {
            let (place, object) = (self.place(), "the manifest".to_owned());
            return Err(RegistryError::WrongDigest { place, object, expected, got: digest });
        }
        self.prepare()?;
        let path = self.blob_path(&digest);
        if !path.exists() {
            write_whole(&path, raw)?;
        }
        let _lock = self.lock()?;
        self.update_index(self.name.image.as_ref(), raw.len(), &digest, media_type)?;
        self.unnamed.named();
        Ok(digest)
    }

    pub(super) fn put_blob(
        &self,
        digest: &Digest,
        size: u64,
        content: &BlobContent,
        progress: Progress<'_>,
    ) -> Result<Pushed, RegistryError> {
        let path = self.blob_path(digest);
        self.prepare()?;
        let directory = &self.name.directory;
        self.unnamed.begin(directory).at(directory)?;
        if self.is_whole(&path, size)? {
            progress(size);
            return Ok(Pushed::Existed);
        }
        let taken_over = match content {
            BlobContent::File(from) => files::take_over(from, &path, size)?,
            _ => false,
        };
        if taken_over {
            progress(size);
        } else {
            self.copy_blob(&path, digest, size, content, progress)?;
        }
        self.unnamed.add(path);
        Ok(Pushed::Uploaded(size))
    }

    /// Writes a blob to `path`, after checking its size and digest.
    pub(super) fn copy_blob(
        &self,
        path: &Path,
        digest: &Digest,
        size: u64,
        content: &BlobContent,
        progress: Progress<'_>,
    ) -> Result<(), RegistryError> {
        write_atomically(path, |file| {
            let mut hasher = digest.algorithm.hasher();
            let mut seen = 0;
            let (place, object) = (self.place(), format!("blob {digest}"));
            let mut source: Box<dyn io::Read> = match content {
                BlobContent::Bytes(bytes) => Box::new(&bytes[..]),
                BlobContent::File(from) => Box::new(File::open(from).at(from)?),
                BlobContent::Stored(from) => {
                    let runtime = tokio::runtime::Handle::current();
                    let reader = runtime.block_on(from.blob(digest, size))?;
                    Box::new(into_blocking(reader, runtime))
                }
            };
            let unreadable = |problem| match content {
                BlobContent::File(from) => RegistryError::io(from, problem),
                _ => error::from_reader(problem, &place, &object),
            };
            let mut buffer = vec![0; COPY_BUFFER];
            loop {
                let read = source.read(&mut buffer).map_err(unreadable)?;
                if read == 0 {
                    break;
                }
                let piece = &buffer[..read];
                hasher.update(piece);
                seen += read as u64;
                file.write_all(piece).at(path)?;
                progress(read as u64);
            }
            if seen != size {
                return Err(RegistryError::WrongSize { place, object, expected: size, got: seen });
            }
            let got = hasher.finish();
            if got != *digest {
                return Err(RegistryError::WrongDigest { place, object, expected: *digest, got });
            }
            Ok(())
        })
    }

    /// Returns whether the blob exists with the right size. A blob of another size was written by a
    /// tool that violates the specification.
    pub(super) fn is_whole(&self, path: &Path, size: u64) -> Result<bool, RegistryError> {
        match fs::metadata(path) {
            Ok(metadata) => Ok(metadata.is_file() && metadata.len() == size),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(RegistryError::io(path, error)),
        }
    }
}
