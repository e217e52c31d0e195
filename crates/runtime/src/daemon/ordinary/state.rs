//! The node's state of ordinary images in memory.

use std::{
    collections::{HashMap, VecDeque},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Instant,
};

use bytes::Bytes;
use lazuli_image::Digest;
use lazuli_policy::{Gate, LayerDigests, SignedIndex};
use lazuli_registry::{ImageName, Manifest, Options};
use tokio::sync::OnceCell;

use super::{
    access::Access, claimed_layer::ClaimedLayer, made_images::MadeImages, pulls::Pulls,
    store::IndexStore,
};
use crate::{cache::Cache, daemon::admission::logins::Lent, sync::lock};

/// Images of which configuration and statements are remembered: containerd asks for one layer after
/// the other.
const REMEMBERED: usize = 32;

/// Logins with which images came that wait for being indexed, by the digests of their manifests.
type Waiting = Mutex<HashMap<Digest, Arc<Lent>>>;

/// Layers of images that the repository of indexes does not have, and until when they are not
/// looked for again.
type Unknown = Mutex<HashMap<(String, LayerDigests), Instant>>;

/// The operator's settings.
#[derive(Clone, Debug, Default)]
pub struct IndexSettings {
    /// Whether to publish this node's indexes beside their images.
    pub publish: bool,
    /// The private key that signs statements about them, PEM with PKCS#8.
    pub key: Option<PathBuf>,
    /// containerd's content store, if images are indexed after containerd has unpacked them.
    pub content: Option<PathBuf>,
    /// A repository of indexes by the digests of their layers.
    pub repository: Option<ImageName>,
}

/// The ordinary images of a node, and what decides which of their layers may be shown.
#[derive(Debug)]
pub(in crate::daemon) struct Ordinaries {
    pub(super) gate: Arc<Gate>,
    pub(super) registry: Options,
    pub(super) cache: Arc<Cache>,
    pub(super) store: Arc<IndexStore>,
    recent: Mutex<VecDeque<Arc<Ordinary>>>,
    pub(super) pulls: Arc<Pulls>,
    pub(super) settings: IndexSettings,
    pub(super) waiting: Waiting,
    pub(super) unknown: Unknown,
    pub(super) made: MadeImages,
}

impl Ordinaries {
    /// Opens the records in `root`, for a node with the `bundle`. The cache's eviction removes
    /// unused ones as well.
    pub(in crate::daemon) fn open(
        root: PathBuf,
        bundle: &Path,
        settings: IndexSettings,
        gate: Arc<Gate>,
        registry: Options,
        cache: Arc<Cache>,
    ) -> io::Result<Self> {
        let store = Arc::new(IndexStore::open(root, bundle)?);
        cache.evict_extra_files(store.clone());
        let (recent, pulls, waiting) = Default::default();
        let (unknown, made) = Default::default();
        Ok(Ordinaries {
            gate,
            registry,
            cache,
            store,
            recent,
            pulls,
            settings,
            waiting,
            unknown,
            made,
        })
    }

    /// The image with this manifest, as `asked` for, if it is remembered.
    pub(super) fn recall(&self, asked: &ImageName, manifest: &Digest) -> Option<Arc<Ordinary>> {
        let recent = lock(&self.recent);
        let is_it =
            |known: &&Arc<Ordinary>| known.manifest.digest == *manifest && known.asked == *asked;
        recent.iter().find(is_it).cloned()
    }

    /// Remembers an image.
    pub(super) fn remember(&self, image: Ordinary) -> Arc<Ordinary> {
        let image = Arc::new(image);
        let mut recent = lock(&self.recent);
        recent.push_back(image.clone());
        while recent.len() > REMEMBERED {
            recent.pop_front();
        }
        image
    }
}

/// An image whose layers containerd could unpack, or an artifact.
#[derive(Debug)]
pub(super) struct Ordinary {
    /// The name that the policy covers.
    pub(super) asked: ImageName,
    pub(super) manifest: Arc<Manifest>,
    pub(super) config: Bytes,
    /// None if its configuration lists others than its manifest.
    pub(super) layers: Vec<ClaimedLayer>,
    /// The signed index, once it was searched for.
    pub(super) signed: OnceCell<Option<SignedIndex>>,
    /// Set once its index is being published.
    pub(super) published: OnceCell<()>,
    /// Set once its indexes and permissions were asked for.
    pub(super) looked_ahead: OnceCell<()>,
    /// Set once it is being made.
    pub(super) made_ahead: OnceCell<()>,
    pub(super) access: Access,
}

impl Ordinary {
    pub(super) fn new(asked: ImageName, manifest: Arc<Manifest>, config: Bytes) -> Self {
        let layers = ClaimedLayer::all_of(&manifest.parsed, &config);
        let (signed, published, looked_ahead) = Default::default();
        let (made_ahead, access) = Default::default();
        Ordinary {
            asked,
            manifest,
            config,
            layers,
            signed,
            published,
            looked_ahead,
            made_ahead,
            access,
        }
    }
}
