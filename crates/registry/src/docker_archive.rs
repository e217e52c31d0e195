//! Docker archives, as `docker save` and skopeo's `docker-archive:` write them: one tar per image.
//!
//! ```text
//! manifest.json      [{"Config": "NAME", "RepoTags": ["app:1"], "Layers": ["NAME", …]}]
//! NAME               the configuration; its rootfs.diff_ids are the digests of the layers
//! NAME               a layer: a tar, or a compressed one; equal ones may be links to one another
//! ```
//!
//! The archive is read once to find its members; layers are then read where they are, in any order
//! and at the same time. Reading is blocking, as its consumer is.

use std::{
    collections::HashMap,
    fmt,
    fs::File,
    io::{self, Read, Write},
    os::unix::fs::FileExt as _,
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use lazuli_image::{
    Digest,
    digest::Hasher,
    oci::{ImageConfig, MAX_DOCUMENT},
};
use lazuli_sys::path_error::At as _;
use serde::Deserialize;

use crate::{error::RegistryError, name::Reference};

/// Links that are followed from one member to the next; writers use one.
const LINK_LIMIT: usize = 8;

/// One image of an archive.
#[derive(Debug)]
pub struct DockerArchive {
    config: Vec<u8>,
    layers: Vec<ArchiveLayer>,
}

/// One layer of an archive.
#[derive(Clone, Debug)]
pub struct ArchiveLayer {
    path: PathBuf,
    file: Arc<File>,
    start: u64,
    size: u64,
    diff_id: Digest,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Image {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// The place of a member, or the name that it links to.
#[derive(Debug)]
enum Member {
    At { start: u64, size: u64 },
    Link(String),
}

struct MemberIndex<'a> {
    path: &'a Path,
    file: File,
    members: HashMap<String, Member>,
}

impl DockerArchive {
    /// Finds the image `reference` in the archive; without a reference, its only image.
    ///
    /// # Errors
    /// If the file cannot be read, is no such archive, or does not hold the image.
    pub fn open(path: &Path, reference: Option<&str>) -> Result<Self, RegistryError> {
        let index = MemberIndex::scan(path)?;
        let images: Vec<Image> = serde_json::from_slice(&index.document("manifest.json")?)
            .map_err(|error| index.malformed("manifest.json", error.to_string()))?;
        let image = select(path, &images, reference)?;
        let config = index.document(&image.config)?;
        let diff_ids = ImageConfig::parse(&config)
            .and_then(|config| config.diff_ids())
            .map_err(|error| index.malformed(&image.config, error.to_string()))?;
        if diff_ids.len() != image.layers.len() {
            let (have, want) = (image.layers.len(), diff_ids.len());
            let problem = format!("it lists {have} layers, but the configuration {want} diff_ids");
            return Err(index.malformed("manifest.json", problem));
        }
        let places = image.layers.iter().map(|name| index.find(name));
        let places = places.collect::<Result<Vec<_>, _>>()?;
        let file = Arc::new(index.file);
        let layer = |((start, size), diff_id)| {
            let (path, file) = (path.to_owned(), file.clone());
            ArchiveLayer { path, file, start, size, diff_id }
        };
        Ok(DockerArchive { config, layers: places.into_iter().zip(diff_ids).map(layer).collect() })
    }

    /// The image configuration as the archive holds it.
    pub fn config(&self) -> &[u8] {
        &self.config
    }

    /// The layers, lowest first.
    pub fn layers(&self) -> &[ArchiveLayer] {
        &self.layers
    }
}

/// Finds the image that is meant; names are compared as docker would complete them.
fn select<'a>(
    path: &Path,
    images: &'a [Image],
    reference: Option<&str>,
) -> Result<&'a Image, RegistryError> {
    let place = format!("docker-archive:{}", path.display());
    let tags = |image: &Image| image.repo_tags.clone().unwrap_or_default();
    let Some(wanted) = reference else {
        return match images {
            [only] => Ok(only),
            several => {
                let tags = several.iter().flat_map(tags).collect();
                Err(RegistryError::Ambiguous { place, tags })
            }
        };
    };
    let complete: Reference = wanted.parse()?;
    let names = |tag: &String| tag.parse::<Reference>().is_ok_and(|tag| tag == complete);
    images.iter().find(|image| tags(image).iter().any(names)).ok_or_else(|| {
        let known: Vec<String> = images.iter().flat_map(tags).collect();
        let object = format!("image {wanted} (images: {})", known.join(", "));
        RegistryError::Missing { place, object }
    })
}

impl<'a> MemberIndex<'a> {
    fn scan(path: &'a Path) -> Result<Self, RegistryError> {
        let file = File::open(path).at(path)?;
        let mut members = HashMap::new();
        let mut archive = tar::Archive::new(&file);
        let place = format!("docker-archive:{}", path.display());
        let broken = |error: io::Error| {
            let problem =
                format!("{error}; expected an uncompressed tar as `docker save` writes it");
            RegistryError::malformed(&place, "the archive", problem)
        };
        let entries = archive.entries_with_seek().map_err(broken)?;
        for entry in entries {
            let entry = entry.map_err(broken)?;
            let Some(name) = normal(&entry.path().map_err(broken)?) else { continue };
            let kind = entry.header().entry_type();
            let member = if kind.is_file() {
                Member::At { start: entry.raw_file_position(), size: entry.size() }
            } else if let Some(target) = entry.link_name().map_err(broken)? {
                // A symbolic link is relative to its directory, a hard link to the archive.
                let parent = Path::new(&name).parent().unwrap_or(Path::new(""));
                let base = if kind.is_symlink() { parent } else { Path::new("") };
                let Some(target) = normal(&base.join(target)) else { continue };
                Member::Link(target)
            } else {
                continue;
            };
            members.insert(name, member);
        }
        Ok(MemberIndex { path, file, members })
    }

    fn place(&self) -> String {
        format!("docker-archive:{}", self.path.display())
    }

    fn malformed(&self, object: &str, problem: impl Into<String>) -> RegistryError {
        RegistryError::malformed(&self.place(), object, problem)
    }

    /// Start and size of a member, in bytes.
    fn find(&self, name: &str) -> Result<(u64, u64), RegistryError> {
        let missing =
            || RegistryError::Missing { place: self.place(), object: format!("file {name}") };
        let mut at = normal(Path::new(name)).ok_or_else(missing)?;
        for _ in 0..LINK_LIMIT {
            match self.members.get(&at).ok_or_else(missing)? {
                &Member::At { start, size } => return Ok((start, size)),
                Member::Link(target) => at = target.clone(),
            }
        }
        Err(self.malformed(name, "its links lead to links only"))
    }

    /// A small member, whole.
    fn document(&self, name: &str) -> Result<Vec<u8>, RegistryError> {
        let (start, size) = self.find(name)?;
        if size > MAX_DOCUMENT as u64 {
            let (place, object) = (self.place(), name.to_owned());
            return Err(RegistryError::TooLarge { place, object, limit: MAX_DOCUMENT as u64 });
        }
        let mut content = vec![0; size as usize];
        self.file.read_exact_at(&mut content, start).at(self.path)?;
        Ok(content)
    }
}

/// Normalises a path: `./a/../b` becomes `b`. `None` if it leaves the archive or is not text.
fn normal(path: &Path) -> Option<String> {
    let mut parts = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(part) => parts.push(part.to_str()?),
            Component::CurDir => {}
            Component::ParentDir => drop(parts.pop()?),
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    (!parts.is_empty()).then(|| parts.join("/"))
}

impl ArchiveLayer {
    /// Digest of the uncompressed tar.
    pub fn diff_id(&self) -> Digest {
        self.diff_id
    }

    /// Bytes in the archive.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Reads the layer as stored in the archive. The read that reaches the end fails if the
    /// uncompressed layer doesn't have its DiffID.
    pub fn reader(&self) -> impl Read + Send + 'static {
        LayerReader { layer: self.clone(), position: 0, check: Some(Check::Begin) }
    }
}

struct LayerReader {
    layer: ArchiveLayer,
    position: u64,
    /// Gone once the end was reached and found right.
    check: Option<Check>,
}

/// The state of hashing the uncompressed layer.
enum Check {
    /// Nothing was read; the first bytes show the compression.
    Begin,
    Plain(Hash),
    Gzip(Box<flate2::write::MultiGzDecoder<Hash>>),
    Zstd(Box<zstd::stream::write::Decoder<'static, Hash>>),
}

struct Hash(Hasher);

impl Write for Hash {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Check {
    fn update(&mut self, layer: &ArchiveLayer, bytes: &[u8]) -> io::Result<()> {
        if matches!(self, Check::Begin) {
            let mut magic = [0; 4];
            let length = layer.size.min(4) as usize;
            layer.file.read_exact_at(&mut magic[..length], layer.start)?;
            let hash = Hash(layer.diff_id.algorithm.hasher());
            *self = match magic {
                [0x1f, 0x8b, ..] => Check::Gzip(Box::new(flate2::write::MultiGzDecoder::new(hash))),
                [0x28, 0xb5, 0x2f, 0xfd] => {
                    Check::Zstd(Box::new(zstd::stream::write::Decoder::new(hash)?))
                }
                _ => Check::Plain(hash),
            };
        }
        match self {
            Check::Begin => Ok(()),
            Check::Plain(hash) => hash.write_all(bytes),
            Check::Gzip(decoder) => decoder.write_all(bytes),
            Check::Zstd(decoder) => decoder.write_all(bytes),
        }
    }

    fn finish(self, layer: &ArchiveLayer) -> io::Result<Digest> {
        let hash = match self {
            Check::Begin => Hash(layer.diff_id.algorithm.hasher()),
            Check::Plain(hash) => hash,
            Check::Gzip(decoder) => decoder.finish()?,
            Check::Zstd(mut decoder) => {
                decoder.flush()?;
                decoder.into_inner()
            }
        };
        Ok(hash.0.finish())
    }
}

impl fmt::Debug for LayerReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LayerReader({} at {})", self.layer.diff_id, self.position)
    }
}

impl Read for LayerReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let left = self.layer.size - self.position;
        let length = left.min(buffer.len() as u64) as usize;
        let wanted = &mut buffer[..length];
        self.layer.file.read_exact_at(wanted, self.layer.start + self.position)?;
        self.position += length as u64;
        if let (Some(check), true) = (&mut self.check, length > 0) {
            check.update(&self.layer, wanted)?;
        }
        if length == 0
            && let Some(check) = self.check.take()
        {
            let (expected, got) = (self.layer.diff_id, check.finish(&self.layer)?);
            if got != expected {
                let place = format!("docker-archive:{}", self.layer.path.display());
                let object = format!("the layer with diff_id {expected}");
                let error = RegistryError::WrongDigest { place, object, expected, got };
                return Err(io::Error::other(error));
            }
        }
        Ok(length)
    }
}
