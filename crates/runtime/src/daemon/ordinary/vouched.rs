//! Statements by trusted keys about an image's layers: beside the image, or by the layers' digests
//! in the repository that the operator names.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use lazuli_image::oci::{Descriptor, NotedGuess, layer_index_tag, media_type};
use lazuli_policy::{LayerDigests, SignedIndex, SignedLayer, StatedLayer};
use lazuli_registry::{Document, ImageName, Manifest, Options, Parsed, Pull, Repository};

use super::{
    access::AT_A_TIME,
    claimed_layer::ClaimedLayer,
    state::{Ordinaries, Ordinary},
    store::Stated,
};
use crate::{daemon::DaemonError, sync::lock};

/// Deadline for the search for a layer's index.
const LOOK_WITHIN: Duration = Duration::from_secs(10);

/// Time before a layer without a statement is looked up again.
const UNKNOWN: Duration = Duration::from_secs(600);

/// The same after an error: registries recover.
const UNREACHABLE: Duration = Duration::from_secs(30);

/// Limit of the layers for which that is remembered.
const MOST_UNKNOWN: usize = 4096;

/// An index of a layer that a trusted key has stated.
#[derive(Clone, Debug)]
pub(super) struct VouchedLayer {
    pub(super) stated: StatedLayer,
    pub(super) index: Descriptor,
    /// The repository that has it.
    pub(super) repository: Arc<dyn Pull>,
}

/// Everything that is stated of an image's layers.
#[derive(Clone, Debug, Default)]
pub(super) struct Vouched {
    layers: Vec<VouchedLayer>,
    /// The layers of the image's own index, if it comes from one.
    pub(super) beside: Vec<Descriptor>,
    /// What that index says that a start most likely reads.
    pub(super) guess: Option<NotedGuess>,
}

impl Vouched {
    /// The statement of an index beside the image in `repository`.
    fn beside(signed: &SignedIndex, repository: &Arc<dyn Repository>) -> Self {
        let parsed = &signed.manifest.parsed;
        let listed = &parsed.layers;
        let layer = |stated: &StatedLayer| {
            let index = listed.iter().find(|layer| layer.digest == stated.index)?.clone();
            Some(VouchedLayer { stated: *stated, index, repository: repository.clone() })
        };
        let layers = signed.indexing.layers.iter().filter_map(layer).collect();
        Vouched { layers, beside: listed.clone(), guess: parsed.guess() }
    }

    /// The statement about a layer whose tar has the claimed digest.
    pub(super) fn of(&self, layer: &ClaimedLayer) -> Option<&VouchedLayer> {
        let (digest, diff_id) = (layer.digest(), layer.diff_id?);
        self.layers.iter().find(|it| it.stated.layer == digest && it.stated.diff_id == diff_id)
    }
}

impl Ordinaries {
    /// Trusted keys' statements about the image's layers, if the operator enables statements.
    pub(super) async fn vouched(
        &self,
        image: &Ordinary,
        repository: &Arc<dyn Repository>,
        options: &Options,
    ) -> Result<Vouched, DaemonError> {
        if let Some(signed) = self.indexing(image, repository, options).await? {
            return Ok(Vouched::beside(&signed, repository));
        }
        let Some(indexes) = &self.settings.repository else { return Ok(Vouched::default()) };
        if !self.may_be_signed(&image.asked) {
            return Ok(Vouched::default());
        }
        let looks = image.layers.iter().filter_map(|layer| {
            let is_wanted = !self.store.is_proven(layer);
            let layer = LayerDigests { layer: layer.digest(), diff_id: layer.diff_id? };
            is_wanted.then(|| self.vouched_layer(image, indexes, layer))
        });
        let looks = stream::iter(looks.collect::<Vec<_>>()).buffered(AT_A_TIME);
        let layers = looks.collect::<Vec<_>>().await.into_iter().flatten().collect();
        Ok(Vouched { layers, ..Vouched::default() })
    }

    async fn vouched_layer(
        &self,
        image: &Ordinary,
        indexes: &ImageName,
        layer: LayerDigests,
    ) -> Option<VouchedLayer> {
        let indexes = indexes.tagged(&layer_index_tag(&layer.layer))?;
        let repository = lazuli_registry::open(&indexes, &self.registry).ok()?;
        let found = match self.kept_layer(image, &indexes, layer) {
            Some(kept) => kept,
            None => self.look_for_layer(image, &indexes, layer, &*repository).await?,
        };
        let (manifest, stated) = found;
        let index = manifest.parsed.layer_index(&layer.layer)?.clone();
        Some(VouchedLayer { stated, index, repository })
    }

    /// A statement found earlier, if it still counts.
    fn kept_layer(
        &self,
        image: &Ordinary,
        indexes: &ImageName,
        layer: LayerDigests,
    ) -> Option<(Manifest, StatedLayer)> {
        let Stated { manifest, bundles } = self.store.stated(&layer.layer)?;
        let document = Document::new(manifest.into_bytes(), media_type::MANIFEST);
        let Ok(Parsed::Image(manifest)) = document.parse("this node") else { return None };
        let bundles: Vec<_> = bundles.into_iter().map(Bytes::from).collect();
        let stated = self.gate.recheck_layer(&image.asked, indexes, &manifest, layer, &bundles);
        Some((*manifest, stated.ok()??))
    }

    async fn look_for_layer(
        &self,
        image: &Ordinary,
        indexes: &ImageName,
        layer: LayerDigests,
        repository: &dyn Pull,
    ) -> Option<(Manifest, StatedLayer)> {
        let key = (image.asked.to_string(), layer);
        let unknown = &self.unknown;
        if lock(unknown).get(&key).is_some_and(|until| Instant::now() < *until) {
            return None;
        }
        let found = tokio::time::timeout(LOOK_WITHIN, async {
            let manifest = match repository.manifest(None).await {
                Ok(manifest) => manifest,
                Err(error) if error.is_missing() => return Ok(None),
                Err(error) => return Err(DaemonError::from(error)),
            };
            let (asked, options) = (&image.asked, &self.registry);
            Ok(self.gate.signed_layer(asked, indexes, manifest, layer, options).await?)
        });
        let (found, pause) = match found.await {
            Ok(Ok(found)) => (found, UNKNOWN),
            Ok(Err(error)) => {
                let error = error.for_people();
                tracing::warn!(layer = %layer.layer, error, "its index is not looked for");
                (None, UNREACHABLE)
            }
            Err(_) => (None, UNREACHABLE),
        };
        let Some(SignedLayer { manifest, stated, bundles }) = found else {
            let mut unknown = lock(unknown);
            if unknown.len() >= MOST_UNKNOWN {
                unknown.clear();
            }
            unknown.insert(key, Instant::now() + pause);
            return None;
        };
        if let Some(kept) = Stated::of(&manifest, &bundles)
            && let Err(error) = self.store.note_stated(&layer.layer, &kept)
        {
            tracing::warn!(layer = %layer.layer, %error, "a statement is looked for again");
        }
        Some((manifest, stated))
    }
}
