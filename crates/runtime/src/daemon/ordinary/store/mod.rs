//! This node's knowledge of unconverted layers.
//!
//! ```text
//! ROOT/indexes/
//!   blobs/HEX         the index with this digest
//!   layers/HEX        which index the layer with this digest has, and the digest of its tar. For a
//!                     layer that is a file: the SHA-256 of `file ` and the layer's digest
//!   ordinary/HEX      the image with this manifest: manifest and configuration
//!   held/HEX          the same of an image of which clients of the layer store have layers
//!   images/HEX        the index of the image with this manifest, or of the layer with this digest,
//!                     and the statements about it
//!   wrong/HEX         indexes that were found to lead to other bytes than the layer has
//!   spools/HEX        stored bytes of a layer that is being pulled, see `spool`
//!   unpacked/HEX      the image with this manifest: containerd unpacks it, and it is to be indexed
//! ```
//! A file appears whole. What a power cut damages is as good as missing.
//!
//! `blobs` and `layers` are also in the bundle of images that the node was delivered with, which is
//! only read.

mod eviction;

use std::{
    collections::HashSet,
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use lazuli_builder::index::KnownLayer;
use lazuli_image::{Algorithm, Digest};
use lazuli_registry::Manifest;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::claimed_layer::ClaimedLayer;
use crate::{daemon::api::MountRequest, sync::lock};

/// Size of all indexes above which unused ones are evicted. They take a hundredth of the layers.
const KEPT: u64 = 1 << 30;

/// Indexes that are remembered as right: some 150 kB.
const REMEMBERED: usize = 4096;

/// Maximum number of files of another kind. Records of what containerd has are never removed: it
/// would not pull a layer again that it was told is present. New ones are refused instead.
const RECORDS: usize = 16_384;

/// Maximum number of images that wait for being indexed.
const MOST_UNPACKED: usize = 256;

/// The directory in a bundle.
const INDEXES: &str = "indexes";

const BLOBS: &str = "blobs";
const LAYERS: &str = "layers";
const ORDINARY: &str = "ordinary";
const HELD: &str = "held";
const IMAGES: &str = "images";
const WRONG: &str = "wrong";
const FILES: &str = "files";
const UNPACKED: &str = "unpacked";
const SPOOLS: &str = "spools";

/// The record of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LayerRecord {
    /// SHA-256 of its tar.
    pub(super) diff_id: Digest,
    /// SHA-256 of its index.
    pub(super) index: Digest,
    /// Whether this node has hashed all of it. Otherwise a key has stated it.
    pub(super) is_proven: bool,
}

/// Who has layers of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// containerd.
    Containerd,
    /// Clients of the layer store, such as podman.
    LayerStore,
}

impl Holder {
    const ALL: [Holder; 2] = [Holder::Containerd, Holder::LayerStore];

    const fn part(self) -> &'static str {
        match self {
            Holder::Containerd => ORDINARY,
            Holder::LayerStore => HELD,
        }
    }
}

/// An image that was reported present to a client, and that has to start without its registry.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ImageRecord {
    /// The media type of the manifest.
    pub(super) media_type: String,
    /// The manifest, JSON.
    pub(super) manifest: String,
    /// The configuration, JSON.
    pub(super) config: String,
}

/// A statement about the index of an image, as it was found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Stated {
    /// The manifest of the index, JSON.
    pub(super) manifest: String,
    /// The bundles, JSON.
    pub(super) bundles: Vec<String>,
}

impl Stated {
    /// The statements of `bundles` about an index; `None` if they cannot be kept.
    pub(super) fn of(manifest: &Manifest, bundles: &[Bytes]) -> Option<Self> {
        let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).ok();
        let manifest = text(&manifest.raw)?;
        Some(Stated { manifest, bundles: bundles.iter().map(text).collect::<Option<_>>()? })
    }
}

/// An image that is to be indexed when containerd has all of it.
#[derive(Clone, Debug)]
pub(super) struct Unpacked {
    /// The digest of its manifest.
    pub(super) image: Digest,
    /// How it was asked for.
    pub(super) request: MountRequest,
    /// Since when it waits.
    pub(super) waited: Duration,
}

/// The directory.
#[derive(Debug)]
pub(super) struct IndexStore {
    root: PathBuf,
    /// That of the node's bundle.
    bundle: Option<Box<IndexStore>>,
    /// Indexes that this process has read, and found to have their digests.
    right: Mutex<HashSet<Digest>>,
}

impl IndexStore {
    /// Opens or creates `root`, for a node with a `bundle`.
    pub(super) fn open(root: PathBuf, bundle: &Path) -> io::Result<Self> {
        for part in [BLOBS, LAYERS, ORDINARY, HELD, IMAGES, WRONG, FILES, UNPACKED, SPOOLS] {
            DirBuilder::new().recursive(true).mode(0o700).create(root.join(part))?;
        }
        let bundle = Self::of(bundle.join(INDEXES), None);
        let store = Self::of(root, Some(Box::new(bundle)));
        eviction::sweep_spools(&store)?;
        Ok(store)
    }

    /// Opens or creates the indexes of a `bundle`.
    pub(super) fn of_bundle(bundle: &Path) -> io::Result<Self> {
        let root = bundle.join(INDEXES);
        for part in [BLOBS, LAYERS] {
            fs::create_dir_all(root.join(part))?;
        }
        Ok(Self::of(root, None))
    }

    fn of(root: PathBuf, bundle: Option<Box<IndexStore>>) -> Self {
        IndexStore { root, bundle, right: Mutex::default() }
    }

    /// The directory.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The index with this digest, if it is kept.
    pub(super) fn index(&self, digest: &Digest) -> Option<Vec<u8>> {
        self.own_index(digest).or_else(|| self.bundle.as_ref()?.index(digest))
    }

    /// Returns whether an index is kept. Reads it once: containerd asks for one layer after the
    /// other, and each time for all below.
    pub(super) fn has_index(&self, digest: &Digest) -> bool {
        let was_right = lock(&self.right).contains(digest);
        was_right && self.touch(digest).is_ok()
            || self.own_index(digest).is_some()
            || self.bundle.as_ref().is_some_and(|bundle| bundle.has_index(digest))
    }

    fn own_index(&self, digest: &Digest) -> Option<Vec<u8>> {
        let bytes = fs::read(self.path(BLOBS, digest)).ok().filter(|bytes| digest.matches(bytes));
        let mut right = lock(&self.right);
        if bytes.is_none() {
            right.remove(digest);
            return None;
        }
        if right.len() == REMEMBERED {
            right.clear();
        }
        right.insert(*digest);
        drop(right);
        // Fails for a bundle on a read-only file system, where nothing is evicted.
        let _ = self.touch(digest);
        bytes
    }

    /// Notes that an index was used now: the most recently used one is evicted last.
    fn touch(&self, digest: &Digest) -> io::Result<()> {
        let now = fs::FileTimes::new().set_modified(SystemTime::now());
        fs::File::options().append(true).open(self.path(BLOBS, digest))?.set_times(now)
    }

    /// Adds the index of a layer to a bundle, in which nothing is evicted.
    pub(super) fn add(&self, layer: &Digest, record: &LayerRecord, index: &[u8]) -> io::Result<()> {
        self.write(BLOBS, &record.index, index)?;
        self.write(LAYERS, layer, &serde_json::to_vec(record)?)
    }

    /// Keeps an index, in the place of unused ones that were not used for the longest time.
    pub(super) fn keep_index(&self, bytes: &[u8]) -> io::Result<Digest> {
        let digest = Algorithm::Sha256.digest(bytes);
        self.write(BLOBS, &digest, bytes)?;
        eviction::limit(self, KEPT)?;
        Ok(digest)
    }

    /// Returns whether there are records of any layers.
    pub(super) fn knows_layers(&self) -> bool {
        fs::read_dir(self.root.join(LAYERS)).is_ok_and(|mut layers| layers.next().is_some())
            || self.bundle.as_ref().is_some_and(|bundle| bundle.knows_layers())
    }

    /// The record of a layer.
    pub(super) fn layer(&self, layer: &Digest) -> Option<LayerRecord> {
        let own: Option<LayerRecord> = self.read(LAYERS, layer);
        match own.filter(|record| record.is_proven) {
            Some(proven) => Some(proven),
            None => self.bundle.as_ref().and_then(|bundle| bundle.layer(layer)).or(own),
        }
    }

    /// A layer that the node has hashed whole, with its index, if it is what the image claims.
    pub(super) fn proven(&self, layer: &ClaimedLayer) -> Option<KnownLayer> {
        let LayerRecord { diff_id, index, .. } = self.proven_record(layer)?;
        Some(layer.with_index(diff_id, self.index(&index)?))
    }

    /// Returns whether [`IndexStore::proven`] has the layer.
    pub(super) fn is_proven(&self, layer: &ClaimedLayer) -> bool {
        self.proven_record(layer).is_some_and(|record| self.has_index(&record.index))
    }

    fn proven_record(&self, layer: &ClaimedLayer) -> Option<LayerRecord> {
        let record = self.layer(&layer.key()).filter(|record| record.is_proven)?;
        let is_claimed = layer.diff_id.is_none_or(|claimed| claimed == record.diff_id);
        is_claimed.then_some(record)
    }

    /// Records a layer, unless its record is already proven and the new one is not.
    pub(super) fn note_layer(&self, layer: &Digest, record: &LayerRecord) -> io::Result<()> {
        if !record.is_proven && self.layer(layer).is_some_and(|known| known.is_proven) {
            return Ok(());
        }
        self.write(LAYERS, layer, &serde_json::to_vec(record)?)?;
        eviction::limit_records(self, LAYERS, layer, RECORDS)
    }

    /// Manifest and configuration of an image.
    pub(super) fn image(&self, manifest: &Digest) -> Option<ImageRecord> {
        Holder::ALL.into_iter().find_map(|holder| self.image_of(manifest, holder))
    }

    /// The same as they are kept for `holder`.
    fn image_of(&self, manifest: &Digest, holder: Holder) -> Option<ImageRecord> {
        let record: ImageRecord = self.read(holder.part(), manifest)?;
        manifest.matches(record.manifest.as_bytes()).then_some(record)
    }

    /// Returns whether they are kept for `holder`, and can be read.
    pub(super) fn is_held(&self, manifest: &Digest, holder: Holder) -> bool {
        self.image_of(manifest, holder).is_some()
    }

    /// Keeps them for `holder`.
    pub(super) fn note_image(
        &self,
        manifest: &Digest,
        record: &ImageRecord,
        holder: Holder,
    ) -> io::Result<()> {
        self.write(holder.part(), manifest, &serde_json::to_vec(record)?)?;
        eviction::limit_records(self, holder.part(), manifest, RECORDS)
    }

    /// Forgets an image of which `holder` has nothing any more. Returns whether nobody has.
    pub(super) fn forget_image(&self, manifest: &Digest, holder: Holder) -> io::Result<bool> {
        remove(&self.path(holder.part(), manifest))?;
        // What a power cut has damaged is held as well.
        let is_noted = |holder: Holder| self.path(holder.part(), manifest).try_exists();
        for holder in Holder::ALL {
            if is_noted(holder)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The images that were reported present to anyone.
    fn images(&self) -> Vec<(Digest, ImageRecord)> {
        let list = |holder: Holder| fs::read_dir(self.root.join(holder.part()));
        let entries = Holder::ALL.into_iter().filter_map(|holder| list(holder).ok());
        let entries = entries.flatten().flatten();
        let digest =
            |entry: fs::DirEntry| Digest::from_hex(Algorithm::Sha256, entry.file_name().to_str()?);
        let record = |digest: Digest| Some((digest, self.image(&digest)?));
        entries.filter_map(digest).filter_map(record).collect()
    }

    /// The statements about an image.
    pub(super) fn stated(&self, image: &Digest) -> Option<Stated> {
        self.read(IMAGES, image)
    }

    /// Stores the statements about an image.
    pub(super) fn note_stated(&self, image: &Digest, stated: &Stated) -> io::Result<()> {
        self.write(IMAGES, image, &serde_json::to_vec(stated)?)?;
        eviction::limit_records(self, IMAGES, image, RECORDS)
    }

    /// Returns whether an index was found to be wrong.
    pub(super) fn is_wrong(&self, index: &Digest) -> bool {
        self.path(WRONG, index).exists()
    }

    /// Marks an index as wrong. No statement by any key makes the node use it again.
    pub(super) fn note_wrong(&self, index: &Digest) -> io::Result<()> {
        self.write(WRONG, index, b"")
    }

    /// Whether a layer that is one file is what this description of it says, if that is known.
    pub(super) fn is_right_file(&self, description: &Digest) -> Option<bool> {
        self.read(FILES, description)
    }

    /// Notes that.
    pub(super) fn note_file(&self, description: &Digest, is_right: bool) -> io::Result<()> {
        self.write(FILES, description, &serde_json::to_vec(&is_right)?)?;
        eviction::limit_records(self, FILES, description, RECORDS)
    }

    /// The path of a layer's stored bytes while they are fetched from a repository.
    pub(super) fn spool(&self, repository_key: &str, layer: &Digest) -> PathBuf {
        let key = Algorithm::Sha256.digest(format!("{repository_key}\n{layer}").as_bytes());
        self.path(SPOOLS, &key)
    }

    /// Queues an image to be indexed when all of it is present, unless it is queued already.
    pub(super) fn note_unpacked(&self, image: &Digest, request: &MountRequest) -> io::Result<()> {
        if self.path(UNPACKED, image).exists() {
            return Ok(());
        }
        self.write(UNPACKED, image, &serde_json::to_vec(request)?)?;
        eviction::limit_records(self, UNPACKED, image, MOST_UNPACKED)
    }

    /// The images that are to be indexed.
    pub(super) fn unpacked(&self) -> Vec<Unpacked> {
        let entries = fs::read_dir(self.root.join(UNPACKED)).into_iter().flatten().flatten();
        let read = |entry: fs::DirEntry| {
            let image = Digest::from_hex(Algorithm::Sha256, entry.file_name().to_str()?)?;
            let waited = entry.metadata().ok()?.modified().ok()?.elapsed().unwrap_or_default();
            Some(Unpacked { image, request: self.read(UNPACKED, &image)?, waited })
        };
        entries.filter_map(read).collect()
    }

    /// Forgets an image that was to be indexed.
    pub(super) fn forget_unpacked(&self, image: &Digest) -> io::Result<()> {
        remove(&self.path(UNPACKED, image))
    }

    fn path(&self, part: &str, digest: &Digest) -> PathBuf {
        self.root.join(part).join(digest.hex())
    }

    fn read<T: DeserializeOwned>(&self, part: &str, digest: &Digest) -> Option<T> {
        serde_json::from_slice(&fs::read(self.path(part, digest)).ok()?).ok()
    }

    fn write(&self, part: &str, digest: &Digest, content: &[u8]) -> io::Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = self.path(part, digest);
        let partial = path.with_extension(format!("partial-{number}"));
        fs::write(&partial, content)?;
        fs::rename(&partial, path)
    }
}

/// Removes a file, unless it is gone.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use lazuli_image::oci::{Descriptor, media_type};

    use super::*;

    fn digest(text: &str) -> Digest {
        Algorithm::Sha256.digest(text.as_bytes())
    }

    fn open(directory: &Path) -> IndexStore {
        IndexStore::open(directory.join("indexes"), &directory.join("bundle")).unwrap()
    }

    fn store() -> (tempfile::TempDir, IndexStore) {
        let directory = tempfile::tempdir().unwrap();
        let store = open(directory.path());
        (directory, store)
    }

    #[test]
    fn a_damaged_file_is_as_good_as_missing() {
        let (directory, store) = store();
        let index = store.keep_index(b"index").unwrap();
        let record = LayerRecord { diff_id: digest("tar"), index, is_proven: true };
        store.note_layer(&digest("layer"), &record).unwrap();
        assert_eq!(store.index(&index).unwrap(), b"index");
        assert_eq!(store.layer(&digest("layer")), Some(record));
        fs::write(store.path(BLOBS, &index), b"indeX").unwrap();
        assert!(!open(directory.path()).has_index(&index));
        fs::write(store.path(LAYERS, &digest("layer")), b"").unwrap();
        assert!(store.index(&index).is_none());
        assert!(store.layer(&digest("layer")).is_none());
    }

    #[test]
    fn an_index_is_read_once_and_counts_until_it_is_removed() {
        let (_directory, store) = store();
        let index = store.keep_index(b"index").unwrap();
        assert!(store.has_index(&index));
        let file = fs::File::create(store.path(BLOBS, &index)).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        // It is not read again, and counts as used.
        assert!(store.has_index(&index));
        assert!(file.metadata().unwrap().modified().unwrap() > SystemTime::UNIX_EPOCH);
        // Whoever reads it finds the damage.
        assert!(store.index(&index).is_none() && !store.has_index(&index));
        store.keep_index(b"index").unwrap();
        assert!(store.has_index(&index));
        fs::remove_file(store.path(BLOBS, &index)).unwrap();
        assert!(!store.has_index(&index));
    }

    #[test]
    fn a_bundle_has_indexes_that_the_node_lacks() {
        let (directory, store) = store();
        let bundle = IndexStore::of_bundle(&directory.path().join("bundle")).unwrap();
        let (layer, index) = (digest("layer"), digest("index"));
        let proven = LayerRecord { diff_id: digest("tar"), index, is_proven: true };
        let claimed = ClaimedLayer {
            descriptor: Descriptor::plain(media_type::LAYER_GZIP, layer, 5),
            diff_id: Some(digest("tar")),
            file: None,
        };
        let has_proven = || store.proven(&claimed).is_some();
        assert!(!store.knows_layers());
        bundle.add(&layer, &proven, b"index").unwrap();
        assert!(store.knows_layers() && has_proven());
        assert_eq!(store.index(&index).unwrap(), b"index");
        // A key's statement does not count beside it.
        store.note_layer(&layer, &LayerRecord { is_proven: false, ..proven }).unwrap();
        assert_eq!(store.layer(&layer), Some(proven));
        fs::write(bundle.path(BLOBS, &index), b"other").unwrap();
        assert!(!has_proven());
    }

    #[test]
    fn a_statement_never_replaces_a_proven_index() {
        let (_directory, store) = store();
        let record = |tar, is_proven| LayerRecord {
            diff_id: digest(tar),
            index: digest("index"),
            is_proven,
        };
        let layer = digest("layer");
        for (noted, known) in [
            (record("stated", false), record("stated", false)),
            (record("proven", true), record("proven", true)),
            (record("stated", false), record("proven", true)),
        ] {
            store.note_layer(&layer, &noted).unwrap();
            assert_eq!(store.layer(&layer), Some(known));
        }
    }
}
