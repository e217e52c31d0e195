//! Images on this node: what an image's name means, and its bootstrap on disk.
//!
//! ```text
//! images/<manifest digest>/
//!   manifest.json   as the registry holds it; its digest is the directory's name
//!   config.json     as the registry holds it; its digest is in the manifest
//!   bootstrap       unpacked from the layer whose digest is in the manifest, always RAFS v6
//!   bootstrap.digest
//!   bootstrap.points-N  where decoders can begin in blob N, a gzip layer that nobody converted
//!   removed         there if containerd has removed the image and the rest may go
//!   layer.diff-id   digest of the tar in that layer; not there if an earlier version fetched the image
//! ```
//!
//! A directory appears whole (it is filled under another name and renamed) and is never changed.
//! Nothing is synced, since a start waits for it: what a power cut damages is found by the digests
//! when it is opened, and fetched again.

pub mod chain;
mod point_files;
pub(crate) mod prefix;
pub(crate) mod removed;
mod rows;
mod tables;
mod unpack;
#[cfg(fuzzing)]
pub(crate) use unpack::fuzz;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    pin::pin,
    sync::Arc,
};

use futures_util::future::join_all;
use lazuli_image::{
    Algorithm, Blob, Digest, FormatError,
    oci::{Descriptor, Manifest, media_type},
    rafs::{self, BlobRecord, Bootstrap, layout::MAX_ROWS},
};
use lazuli_registry::{
    self as registry, Pull, RegistryError, Repository, SmallBlob, into_blocking,
    manifest::DOCUMENT_LIMIT,
};
use lazuli_sys::mmap::Map;

pub use self::unpack::UnpackError;
use self::{
    point_files::Unusable,
    rows::{Preconnect, Purpose},
    tables::Tables,
};
use crate::path_error::{At as _, PathError};

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// It could not be fetched.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// It is an ordinary image.
    #[error(
        "{image} is not a lazy image: no layer holds a bootstrap; convert it with `lazuli convert`, or index it with \
         `lazuli index`, and set index.trust = \"repository\"; or, if a lazy image refers to it, list its \
         repository in images.referrers"
    )]
    NotLazy {
        /// The image.
        image: String,
    },
    /// It is more than a lazy image.
    #[error(
        "{image} has ordinary layers on top of a lazy image: containerd can run it; for `lazuli` itself convert it with \
         `lazuli convert` from what it was made of"
    )]
    LayersOnTop {
        /// The image.
        image: String,
    },
    /// Its bootstrap layer is damaged.
    #[error("{image}: {source}")]
    Unpack {
        /// The image.
        image: String,
        /// What is wrong.
        source: UnpackError,
    },
    /// Its bootstrap breaks the format.
    #[error("{image} has an invalid bootstrap: {source}")]
    Format {
        /// The image.
        image: String,
        /// What is wrong, and where.
        source: FormatError,
    },
    /// A blob of the bootstrap is not in the manifest, so its size and place are unknown.
    #[error("{image}: its bootstrap needs blob {blob}, which its manifest does not list")]
    UnlistedBlob {
        /// The image.
        image: String,
        /// The blob.
        blob: Digest,
    },
    /// Where its chunks are stored is said by tables that no digest covers, and they are wrong.
    #[error(
        "{image}: the chunk tables of blob {blob} from {place} do not lead to its chunks: {problem}; nothing is kept of them, try again"
    )]
    Misplaced {
        /// The image.
        image: String,
        /// The blob.
        blob: Digest,
        /// Where the tables came from.
        place: String,
        /// Which chunk is not where it should be.
        problem: String,
    },
    /// A file of it on this node is damaged or missing.
    #[error("{path}: {problem}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The node's disk.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What happened.
        source: io::Error,
    },
}

impl From<PathError> for ImageError {
    fn from(PathError { path, source }: PathError) -> Self {
        ImageError::Io { path, source }
    }
}

/// An image whose metadata is on this node.
#[derive(Debug)]
pub struct StoredImage {
    /// Its directory.
    pub directory: PathBuf,
    /// Digest of its manifest.
    pub manifest_digest: Digest,
    /// What a document that speaks of the image says about its manifest.
    pub descriptor: Descriptor,
    /// Stored bytes at the beginning of each blob of the bootstrap that its maker calls hot.
    pub hot: Vec<u64>,
    /// Its config, as the registry holds it.
    pub config: serde_json::Value,
    /// Its file tree and chunk tables.
    pub bootstrap: Arc<Bootstrap<Map>>,
    /// Bytes of all its lazy layers as stored: what a pull fetches.
    pub bytes_total: u64,
    /// Whether that is all of the image. Otherwise ordinary layers are on top of it, which are not
    /// ours.
    pub whole: bool,
}

/// What was fetched.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fetched {
    /// Bytes.
    pub bytes: u64,
    /// Requests.
    pub requests: u64,
}

const MANIFEST: &str = "manifest.json";
const CONFIG: &str = "config.json";
const BOOTSTRAP: &str = "bootstrap";
const BOOTSTRAP_DIGEST: &str = "bootstrap.digest";
const DIFF_ID: &str = "layer.diff-id";

impl StoredImage {
    /// Refuses an image, named `image`, that has other layers on top: they would be missing, unless
    /// somebody else sees to them.
    pub fn must_be_whole_unless(&self, base: bool, image: String) -> Result<(), ImageError> {
        if self.whole || base { Ok(()) } else { Err(ImageError::LayersOnTop { image }) }
    }

    /// Fetches what is not in `images` yet of the image with this manifest, of which some upper
    /// layers may be ordinary.
    pub async fn fetch(
        repository: &Arc<dyn Repository>,
        manifest: &registry::Manifest,
        images: &Path,
    ) -> Result<(Self, Fetched), ImageError> {
        let admission = std::future::ready(Ok::<_, ImageError>(()));
        let (image, fetched, ()) =
            Self::fetch_admitted(repository, manifest, images, admission).await?;
        Ok((image, fetched))
    }

    /// The same for an image that has to be admitted. Its layers are asked for meanwhile; nothing
    /// in them is looked at before that, and nothing kept.
    pub async fn fetch_admitted<T, E: From<ImageError>>(
        repository: &Arc<dyn Repository>,
        manifest: &registry::Manifest,
        images: &Path,
        admission: impl Future<Output = Result<T, E>>,
    ) -> Result<(Self, Fetched, T), E> {
        let mut fetched = Fetched { bytes: manifest.raw.len() as u64, requests: 1 };
        let directory = images.join(manifest.digest.hex());
        let mut admission = pin!(admission);
        let mut early = None;
        if directory.exists() {
            let admitted = admission.as_mut().await?;
            match Self::open_for(&directory, Purpose::New) {
                Ok(image) => return Ok((image, fetched, admitted)),
                Err(error @ (ImageError::Damaged { .. } | ImageError::Io { .. })) => {
                    tracing::warn!(%error, "fetching the image's metadata again");
                    fs::remove_dir_all(&directory).at(&directory).map_err(ImageError::from)?;
                }
                Err(error) => return Err(error.into()),
            }
            early = Some(admitted);
        }
        let admission = async {
            match early {
                Some(admitted) => Ok(admitted),
                None => admission.await,
            }
        };
        let partial = Partial::create(images)?;
        let filled = fill(repository, manifest, &partial.0, &mut fetched, admission).await?;
        let (content, admitted) = filled;
        partial.commit(&directory)?;
        Ok((Self::of(directory, manifest.digest, content)?, fetched, admitted))
    }

    /// Whether `images` has an image, as far as its name tells.
    pub fn is_in(images: &Path, manifest: &Digest) -> bool {
        images.join(manifest.hex()).exists()
    }

    /// Opens an image that [`StoredImage::fetch`] put there.
    pub fn open(directory: &Path) -> Result<Self, ImageError> {
        Self::open_for(directory, Purpose::Known)
    }

    fn open_for(directory: &Path, purpose: Purpose) -> Result<Self, ImageError> {
        let damaged = |name: &str, problem: &str| ImageError::Damaged {
            path: directory.join(name),
            problem: problem.to_owned(),
        };
        let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let manifest_digest = Digest::from_hex(Algorithm::Sha256, name)
            .ok_or_else(|| damaged("", "the directory's name is not a digest"))?;
        let raw = read(directory, MANIFEST)?;
        if !manifest_digest.matches(&raw) {
            return Err(damaged(MANIFEST, "its digest is not the directory's name"));
        }
        let config = read(directory, CONFIG)?;
        let path = directory.join(BOOTSTRAP);
        let map = Map::new(&File::open(&path).at(&path)?).at(&path)?;
        let digest = read(directory, BOOTSTRAP_DIGEST)?;
        if Algorithm::Blake3.digest(map.as_ref()).to_string().as_bytes() != digest {
            return Err(damaged(BOOTSTRAP, "its content is not what was unpacked"));
        }
        let format = |source| ImageError::Format { image: manifest_digest.to_string(), source };
        let (bootstrap, opening) = match rows::find(&manifest_digest, map.as_ref()) {
            Some(bootstrap) => (bootstrap, None),
            None => {
                let count = rafs::chunk_rows(map.as_ref()).map_err(format)?;
                let opening = rows::reserve(count.min(MAX_ROWS), purpose).map_err(|left| {
                    let source = UnpackError::TooManyChunks { count, left };
                    ImageError::Unpack { image: manifest_digest.to_string(), source }
                })?;
                let mut bootstrap = Bootstrap::open(map).map_err(format)?;
                point_files::attach(&path, &mut bootstrap).map_err(|unusable| {
                    let Unusable { path, problem } = unusable;
                    ImageError::Damaged { path, problem: problem.to_string() }
                })?;
                (Arc::new(bootstrap), Some(opening))
            }
        };
        let content = Content { manifest: raw, config, bootstrap, opening };
        Self::of(directory.to_owned(), manifest_digest, content)
    }

    /// The image with this content, which has the digest `manifest_digest`, is in `directory`.
    fn of(
        directory: PathBuf,
        manifest_digest: Digest,
        content: Content,
    ) -> Result<Self, ImageError> {
        let damaged = |name: &str, problem: &str| ImageError::Damaged {
            path: directory.join(name),
            problem: problem.to_owned(),
        };
        let Content { manifest: raw, config, bootstrap, opening } = content;
        rows::share(&manifest_digest, &bootstrap);
        drop(opening);
        let manifest =
            Manifest::parse(&raw).map_err(|error| damaged(MANIFEST, &error.to_string()))?;
        if !manifest.config.digest.matches(&config) {
            return Err(damaged(CONFIG, "its digest is not the one in the manifest"));
        }
        let config =
            serde_json::from_slice(&config).map_err(|error| damaged(CONFIG, &error.to_string()))?;
        let listed = |blob: &Digest| manifest.layers.iter().any(|layer| layer.digest == *blob);
        let records = bootstrap.blobs().iter().zip(bootstrap.tails());
        // Of a layer that nobody converted the manifest has the index.
        let needed = records.map(|(blob, tail)| tail.index.map_or(blob.id, |index| index.digest));
        if let Some(blob) = needed.into_iter().find(|blob| !listed(blob)) {
            let image = manifest_digest.to_string();
            return Err(ImageError::UnlistedBlob { image, blob });
        }
        let records = bootstrap.blobs().iter().zip(bootstrap.tails());
        let indexed = records.filter(|(_, tail)| tail.index.is_some());
        let indexed_bytes: u64 = indexed.map(|(blob, _)| blob.stored_size).sum();
        let lazy = manifest.lazy_base().map_or(0, |(data, _)| data.len() + 1);
        let lazy = &manifest.layers[..lazy];
        let hot_of = |blob: &Blob| {
            let layer = manifest.layers.iter().find(|layer| layer.digest == blob.id);
            layer.and_then(Descriptor::hot_bytes).unwrap_or_default()
        };
        let hot = bootstrap.blobs().iter().map(hot_of).collect();
        let media_type = manifest.media_type.clone();
        Ok(StoredImage {
            manifest_digest,
            descriptor: Descriptor {
                media_type: media_type.unwrap_or_else(|| media_type::MANIFEST.to_owned()),
                digest: manifest_digest,
                size: raw.len() as u64,
                annotations: BTreeMap::new(),
                platform: None,
                artifact_type: None,
            },
            hot,
            config,
            bootstrap,
            bytes_total: lazy.iter().map(|layer| layer.size).sum::<u64>() + indexed_bytes,
            whole: lazy.len() == manifest.layers.len(),
            directory,
        })
    }

    /// The bootstrap's file, for the kernel to mount.
    pub fn bootstrap_path(&self) -> PathBuf {
        bootstrap_path(&self.directory)
    }
}

/// Waits until all of the image in `directory` is on the disk. A start does not: what a power cut
/// leaves damaged is noticed and fetched again.
pub(crate) fn sync(directory: &Path) -> Result<(), ImageError> {
    let names = [MANIFEST, CONFIG, BOOTSTRAP, BOOTSTRAP_DIGEST];
    let files = names.iter().map(|name| directory.join(name));
    let points = point_files::found(directory).at(directory)?;
    let files = files.chain(points).chain([directory.to_owned()]);
    for path in files.chain(directory.parent().map(Path::to_owned)) {
        let synced = File::open(&path).and_then(|file| file.sync_all());
        synced.at(path)?;
    }
    Ok(())
}

/// Where an image's directory has the bootstrap.
pub fn bootstrap_path(directory: &Path) -> PathBuf {
    directory.join(BOOTSTRAP)
}

/// The directories in `images` of images that were fetched whole, in the order of their names.
pub(crate) fn directories(images: &Path) -> io::Result<Vec<PathBuf>> {
    let mut directories = Vec::new();
    for entry in fs::read_dir(images)? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            directories.push(entry.path());
        }
    }
    directories.sort();
    Ok(directories)
}

/// Removes what pulls that never ended left in `images`. For its only user.
pub(crate) fn sweep(images: &Path) {
    for entry in fs::read_dir(images).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(PARTIAL.as_bytes())
            && let Err(error) = fs::remove_dir_all(entry.path())
        {
            tracing::warn!(path = %entry.path().display(), %error, "cannot remove");
        }
    }
}

/// What an image's directory has.
struct Content {
    manifest: Vec<u8>,
    config: Vec<u8>,
    bootstrap: Arc<Bootstrap<Map>>,
    /// Until others know of the bootstrap.
    opening: Option<Preconnect>,
}

/// Fetches everything into `directory`, once the image is admitted.
async fn fill<T, E: From<ImageError>>(
    repository: &Arc<dyn Repository>,
    manifest: &registry::Manifest,
    directory: &Path,
    fetched: &mut Fetched,
    admission: impl Future<Output = Result<T, E>>,
) -> Result<(Content, T), E> {
    let base = manifest.parsed.lazy_base();
    let (_, layer) = base.ok_or_else(|| ImageError::NotLazy { image: repository.describe() })?;
    let path = directory.join(BOOTSTRAP);
    let from = (&manifest.parsed, layer);
    let bootstrap = async {
        let (admitted, begun) = tokio::join!(admission, begin(&**repository, layer));
        let admitted = admitted?;
        Ok::<_, E>((admitted, find_bootstrap(repository, from, begun, &path).await?))
    };
    // Both at the same time: a mount waits for one round trip less. Both to their ends: the
    // directory goes if one fails, and the bootstrap is written to it by a thread that nobody can
    // stop.
    let config = repository.small_blob(&manifest.parsed.config);
    let (config, bootstrap) = tokio::join!(config, bootstrap);
    let (admitted, (unpacked, of_bootstrap)) = bootstrap?;
    let config = config.map_err(ImageError::from)?;
    let Unpacked { bootstrap, opening, diff_id } = unpacked;
    write(directory, MANIFEST, &manifest.raw)?;
    write(directory, CONFIG, &config.content)?;
    write(directory, DIFF_ID, diff_id.to_string().as_bytes())?;
    let digest = Algorithm::Blake3.digest(bootstrap.bytes());
    write(directory, BOOTSTRAP_DIGEST, digest.to_string().as_bytes())?;
    fetched.bytes += config.content.len() as u64 + of_bootstrap.bytes;
    fetched.requests += config.requests + of_bootstrap.requests;
    let (manifest, config) = (manifest.raw.to_vec(), config.content.to_vec());
    let content =
        Content { manifest, config, bootstrap: Arc::new(bootstrap), opening: Some(opening) };
    Ok((content, admitted))
}

/// A bootstrap layer that is on its way, and the requests that this took.
struct Begun {
    reader: Box<dyn io::Read + Send>,
    requests: u64,
}

/// Asks for a bootstrap layer. All of it is in memory if it is small, since that is faster; else it
/// arrives as it is read.
async fn begin(repository: &dyn Pull, layer: &Descriptor) -> Result<Begun, RegistryError> {
    if layer.size <= DOCUMENT_LIMIT {
        let SmallBlob { content, requests } = repository.small_blob(layer).await?;
        return Ok(Begun { reader: Box::new(io::Cursor::new(content)), requests });
    }
    let reader = repository.blob(&layer.digest, layer.size).await?;
    let reader = Box::new(into_blocking(reader, tokio::runtime::Handle::current()));
    Ok(Begun { reader, requests: 1 })
}

/// A bootstrap that was checked, and the digest of the tar that it came in.
struct Unpacked {
    bootstrap: Bootstrap<Map>,
    opening: Preconnect,
    diff_id: Digest,
}

/// Unpacks the bootstrap from the layer, which has `begun` to arrive, to the new file `path`, from
/// whichever place has the right bytes.
async fn find_bootstrap(
    repository: &Arc<dyn Repository>,
    from: (&Manifest, &Descriptor),
    begun: Result<Begun, RegistryError>,
    path: &Path,
) -> Result<(Unpacked, Fetched), ImageError> {
    let (_, layer) = from;
    let mut fetched = Fetched::default();
    let places = repository.clone().places();
    let mut unpacked =
        fetch_bootstrap(&**repository, &places, from, begun, path, &mut fetched).await;
    let mut is_again = false;
    // A mirror that broke off or had other bytes may not be the only place.
    for (at, place) in places.iter().enumerate().filter(|_| places.len() > 1) {
        let error = match &unpacked {
            Err(ImageError::Unpack { source: UnpackError::Io(error), .. }) => error.to_string(),
            Err(error @ ImageError::Misplaced { .. }) => error.to_string(),
            // Of one place, unless all of them have been asked at first.
            Err(ImageError::Registry(error)) if is_again => error.to_string(),
            _ => break,
        };
        is_again = true;
        tracing::warn!(
            error,
            place = place.describe(),
            "fetching the bootstrap from another place"
        );
        match fs::remove_file(path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(ImageError::Io { path: path.to_owned(), source });
            }
            _ => {}
        }
        // Its tables, too, unless it has none.
        let order = [&places[at..], &places[..at]].concat();
        let begun = begin(&**place, layer).await;
        unpacked = fetch_bootstrap(&**place, &order, from, begun, path, &mut fetched).await;
    }
    unpacked.map(|unpacked| (unpacked, fetched))
}

/// Unpacks the bootstrap from the layer to the new file `to`.
async fn fetch_bootstrap(
    repository: &dyn Pull,
    places: &[Arc<dyn Pull>],
    (manifest, layer): (&Manifest, &Descriptor),
    begun: Result<Begun, RegistryError>,
    to: &Path,
    fetched: &mut Fetched,
) -> Result<Unpacked, ImageError> {
    let Begun { reader, requests } = begun?;
    fetched.bytes += layer.size;
    fetched.requests += requests;
    let to = to.to_owned();
    let image = repository.describe();
    let failed = |error| match error {
        UnpackError::Format(source) => ImageError::Format { image: image.clone(), source },
        source => ImageError::Unpack { image: image.clone(), source },
    };
    let unpack = move || unpack::unpack(reader, &to);
    let mut unpacked = blocking(unpack).await.map_err(failed)?;
    let misplaced = |blob: Digest, place: &Arc<dyn Pull>, problem: String| {
        let (image, place) = (repository.describe(), place.describe());
        ImageError::Misplaced { image, blob, place, problem }
    };
    // Converters that make batches do not always send the tables along.
    let mut unproven = Vec::new();
    let wanted = unpacked.wanted();
    let tables = wanted.iter().map(|(_, record)| tables::fetch(places, manifest, record));
    for ((index, BlobRecord { blob, tail }), found) in wanted.iter().zip(join_all(tables).await) {
        let Tables { bytes, place, is_checked, read } = found?;
        fetched.bytes += read;
        fetched.requests += 1;
        let table = rafs::ci_table_of(&bytes, tail);
        let table = table.map_err(|error| misplaced(blob.id, &place, error.to_string()))?;
        unpacked.give(*index, table);
        unproven.extend((!is_checked).then_some((*index, blob.id, place)));
    }
    let diff_id = unpacked.diff_id();
    let open = move || {
        let (bootstrap, opening) = unpacked.open()?;
        // Refuse a bad image here, where its name is known, and before anything of it is kept.
        // Everything is walked once, since the kernel will believe what it says: all chunks that
        // files refer to have to be in the chunk table, or nobody could check them.
        rafs::check(&bootstrap).map_err(UnpackError::Format)?;
        Ok(Unpacked { bootstrap, opening, diff_id })
    };
    let opened = blocking(open).await.map_err(|error| match (error, unproven.first()) {
        (error @ (UnpackError::Format(_) | UnpackError::Meta { .. }), Some((_, blob, place))) => {
            misplaced(*blob, place, error.to_string())
        }
        (error, _) => failed(error),
    });
    let unpacked = opened?;
    for (index, id, place) in unproven {
        let read = tables::prove(places, &unpacked.bootstrap.blobs()[usize::from(index.0)]).await?;
        fetched.bytes += read.bytes;
        fetched.requests += read.requests;
        read.proof.map_err(|problem| misplaced(id, &place, problem))?;
    }
    Ok(unpacked)
}

/// Runs what would keep others from running.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, UnpackError> + Send + 'static,
) -> Result<T, UnpackError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|panic| Err(UnpackError::Io(io::Error::other(panic))))
}

/// How the names of directories begin that are being filled.
const PARTIAL: &str = ".partial-";

/// A directory that is being filled; removed unless it is committed.
struct Partial(PathBuf);

impl Partial {
    fn create(images: &Path) -> Result<Self, ImageError> {
        use std::sync::atomic::{AtomicU64, Ordering};
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = images.join(format!("{PARTIAL}{}-{number}", std::process::id()));
        fs::create_dir_all(&path).at(&path)?;
        Ok(Partial(path))
    }

    fn commit(self, to: &Path) -> Result<(), ImageError> {
        match fs::rename(&self.0, to) {
            // Somebody else fetched the same image meanwhile: theirs is as good.
            Err(_) if to.exists() => Ok(()),
            Err(source) => Err(ImageError::Io { path: to.to_owned(), source }),
            Ok(()) => {
                std::mem::forget(self);
                Ok(())
            }
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn write(directory: &Path, name: &str, content: &[u8]) -> Result<(), ImageError> {
    let path = directory.join(name);
    let write = || io::Write::write_all(&mut File::create_new(&path)?, content);
    Ok(write().at(&path)?)
}

fn read(directory: &Path, name: &str) -> Result<Vec<u8>, ImageError> {
    let path = directory.join(name);
    Ok(fs::read(&path).at(&path)?)
}
