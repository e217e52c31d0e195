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
mod referrers;
mod unnamed;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read as _, Write as _},
    ops::Range,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use bytes::Bytes;
use lazuli_image::{
    Algorithm, Digest, Stored,
    oci::{Descriptor, Platform},
};
use rustix::fs::{FlockOperation, flock};
use serde_json::{Map, Value, json};

use self::{
    files::{open_regular, write_atomically, write_whole},
    unnamed::Unnamed,
};
use crate::{
    blob::{BlobReader, Progress, Pushed, into_blocking},
    distribution::{referrers::is_beside_image, small_blob},
    error::{self, RegistryError},
    manifest::{self, DOCUMENT_LIMIT, Document, Manifest, Parsed},
    name::{ImageName, LayoutName, Selector},
    repository::{BlobContent, Pull, Push, Referrers, SmallBlob},
};

/// The annotation that holds the tag.
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// What `oci-layout` says.
const VERSION: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;

/// Bytes that are copied at a time.
const COPY_BUFFER: usize = 1 << 20;

/// Biggest range that is read at once, in bytes. Chunks have at most 16 MiB, and merged reads stay
/// below.
const READ_LIMIT: u64 = 256 << 20;

/// An OCI image layout directory, opened at one image.
#[derive(Clone, Debug)]
pub struct Layout {
    name: LayoutName,
    unnamed: Arc<Unnamed>,
}

impl Layout {
    /// Opens the directory at the image of `name`. The directory need not exist before a push.
    pub fn open(name: LayoutName) -> Self {
        Layout { name, unnamed: Arc::default() }
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

    /// Reads a small file; a missing one is `object` missing from this place.
    fn read_bounded(&self, path: &Path, object: &str) -> Result<Bytes, RegistryError> {
        let file = match open_regular(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(self.missing(object));
            }
            Err(error) => return Err(RegistryError::io(path)(error)),
        };
        let mut content = Vec::new();
        let read = file.take(DOCUMENT_LIMIT + 1).read_to_end(&mut content);
        if read.map_err(RegistryError::io(path))? as u64 > DOCUMENT_LIMIT {
            let (place, object) = (self.place(), object.to_owned());
            return Err(RegistryError::TooLarge { place, object, limit: DOCUMENT_LIMIT });
        }
        Ok(content.into())
    }

    /// The descriptors of index.json.
    fn entries(&self) -> Result<Vec<Descriptor>, RegistryError> {
        let raw = self.read_bounded(&self.index_path(), "image (there is no index.json)")?;
        match manifest::parse(&self.place(), raw, None, None)? {
            Parsed::Index(_, entries) => Ok(entries),
            Parsed::Image(_) => {
                Err(RegistryError::malformed(&self.place(), "index.json", "it is not an index"))
            }
        }
    }

    fn tags(&self) -> Result<Vec<String>, RegistryError> {
        match self.entries() {
            Ok(entries) => Ok(entries.iter().filter_map(tag).collect()),
            Err(RegistryError::Missing { .. }) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Those that the name selects.
    fn selected(&self) -> Result<Vec<Descriptor>, RegistryError> {
        let entries = self.entries()?;
        let found: Vec<Descriptor> = match &self.name.image {
            Some(Selector::Tag(wanted)) => entries
                .iter()
                .filter(|entry| tag(entry).as_ref() == Some(wanted))
                .cloned()
                .collect(),
            Some(Selector::Digest(wanted)) => {
                entries.iter().filter(|entry| entry.digest == *wanted).take(1).cloned().collect()
            }
            None => {
                let beside = |entry: &&Descriptor| tag(entry).is_some_and(|t| is_beside_image(&t));
                let images: Vec<_> = entries.iter().filter(|e| !beside(e)).cloned().collect();
                if images.len() != 1 {
                    let tags = images.iter().filter_map(tag).collect();
                    return Err(RegistryError::Ambiguous { place: self.place(), tags });
                }
                images
            }
        };
        if found.is_empty() {
            let tags: Vec<String> = entries.iter().filter_map(tag).collect();
            let known = if tags.is_empty() { "none".to_owned() } else { tags.join(", ") };
            return Err(self.missing(&format!("such image (tags: {known})")));
        }
        Ok(found)
    }

    fn load(&self, digest: &Digest, media_type: &str) -> Result<Parsed, RegistryError> {
        let raw = self.read_bounded(&self.blob_path(digest), &format!("manifest {digest}"))?;
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
        let raw = self.read_bounded(&self.blob_path(&digest), &format!("manifest {digest}"))?;
        manifest::document(&self.place(), raw, Some(&media_type), Some(&digest))
    }

    fn put_document(&self, document: &Document, named: bool) -> Result<Pushed, RegistryError> {
        let Document { raw, digest, media_type } = document;
        let size = raw.len() as u64;
        if !named {
            return self.put_blob(digest, size, &BlobContent::Bytes(raw.clone()), &|_| {});
        }
        if self.find_document(None).is_ok_and(|there| there.digest == *digest) {
            self.unnamed.named();
            return Ok(Pushed::Existed);
        }
        self.put_manifest(raw, media_type)?;
        Ok(Pushed::Uploaded(size))
    }

    fn find_manifest(&self, platform: Option<&Platform>) -> Result<Manifest, RegistryError> {
        let mut entries = match self.selected() {
            // A manifest inside an index is no entry of index.json, but it is there.
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
        let size = file.metadata().map_err(RegistryError::io(&path))?.len();
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
        file.read_exact_at(&mut content, start).map_err(RegistryError::io(&path))?;
        Ok(content.into())
    }

    fn open_blob(&self, digest: &Digest) -> Result<File, RegistryError> {
        let path = self.blob_path(digest);
        open_regular(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => self.missing(&format!("blob {digest}")),
            _ => RegistryError::io(&path)(error),
        })
    }

    /// Makes the directories and `oci-layout`, if they are not there.
    fn prepare(&self) -> Result<(), RegistryError> {
        let blobs = self.name.directory.join("blobs/sha256");
        fs::create_dir_all(&blobs).map_err(RegistryError::io(&blobs))?;
        let marker = self.name.directory.join("oci-layout");
        if !marker.exists() {
            write_whole(&marker, VERSION)?;
        }
        Ok(())
    }

    fn put_manifest(&self, raw: &Bytes, media_type: &str) -> Result<Digest, RegistryError> {
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

    /// Locks index.json against changes by other processes.
    fn lock(&self) -> Result<File, RegistryError> {
        let path = self.name.directory.join(".lazuli.lock");
        let lock = File::options().create(true).append(true).open(&path);
        let lock = lock.map_err(RegistryError::io(&path))?;
        flock(&lock, FlockOperation::LockExclusive)
            .map_err(|e| RegistryError::io(&path)(e.into()))?;
        Ok(lock)
    }

    /// Replaces the entry of `image`. The caller holds the lock. Entries of others are kept to the
    /// letter.
    fn update_index(
        &self,
        image: Option<&Selector>,
        size: usize,
        digest: &Digest,
        media_type: &str,
    ) -> Result<(), RegistryError> {
        let path = self.index_path();
        let mut index = if path.exists() {
            let raw = self.read_bounded(&path, "index.json")?;
            let malformed = |e: serde_json::Error| {
                RegistryError::malformed(&self.place(), "index.json", e.to_string())
            };
            serde_json::from_slice::<Map<String, Value>>(&raw).map_err(malformed)?
        } else {
            let media_type = manifest::INDEX_TYPES[0];
            let empty = json!({"schemaVersion": 2, "mediaType": media_type, "manifests": []});
            empty.as_object().cloned().unwrap_or_default()
        };
        let manifests = index.entry("manifests").or_insert_with(|| json!([]));
        let entries = manifests.as_array_mut().ok_or_else(|| {
            RegistryError::malformed(&self.place(), "index.json", "`manifests` is not a list")
        })?;
        let mut entry = json!({"mediaType": media_type, "digest": digest, "size": size});
        match image {
            Some(Selector::Tag(tag)) => {
                entries.retain(|entry| entry["annotations"][REF_NAME] != tag.as_str());
                entry["annotations"] = json!({ REF_NAME: tag });
            }
            Some(Selector::Digest(_)) if entries.iter().any(|e| e["digest"] == entry["digest"]) => {
                return Ok(());
            }
            Some(Selector::Digest(_)) => {}
            None => entries.retain(|entry| !entry["annotations"][REF_NAME].is_null()),
        }
        entries.push(entry);
        write_whole(&path, Value::Object(index).to_string().as_bytes())
    }

    fn put_blob(
        &self,
        digest: &Digest,
        size: u64,
        content: &BlobContent,
        progress: Progress<'_>,
    ) -> Result<Pushed, RegistryError> {
        let path = self.blob_path(digest);
        self.prepare()?;
        let directory = &self.name.directory;
        self.unnamed.begin(directory).map_err(RegistryError::io(directory))?;
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

    /// Writes a blob to `path`, if it is what it should be.
    fn copy_blob(
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
                BlobContent::File(from) => {
                    Box::new(File::open(from).map_err(RegistryError::io(from))?)
                }
                BlobContent::Stored(from) => {
                    let runtime = tokio::runtime::Handle::current();
                    let reader = runtime.block_on(from.blob(digest, size))?;
                    Box::new(into_blocking(reader, runtime))
                }
            };
            let unreadable = |problem| match content {
                BlobContent::File(from) => RegistryError::io(from)(problem),
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
                file.write_all(piece).map_err(RegistryError::io(path))?;
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

    /// Whether a blob is there. One of another size was not written by a tool that keeps the rules.
    fn is_whole(&self, path: &Path, size: u64) -> Result<bool, RegistryError> {
        match fs::metadata(path) {
            Ok(metadata) => Ok(metadata.is_file() && metadata.len() == size),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(RegistryError::io(path)(error)),
        }
    }
}

fn tag(entry: &Descriptor) -> Option<String> {
    entry.annotations.get(REF_NAME).cloned()
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
            Err(error) => Err(RegistryError::io("")(io::Error::other(error))),
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
        let path = self.blob_path(digest);
        tokio::fs::try_exists(&path).await.map_err(RegistryError::io(path))
    }

    async fn blob_size(&self, digest: &Digest) -> Result<u64, RegistryError> {
        let path = self.blob_path(digest);
        match tokio::fs::metadata(&path).await {
            Ok(metadata) => Ok(metadata.len()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(self.missing(&format!("blob {digest}")))
            }
            Err(error) => Err(RegistryError::io(path)(error)),
        }
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

    async fn tags(&self) -> Result<Vec<String>, RegistryError> {
        let layout = self.clone();
        blocking(move || layout.tags()).await
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
        named: bool,
    ) -> Result<Pushed, RegistryError> {
        let (layout, document) = (self.clone(), document.clone());
        blocking(move || layout.put_document(&document, named)).await
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

    /// Refused: tools that open a directory without naming an image want it to hold one entry.
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
