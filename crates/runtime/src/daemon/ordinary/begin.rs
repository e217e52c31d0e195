//! Starts pulls of layers that have no index.

use std::{cmp::Reverse, sync::Arc};

use lazuli_image::Digest;
use lazuli_registry::Repository;

use super::{
    claimed_layer::ClaimedLayer,
    pull::Pull,
    pulls::PullFor,
    state::{Ordinaries, Ordinary},
    vouched::Vouched,
    whole_layer::LayerError,
};
use crate::daemon::admission::logins::Lent;

impl Ordinaries {
    /// Begins to pull all layers of an image that are not known, for containerd.
    pub(super) fn begin_pulls(
        &self,
        image: &Ordinary,
        vouched: &Vouched,
        repository: &Arc<dyn Repository>,
        login: Option<&Arc<Lent>>,
    ) {
        let store = &self.store;
        for layer in biggest_first(image.layers.iter()) {
            let is_here = |index: &Digest| !store.is_wrong(index);
            let record = store.layer(&layer.key()).filter(|record| record.is_proven);
            let is_stated = vouched.of(layer).is_some_and(|vouched| is_here(&vouched.stated.index));
            let is_proven = record.is_some_and(|record| store.has_index(&record.index));
            if !is_proven && !is_stated && layer.is_readable() {
                self.begin_pull(layer, repository, login, &PullFor::Containerd);
            }
        }
    }

    /// Begins to pull a layer. Returns whether it does, and did not find it being pulled.
    pub(super) fn begin_pull(
        &self,
        layer: &ClaimedLayer,
        repository: &Arc<dyn Repository>,
        login: Option<&Arc<Lent>>,
        by: &PullFor,
    ) -> bool {
        let repository_key = key_of(&**repository);
        let Some(begun) = self.pulls.begin(&repository_key, layer.key(), by) else { return false };
        let pull = Pull {
            repository: repository.clone(),
            cache: self.cache.clone(),
            store: self.store.clone(),
            repository_key: repository_key.clone(),
            by: by.clone(),
            fetched: begun.fetched,
        };
        let (pulls, login, layer) = (self.pulls.clone(), login.cloned(), layer.clone());
        let by = by.clone();
        tokio::spawn(async move {
            let _login = login;
            let pulled = match pulls.slot(&repository_key, &by).await {
                Some(_slot) => pull.layer(&layer).await,
                None => Err(LayerError::Busy),
            };
            match (&pulled, &by) {
                (Ok(()), _) => tracing::info!(layer = %layer.digest(), "pulled and indexed"),
                (Err(error), PullFor::Containerd) => {
                    tracing::info!(layer = %layer.digest(), %error, "left to containerd");
                }
                (Err(error), PullFor::Command(_)) => {
                    tracing::warn!(layer = %layer.digest(), %error, "not pulled");
                }
            }
            begun.ended.send_replace(Some(pulled.map_err(Into::into)));
        });
        true
    }
}

/// The order in which layers are pulled. Few are at a time, and one thread reads each, so the
/// biggest one would otherwise be alone in the end.
pub(super) fn biggest_first<'a>(
    layers: impl Iterator<Item = &'a ClaimedLayer>,
) -> Vec<&'a ClaimedLayer> {
    let mut layers: Vec<_> = layers.collect();
    layers.sort_by_key(|layer| Reverse(layer.descriptor.size));
    layers
}

/// The key of a repository in pulls and their queues.
pub(super) fn key_of(repository: &dyn Repository) -> String {
    repository.repository_name().unwrap_or_else(|| repository.describe())
}

#[cfg(test)]
mod tests {
    use lazuli_image::{
        Algorithm,
        oci::{Descriptor, media_type},
    };

    use super::*;

    #[test]
    fn the_biggest_layer_is_pulled_first_and_equal_ones_in_their_order() {
        let layer = |number: u8, size| {
            let digest = Algorithm::Sha256.digest(&[number]);
            let descriptor = Descriptor::plain(media_type::LAYER_GZIP, digest, size);
            ClaimedLayer { descriptor, diff_id: None, file: None }
        };
        let layers = [layer(0, 40), layer(1, 20), layer(2, 60), layer(3, 20)];
        let order: Vec<_> = biggest_first(layers.iter()).iter().map(|l| l.digest()).collect();
        assert_eq!(order, [2, 0, 1, 3].map(|number: usize| layers[number].digest()));
    }
}
