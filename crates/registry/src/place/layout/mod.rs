//! An OCI image layout directory: a registry without a server.
//!
//! ```text
//! DIR/
//!   oci-layout                   {"imageLayoutVersion": "1.0.0"}
//!   index.json                   the manifests; annotation org.opencontainers.image.ref.name = tag
//!   blobs/sha256/HEX             manifests, configurations and layers
//!   .lazuli.lock                 held while index.json is changed
//! ```
//!
//! Every file appears whole under its name or not at all: it is written or linked beside, synced,
//! renamed. A tag is moved after the blobs are durable. Two processes that add images at once wait
//! for each other at the lock file, which stays there, because a removed one could be locked twice.
//! A push that is given up takes its blobs back.

mod files;
mod index_json;
mod of_repository;
mod referrers;
mod unnamed;
mod write;

use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    io::{self, Read as _},
    ops::Range,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::{
    Digest, Stored,
    oci::{Descriptor, Platform},
};
use lazuli_sys::path_error::At as _;

use self::{files::open_regular, unnamed::Unnamed};
use crate::{
    blob::{BlobReader, Progress, Pushed},
    distribution::small_blob,
    error::RegistryError,
    manifest::{self, DOCUMENT_LIMIT, Document, Manifest, Parsed},
    name::{ImageName, LayoutName, Selector},
    repository::{BlobContent, Pull, Push, PushBy, Referrers, SmallBlob},
    route::bundle::Content,
};

/// Biggest range that is read at once, in bytes. Chunks have at most 16 MiB, and merged reads stay
/// below.
const READ_LIMIT: u64 = 256 << 20;

/// An OCI image layout directory, opened at one image.
#[derive(Clone)]
pub struct Layout {
    name: LayoutName,
    unnamed: Arc<Unnamed>,
    /// The content that it has; `None` for all of the directory.
    content: Option<Arc<Content>>,
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Layout").field(&self.name).finish()
    }
}

impl Layout {
    /// Opens the directory at the image of `name`. The directory need not exist before a push.
    pub fn open(name: LayoutName) -> Self {
        Layout { name, unnamed: Arc::default(), content: None }
    }

    fn place(&self) -> String {
        ImageName::Layout(self.name.clone()).to_string()
    }

    fn blob_path(&self, digest: &Digest) -> PathBuf {
        let directory = self.name.directory.join("blobs").join(digest.algorithm.name());
        directory.join(digest.hex())
    }

    fn index_path(&self) -> PathBuf {
        self.name.directory.join("index.json")
    }

    fn missing(&self, object: &str) -> RegistryError {
        RegistryError::Missing { place: self.place(), object: object.to_owned() }
    }

    /// Reads a small file. If it is missing, reports `object` as missing from this place.
    fn read_bounded(&self, path: &Path, object: &str) -> Result<Bytes, RegistryError> {
        let file = match open_regular(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(self.missing(object));
            }
            Err(error) => return Err(RegistryError::io(path, error)),
        };
        let mut content = Vec::new();
        let read = file.take(DOCUMENT_LIMIT + 1).read_to_end(&mut content);
        if read.at(path)? as u64 > DOCUMENT_LIMIT {
            let (place, object) = (self.place(), object.to_owned());
            return Err(RegistryError::TooLarge { place, object, limit: DOCUMENT_LIMIT });
        }
        Ok(content.into())
    }

    fn read_manifest(&self, digest: &Digest) -> Result<Bytes, RegistryError> {
        let object = format!("manifest {digest}");
        self.expected_size(digest, &object)?;
        self.read_bounded(&self.blob_path(digest), &object)
    }

    fn load(&self, digest: &Digest, media_type: &str) -> Result<Parsed, RegistryError> {
        let raw = self.read_manifest(digest)?;
        manifest::parse(&self.place(), raw, Some(media_type), Some(digest))
    }

    fn find_document(&self, digest: Option<&Digest>) -> Result<Document, RegistryError> {
        let fixed = match (digest, &self.name.image) {
            (Some(digest), _) | (None, Some(Selector::Digest(digest))) => {
                Some((*digest, String::new()))
            }
            _ => None,
        };
        let (digest, media_type) = match fixed {
            Some(fixed) => fixed,
            None => match &self.selected()?[..] {
                [only] => (only.digest, only.media_type.clone()),
                several => {
                    let problem = format!("{} entries have this tag, expected one", several.len());
                    return Err(RegistryError::malformed(&self.place(), "index.json", problem));
                }
            },
        };
        let raw = self.read_manifest(&digest)?;
        manifest::document(&self.place(), raw, Some(&media_type), Some(&digest))
    }

    fn find_manifest(&self, platform: Option<&Platform>) -> Result<Manifest, RegistryError> {
        let mut entries = match self.selected() {
            // A manifest may be reachable only through an index, without an entry in index.json.
            Err(RegistryError::Missing { .. })
                if matches!(self.name.image, Some(Selector::Digest(_))) =>
            {
                Vec::new()
            }
            other => other?,
        };
        let mut index = None;
        if let (Some(Selector::Digest(digest)), true) = (&self.name.image, entries.is_empty()) {
            match self.load(digest, "")? {
                Parsed::Image(manifest) => return Ok(*manifest),
                Parsed::Index(named, inner) => (index, entries) = (Some(*named), inner),
            }
        }
        // An index may hold an index, as docker's layouts do; nothing nests deeper.
        for _ in 0..3 {
            let chosen = match entries.as_slice() {
                [only] if only.platform.is_none() => only,
                several => manifest::choose(&self.place(), several, platform)?,
            };
            match self.load(&chosen.digest, &chosen.media_type)? {
                Parsed::Image(manifest) => return Ok(Manifest { index, ..*manifest }),
                Parsed::Index(named, inner) => (index, entries) = (Some(*named), inner),
            }
        }
        Err(RegistryError::malformed(&self.place(), "the index", "indexes are nested too deeply"))
    }

    fn read_range(&self, digest: &Digest, range: Range<Stored>) -> Result<Bytes, RegistryError> {
        let (start, end) = (range.start.0, range.end.0);
        if start == end {
            return Ok(Bytes::new());
        }
        let object = format!("bytes {start}..{end} of blob {digest}");
        let length =
            end.checked_sub(start).filter(|&length| length <= READ_LIMIT).ok_or_else(|| {
                RegistryError::malformed(
                    &self.place(),
                    &object,
                    "the range is inverted or too long",
                )
            })?;
        let path = self.blob_path(digest);
        let file = self.open_blob(digest)?;
        let size = file.metadata().at(&path)?.len();
        if end > size {
            let got = size.saturating_sub(start);
            return Err(RegistryError::WrongSize {
                place: self.place(),
                object,
                expected: length,
                got,
            });
        }
        let mut content = vec![0; length as usize];
        file.read_exact_at(&mut content, start).at(&path)?;
        Ok(content.into())
    }

    fn open_blob(&self, digest: &Digest) -> Result<File, RegistryError> {
        let (path, object) = (self.blob_path(digest), format!("blob {digest}"));
        let expected = self.expected_size(digest, &object)?;
        let file = open_regular(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => self.missing(&object),
            _ => RegistryError::io(&path, error),
        })?;
        let got = file.metadata().at(&path)?.len();
        match expected {
            Some(expected) if got != expected => {
                Err(RegistryError::WrongSize { place: self.place(), object, expected, got })
            }
            _ => Ok(file),
        }
    }
}

/// Runs blocking file work where it may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RegistryError> + Send + 'static,
) -> Result<T, RegistryError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down, and the caller with it.
            Err(error) => Err(RegistryError::io("", io::Error::other(error))),
        },
    }
}

#[async_trait]
impl Pull for Layout {
    async fn manifest(&self, platform: Option<&Platform>) -> Result<Manifest, RegistryError> {
        let (layout, platform) = (self.clone(), platform.cloned());
        blocking(move || layout.find_manifest(platform.as_ref())).await
    }

    async fn document(&self, digest: Option<&Digest>) -> Result<Document, RegistryError> {
        let (layout, digest) = (self.clone(), digest.copied());
        blocking(move || layout.find_document(digest.as_ref())).await
    }

    async fn has_blob(&self, digest: &Digest) -> Result<bool, RegistryError> {
        match self.blob_size(digest).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_missing() => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn blob_size(&self, digest: &Digest) -> Result<u64, RegistryError> {
        let (layout, digest) = (self.clone(), *digest);
        blocking(move || {
            let file = layout.open_blob(&digest)?;
            Ok(file.metadata().at(layout.blob_path(&digest))?.len())
        })
        .await
    }

    async fn blob(&self, digest: &Digest, size: u64) -> Result<BlobReader, RegistryError> {
        let (layout, wanted) = (self.clone(), *digest);
        let file = blocking(move || layout.open_blob(&wanted)).await?;
        Ok(BlobReader::new(tokio::fs::File::from_std(file), &self.place(), digest, size))
    }

    async fn read(
        &self,
        digest: &Digest,
        _size: u64,
        range: Range<Stored>,
        arrived: Progress<'_>,
    ) -> Result<Bytes, RegistryError> {
        let (layout, digest) = (self.clone(), *digest);
        let bytes = blocking(move || layout.read_range(&digest, range)).await?;
        arrived(bytes.len() as u64);
        Ok(bytes)
    }

    async fn tags(&self, limit: usize) -> Result<Vec<String>, RegistryError> {
        let layout = self.clone();
        let mut tags = blocking(move || layout.tags()).await?;
        tags.truncate(limit);
        Ok(tags)
    }

    async fn small_blob(&self, blob: &Descriptor) -> Result<SmallBlob, RegistryError> {
        small_blob::read(self, blob).await
    }

    fn describe(&self) -> String {
        self.place()
    }

    fn places(self: Arc<Self>) -> Vec<Arc<dyn Pull>> {
        vec![self]
    }
}

#[async_trait]
impl Push for Layout {
    async fn push_blob(
        &self,
        digest: &Digest,
        size: u64,
        content: BlobContent,
        _mount_from: Option<&str>,
        progress: Progress<'_>,
    ) -> Result<Pushed, RegistryError> {
        let (layout, digest) = (self.clone(), *digest);
        let (sender, mut steps) = tokio::sync::mpsc::unbounded_channel();
        let work = blocking(move || {
            // The copy continues when its receiver is gone.
            let step = move |bytes| {
                let _ = sender.send(bytes);
            };
            layout.put_blob(&digest, size, &content, &step)
        });
        let watch = async {
            while let Some(bytes) = steps.recv().await {
                progress(bytes);
            }
        };
        tokio::join!(work, watch).0
    }

    async fn push_manifest(&self, raw: Bytes, media_type: &str) -> Result<Digest, RegistryError> {
        let (layout, media_type) = (self.clone(), media_type.to_owned());
        blocking(move || layout.put_manifest(&raw, &media_type)).await
    }

    async fn push_document(
        &self,
        document: &Document,
        by: PushBy,
    ) -> Result<Pushed, RegistryError> {
        let (layout, document) = (self.clone(), document.clone());
        blocking(move || layout.put_document(&document, by)).await
    }
}

#[async_trait]
impl Referrers for Layout {
    async fn referrers(
        &self,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>, RegistryError> {
        let (layout, subject) = (self.clone(), *subject);
        let artifact_type = artifact_type.map(str::to_owned);
        let list = move || Ok(layout.list_of(&subject)?.of_type(artifact_type.as_deref()));
        blocking(list).await
    }

    /// Refused: tools that open a directory without naming an image expect a single entry.
    async fn push_referrer(
        &self,
        subject: &Descriptor,
        _artifact_type: &str,
        _annotations: &BTreeMap<String, String>,
        _replaces: Option<&Digest>,
    ) -> Result<Digest, RegistryError> {
        let object = format!("referrer of {}", subject.digest);
        Err(RegistryError::NotInLayouts { place: self.place(), object })
    }

    async fn enlist_referrers(
        &self,
        subject: &Digest,
        entries: &[Descriptor],
    ) -> Result<(), RegistryError> {
        let (layout, subject, entries) = (self.clone(), *subject, entries.to_vec());
        blocking(move || layout.enlist(&subject, &entries)).await
    }
}
