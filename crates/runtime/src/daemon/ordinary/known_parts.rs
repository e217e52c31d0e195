//! The known parts of an ordinary image: its configuration, statements about its layers, and their
//! indexes.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use lazuli_builder::index::KnownLayer;
use lazuli_image::{
    Digest,
    oci::{Descriptor, media_type},
};
use lazuli_policy::{SignedIndex, StatedLayer};
use lazuli_registry::{
    Document, ImageName, IndexTrust, Login, Manifest, Options, Parsed, Pull, Repository, config,
    manifest::DOCUMENT_LIMIT,
};
use lazuli_sys::path_error::At as _;
use tokio::{io::AsyncReadExt as _, sync::OnceCell};

use super::{
    access::AT_A_TIME,
    claimed_layer::ClaimedLayer,
    state::{Ordinaries, Ordinary},
    store::{Holder, ImageRecord, LayerRecord, Stated},
    vouched::{Vouched, VouchedLayer},
};
use crate::daemon::{DaemonError, admission::stated::StatedIndexes, api::MountRequest};

/// Maximum size of the index of one layer, in bytes.
const INDEX_LIMIT: u64 = 256 << 20;

/// How long it is waited for signatures and indexes before layers are pulled.
pub(super) const LOOK_WITHIN: Duration = Duration::from_secs(30);

impl StatedIndexes for Ordinaries {
    fn recall_index(&self, name: &ImageName, image: &Manifest) -> Option<SignedIndex> {
        self.stated(name, image).ok().flatten()
    }

    fn remember_index(&self, image: &Manifest, found: &SignedIndex) {
        let Some(stated) = Stated::of(&found.manifest, &found.bundles) else { return };
        if let Err(error) = self.store.note_stated(&image.digest, &stated) {
            tracing::warn!(%error, "a statement is looked for again");
        }
    }
}

impl Ordinaries {
    /// The image with its configuration. `listed` are its indexes in `repository`, if they are
    /// known.
    pub(super) async fn image(
        &self,
        request: &MountRequest,
        manifest: Arc<Manifest>,
        listed: Option<&[Descriptor]>,
        repository: &dyn Repository,
        options: &Options,
    ) -> Result<Arc<Ordinary>, DaemonError> {
        let asked = request.asked_name()?;
        if let Some(known) = self.recall(&asked, &manifest.digest) {
            return Ok(known);
        }
        let kept = self.store.image(&manifest.digest).map(|kept| kept.config);
        let kept = kept.filter(|kept| manifest.parsed.config.digest.matches(kept.as_bytes()));
        if let Some(config) = kept {
            return Ok(self.remember(Ordinary::new(asked, manifest, Bytes::from(config))));
        }
        // It may have been fetched ahead, by its digest. That no index was found says little later.
        if let Some(ahead) = self.recall(&request.image.parse()?, &manifest.digest) {
            let mut image = Ordinary::new(asked, manifest, ahead.config.clone());
            if let Some(Some(_)) = ahead.signed.get() {
                image.signed = ahead.signed.clone();
            }
            return Ok(self.remember(image));
        }
        // At the same time: the search needs the manifest alone.
        let search = async {
            match self.searches(&asked, &manifest.digest) {
                true => {
                    Some(self.find_signed(&asked, &manifest, listed, repository, options).await)
                }
                false => None,
            }
        };
        let (config, signed) = tokio::join!(config(repository, &manifest), search);
        let config = config?;
        let mut image = Ordinary::new(asked, manifest, config);
        image.signed = OnceCell::new_with(signed);
        Ok(self.remember(image))
    }

    /// Returns whether a statement about the image with this manifest would be searched for.
    pub(super) fn searches(&self, asked: &ImageName, manifest: &Digest) -> bool {
        self.may_be_signed(asked) && self.store.stated(manifest).is_none()
    }

    /// Returns whether statements count, and a key is trusted to state the content of the image's
    /// layers.
    pub(super) fn may_be_signed(&self, name: &ImageName) -> bool {
        let counts = matches!(self.registry.indexes, IndexTrust::Signed | IndexTrust::Repository);
        let policy = self.gate.policy().ok().flatten().filter(|_| counts);
        policy.is_some_and(|policy| policy.has_statement_keys(name))
    }

    /// The manifest of `name`, which has the digest `digest`: as kept on this node, or from the
    /// registry.
    pub(super) async fn manifest(
        &self,
        name: &ImageName,
        digest: &Digest,
        options: &Options,
    ) -> Result<Arc<Manifest>, DaemonError> {
        if let Some(ImageRecord { media_type, manifest, .. }) = self.store.image(digest) {
            let document = Document::new(manifest.into_bytes(), &media_type);
            if let Ok(Parsed::Image(manifest)) = document.parse("this node") {
                return Ok(Arc::new(*manifest));
            }
        }
        let repository = lazuli_registry::open(name, options)?;
        Ok(Arc::new(repository.manifest(None).await?))
    }

    /// Keeps the documents that a start of the image needs without its registry. Without them none
    /// of its layers may be reported present.
    pub(super) fn keep(&self, image: &Ordinary, holder: Holder) -> bool {
        if self.store.is_held(&image.manifest.digest, holder) {
            return true;
        }
        let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
        let record = ImageRecord {
            media_type: image.manifest.media_type.clone(),
            manifest: text(&image.manifest.raw),
            config: text(&image.config),
        };
        let kept = self.store.note_image(&image.manifest.digest, &record, holder);
        if let Err(error) = &kept {
            tracing::warn!(image = %image.asked, %error, "the image is not lazy");
        }
        kept.is_ok()
    }

    /// A trusted key's statement about the image's layers, if the operator enables statements.
    pub(super) async fn indexing(
        &self,
        image: &Ordinary,
        repository: &Arc<dyn Repository>,
        options: &Options,
    ) -> Result<Option<SignedIndex>, DaemonError> {
        if self.registry.indexes == IndexTrust::Proven {
            return Ok(None);
        }
        if let Some(known) = self.stated(&image.asked, &image.manifest)? {
            return Ok(Some(known));
        }
        let search = self.find_signed(&image.asked, &image.manifest, None, &**repository, options);
        let found = image.signed.get_or_init(|| search).await.clone();
        // The policy may be another by now.
        Ok(found.filter(|found| self.still_counts(image, found)))
    }

    /// Searches the repository for an index of the image that a trusted key has stated, among
    /// those `listed`, if they are known.
    async fn find_signed(
        &self,
        asked: &ImageName,
        manifest: &Manifest,
        listed: Option<&[Descriptor]>,
        repository: &dyn Repository,
        options: &Options,
    ) -> Option<SignedIndex> {
        let search = self.gate.signed_index(asked, manifest, listed, repository, options);
        let found = tokio::time::timeout(LOOK_WITHIN, search).await.ok()?.ok()??;
        self.remember_index(manifest, &found);
        Some(found)
    }

    fn still_counts(&self, image: &Ordinary, found: &SignedIndex) -> bool {
        let SignedIndex { manifest, bundles, .. } = found;
        let counts = self.gate.recheck(&image.asked, &image.manifest, manifest, bundles);
        counts.is_ok_and(|counts| counts.is_some())
    }

    /// The statement that was found earlier, if it still counts.
    fn stated(
        &self,
        name: &ImageName,
        image: &Manifest,
    ) -> Result<Option<SignedIndex>, DaemonError> {
        let Some(Stated { manifest, bundles }) = self.store.stated(&image.digest) else {
            return Ok(None);
        };
        let document = Document::new(manifest.into_bytes(), media_type::MANIFEST);
        let Ok(Parsed::Image(manifest)) = document.parse("this node") else {
            return Ok(None);
        };
        let bundles: Vec<_> = bundles.into_iter().map(Bytes::from).collect();
        let indexing = self.gate.recheck(name, image, &manifest, &bundles)?;
        Ok(indexing.map(|indexing| SignedIndex { manifest: *manifest, indexing, bundles }))
    }

    /// A layer that may be shown by its index, because this node has hashed it or a key has stated
    /// its content.
    pub(super) async fn known_layer(
        &self,
        layer: &ClaimedLayer,
        vouched: &Vouched,
    ) -> Option<KnownLayer> {
        let store = &self.store;
        if store.layer(&layer.key()).is_some_and(|record| record.is_proven) {
            return store.proven(layer);
        }
        let vouched = vouched.of(layer)?;
        let StatedLayer { index, diff_id, .. } = vouched.stated;
        if store.is_wrong(&index) {
            return None;
        }
        let bytes = match store.index(&index) {
            Some(bytes) => bytes,
            None => {
                let fetched = self.fetch_index(vouched).await;
                let failed = |error: &DaemonError| {
                    tracing::warn!(error = error.for_people(), "a signed index cannot be had");
                };
                fetched.inspect_err(failed).ok()?
            }
        };
        let record = LayerRecord { diff_id, index, is_proven: false };
        if let Err(error) = store.note_layer(&layer.key(), &record) {
            tracing::warn!(%error, "a layer is not checked once it is complete");
            return None;
        }
        Some(layer.with_index(diff_id, bytes))
    }

    /// Returns whether [`Ordinaries::known_layer`] has the layer.
    pub(super) async fn is_known_layer(&self, layer: &ClaimedLayer, vouched: &Vouched) -> bool {
        let store = &self.store;
        let record = store.layer(&layer.key());
        if record.is_some_and(|record| record.is_proven) {
            return store.is_proven(layer);
        }
        // It was noted when its index was fetched.
        let is_noted = record.zip(vouched.of(layer)).is_some_and(|(record, vouched)| {
            let StatedLayer { index, diff_id, .. } = vouched.stated;
            (record.index, record.diff_id) == (index, diff_id)
                && !store.is_wrong(&index)
                && store.has_index(&index)
        });
        is_noted || self.known_layer(layer, vouched).await.is_some()
    }

    /// Returns whether this node has found out since that `known_layer` said something wrong of a
    /// layer: that its tar has the digest `diff_id`, by the index `index`, if that is known.
    pub(in crate::daemon) fn is_refuted(
        &self,
        layer: &Digest,
        diff_id: &Digest,
        index: Option<Digest>,
    ) -> bool {
        match self.store.layer(layer) {
            Some(proven) if proven.is_proven => proven.diff_id != *diff_id,
            record => {
                let index = index.or(record.map(|record| record.index));
                index.is_some_and(|index| self.store.is_wrong(&index))
            }
        }
    }

    /// Fetches the stated indexes of all layers, and asks for permission to read these layers, all
    /// at once: containerd asks for one layer after the other, and each would cost round trips.
    pub(super) async fn look_ahead(
        &self,
        image: &Ordinary,
        vouched: &Vouched,
        repository: &dyn Pull,
        login: Option<&Login>,
    ) {
        let look = async || {
            let stated = image.layers.iter().filter(|layer| vouched.of(layer).is_some());
            let layers = stated.map(ClaimedLayer::digest);
            let access = image.access.ask_ahead(repository, login, layers);
            tokio::join!(self.fetch_indexes(image, vouched), access);
        };
        image.looked_ahead.get_or_init(look).await;
    }

    /// Fetches the stated indexes of all layers that this node lacks.
    pub(super) async fn fetch_indexes(&self, image: &Ordinary, vouched: &Vouched) {
        let stated = image.layers.iter().filter(|layer| vouched.of(layer).is_some());
        let indexes = stated.map(|layer| self.is_known_layer(layer, vouched));
        let indexes = stream::iter(indexes.collect::<Vec<_>>());
        indexes.buffer_unordered(AT_A_TIME).for_each(async |_| ()).await;
    }

    async fn fetch_index(&self, vouched: &VouchedLayer) -> Result<Vec<u8>, DaemonError> {
        let path = self.store.root().to_owned();
        let VouchedLayer { index, repository, .. } = vouched;
        if index.size > INDEX_LIMIT {
            let source = io::Error::other("the index is too big");
            return Err(DaemonError::Io { path, source });
        }
        // The mount waits for it.
        let bytes = if index.size <= DOCUMENT_LIMIT {
            repository.small_blob(index).await?.content.to_vec()
        } else {
            let mut bytes = Vec::new();
            let mut reader = repository.blob(&index.digest, index.size).await?;
            reader.read_to_end(&mut bytes).await.at(&path)?;
            bytes
        };
        self.store.keep_index(&bytes).at(&path)?;
        Ok(bytes)
    }
}
