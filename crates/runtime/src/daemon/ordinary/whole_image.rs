//! Pulls of images and artifacts that have no index, for commands.

use std::sync::Arc;

use futures_util::future::try_join_all;
use lazuli_builder::index::check_forms;
use lazuli_registry::{ImageName, IndexTrust, Manifest};
use serde::de::IgnoredAny;

use super::{
    begin::{biggest_first, key_of},
    claimed_layer::ClaimedLayer,
    pull_progress::{ArrivingLayer, PullProgress},
    pulls::{OpenBlobs, PullFor},
    state::{Ordinaries, Ordinary},
    whole_layer::LayerError,
};
use crate::daemon::{DaemonError, api::MountRequest, node::Node};

impl Node {
    /// Returns whether this node may use indexes, its own among them.
    pub(in crate::daemon) fn may_index(&self) -> bool {
        self.admission.registry.indexes != IndexTrust::Nothing
    }

    /// Returns whether a mount failed because the image has to be pulled first.
    pub(in crate::daemon) fn may_pull(&self, error: &DaemonError) -> bool {
        error.is_not_lazy() && self.may_index()
    }

    /// Pulls all layers of an image or artifact that this node has not hashed, and publishes its
    /// index if the operator wants that. `show` gets the progress when it has begun, and keeps it
    /// until the image is served.
    pub(in crate::daemon) async fn pull_layers(
        &self,
        request: &MountRequest,
        name: &ImageName,
        manifest: &Arc<Manifest>,
        show: impl FnOnce(PullProgress),
    ) -> Result<(), DaemonError> {
        let options = self.admission.options(request);
        self.admission.admit(request, manifest).await?;
        let repository = lazuli_registry::open(name, &options)?;
        let image = self.ordinaries.image(request, manifest.clone(), None, &*repository, &options);
        let image = image.await?;
        may_be_shown(&image).map_err(|source| {
            let image = name.to_string();
            DaemonError::Prefix { image, source }
        })?;
        let layers = image.layers.iter();
        let missing = layers.filter(|layer| !self.ordinaries.store.is_proven(layer));
        let missing = biggest_first(missing);
        let failed = |layer: &ClaimedLayer, why: String| {
            let (image, layer) = (name.to_string(), layer.digest());
            let why = why.trim_start_matches(&format!("layer {layer}: ")).to_owned();
            DaemonError::NotPulled { image, layer, why }
        };
        if let Some(layer) = missing.iter().find(|layer| !layer.is_readable()) {
            let kind = &layer.descriptor.media_type;
            let why = format!("layers of the type {kind} cannot be indexed; see `lazuli convert`");
            return Err(failed(layer, why));
        }
        let (repository_key, open) = (key_of(&*repository), OpenBlobs::default());
        let by = PullFor::Command(open.clone());
        let begin = |layer| self.ordinaries.begin_pull(layer, &repository, None, &by);
        let begun: Vec<_> = missing.into_iter().map(|layer| (layer, begin(layer))).collect();
        let pulls = &self.ordinaries.pulls;
        let arriving = begun.iter().filter_map(|(layer, _)| {
            let fetched = pulls.fetched(&repository_key, layer.key())?;
            Some(ArrivingLayer { size: layer.descriptor.size, fetched })
        });
        show(PullProgress::new(arriving.collect(), open));
        let pulled = begun.into_iter().map(async |(layer, mut is_own)| {
            loop {
                let outcome = pulls.ended(&repository_key, layer.key()).await;
                if self.ordinaries.store.is_proven(layer) {
                    return Ok(());
                }
                match outcome {
                    // containerd's pulls, and those of other images, end for reasons of their own.
                    _ if !is_own => is_own = begin(layer),
                    Some(Err(error)) => return Err(failed(layer, error.why.to_string())),
                    Some(Ok(())) | None => {
                        return Err(failed(layer, LayerError::Ended.to_string()));
                    }
                }
            }
        });
        try_join_all(pulled).await?;
        self.ordinaries.publish_once(&image, false, &repository, None);
        Ok(())
    }
}

/// Checks before a pull what would keep the image from being shown after it.
fn may_be_shown(image: &Ordinary) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    if image.layers.len() != image.manifest.parsed.layers.len() {
        return Err("its configuration lists other layers than its manifest".into());
    }
    serde_json::from_slice::<IgnoredAny>(&image.config)
        .map_err(|error| format!("its configuration is not JSON: {error}"))?;
    let forms = image.layers.iter().map(|layer| (layer.digest(), layer.file.is_some()));
    Ok(check_forms(forms)?)
}

impl Ordinaries {
    /// Returns whether this node has hashed all layers of an image or artifact.
    pub(super) fn has_hashed(&self, manifest: &Manifest) -> bool {
        let layers = ClaimedLayer::by_manifest(&manifest.parsed);
        let is_proven = |layer: &ClaimedLayer| {
            self.store.layer(&layer.key()).is_some_and(|record| record.is_proven)
        };
        !layers.is_empty() && layers.iter().all(is_proven)
    }
}
